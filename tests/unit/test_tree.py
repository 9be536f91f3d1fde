"""Draft trees: layout, greedy acceptance and losslessness."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor

from multirate.decode.costs import DraftLength, Outcome, StepCosts
from multirate.decode.engine import Engine
from multirate.decode.results import GenerationResult
from multirate.decode.rivals import EarlyExitDrafter
from multirate.decode.tree import accept_tree, tree_layout
from multirate.models.base import BaseModel


def test_layout_by_hand() -> None:
    depths, mask = tree_layout(2, 2)  # last, c1, c2, s1, s2
    assert depths.tolist() == [0, 1, 2, 1, 2]
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1],
    ]
    depths, mask = tree_layout(3, 1)
    assert depths.tolist() == [0, 1, 2, 3] and torch.equal(mask, torch.ones(4, 4).tril().bool())


def outcome(
    drafts: list[int], siblings: list[list[int]], targets: list[int], length: int | None = None
) -> tuple[list[int], int, bool]:
    found = accept_tree(
        torch.tensor([drafts]),
        torch.tensor([siblings]),
        torch.tensor([len(drafts) if length is None else length]),
        torch.tensor([targets]),
    )
    block = found.acceptance.blocks(found.drafts)[0]
    return block, int(found.entry), bool(found.rank >= 0)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        # entries: last, c1 = 11, c2 = 12, siblings of c1 (21, 31), of c2 (22, 32)
        ([11, 12, 13, 0, 0, 0, 0], ([11, 12, 13], 2, False)),  # the whole chain and the bonus
        ([11, 32, 0, 0, 0, 0, 77], ([11, 32, 77], 6, True)),  # second runner-up of c2
        ([21, 0, 0, 88, 0, 0, 0], ([21, 88], 3, True)),  # runner-up of c1; the chain ends there
        ([31, 12, 0, 0, 99, 0, 0], ([31, 99], 4, True)),
        ([55, 12, 0, 0, 0, 0, 0], ([55], 0, False)),  # nothing fits
        (
            [11, 21, 0, 5, 5, 5, 5],
            ([11, 21], 1, False),
        ),  # a sibling of another depth does not count
    ],
)
def test_acceptance_by_hand(targets: list[int], expected: tuple[list[int], int, bool]) -> None:
    assert outcome([11, 12], [[21, 31], [22, 32]], targets) == expected


def test_nothing_stays_beyond_a_rows_own_length() -> None:
    assert outcome([11, 12], [[21], [22]], [11, 12, 13, 0, 0], length=1) == ([11, 12], 1, False)
    assert outcome([11, 12], [[21], [22]], [11, 22, 13, 0, 7], length=1) == ([11, 22], 1, False)
    assert outcome([11, 12], [[21], [22]], [21, 0, 0, 7, 0], length=0) == ([21], 0, False)


def brute_force(drafts: Tensor, siblings: Tensor, length: int, targets: Tensor) -> list[int]:
    """Walk the tree token by token."""
    k, others = siblings.shape
    block, entry = [], 0
    for depth in range(length):
        block.append(int(targets[entry]))
        if block[-1] == int(drafts[depth]):
            entry = depth + 1
            continue
        hits = (siblings[depth] == block[-1]).nonzero()
        if len(hits) == 0:
            return block
        return [*block, int(targets[1 + k + depth * others + int(hits[0])])]
    return [*block, int(targets[entry])]


def test_acceptance_against_a_walk() -> None:
    g = torch.Generator().manual_seed(0)
    sibling_hits = 0
    for _ in range(300):
        k, width = (
            int(torch.randint(1, 5, (), generator=g)),
            int(torch.randint(2, 5, (), generator=g)),
        )
        ranked = torch.rand(3, k, 6, generator=g).argsort(-1)[..., :width]
        targets = torch.randint(0, 6, (3, 1 + k * width), generator=g)
        lengths = torch.randint(0, k + 1, (3,), generator=g)
        found = accept_tree(ranked[..., 0], ranked[..., 1:], lengths, targets)
        blocks = found.acceptance.blocks(found.drafts)
        for r in range(3):
            expected = brute_force(ranked[r, :, 0], ranked[r, :, 1:], int(lengths[r]), targets[r])
            assert blocks[r] == expected
        sibling_hits += int((found.rank >= 0).sum())
    assert sibling_hits > 100


def passes(results: list[GenerationResult]) -> int:
    return sum(r.speculation.num_drafts for r in results if r.speculation)


@pytest.mark.parametrize(
    "name", ["llama", "mistral", "gemma3_text", "qwen3", "gemma2", "llama-eager"]
)
@pytest.mark.parametrize("width", [2, 4])
def test_trees_write_what_plain_decoding_writes(name: str, width: int) -> None:
    """Rows of different lengths, windows shorter than the text, and runners-up that are accepted."""
    base = BaseModel(tiny_model(name))
    # Few layers guess badly, so that chains break and runners-up are needed.
    engine = Engine(base, drafter=EarlyExitDrafter(base, 2))
    prompts = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [14, 15, 16, 17]]
    settings = {"max_new_tokens": 24, "ignore_eos": True}
    plain = engine.generate(prompts, strategy="plain", **settings)
    for drafts in (1, 3):
        trees = engine.generate(prompts, num_draft_tokens=drafts, draft_width=width, **settings)
        chains = engine.generate(prompts, num_draft_tokens=drafts, **settings)
        assert [t.token_ids for t in trees] == [p.token_ids for p in plain]
        assert [c.token_ids for c in chains] == [p.token_ids for p in plain]
        assert passes(trees) < passes(chains)


def test_a_tree_as_wide_as_the_vocabulary_is_always_right() -> None:
    """Each cycle of one draft step yields two tokens."""
    base = BaseModel(tiny_model("llama", vocab_size=16))
    engine = Engine(base, drafter=EarlyExitDrafter(base, 1))
    found = engine.generate(
        [3, 4, 5], num_draft_tokens=1, draft_width=16, max_new_tokens=21, ignore_eos=True
    )
    plain = engine.generate([3, 4, 5], strategy="plain", max_new_tokens=21, ignore_eos=True)
    assert found.token_ids == plain.token_ids
    assert found.speculation.num_drafts == 10 == found.speculation.num_accepted_tokens


def test_trees_are_for_greedy_decoding_without_a_view_of_the_text() -> None:
    base = BaseModel(tiny_model("llama"))
    engine = Engine(base, drafter=EarlyExitDrafter(base, 2))
    settings = {"num_draft_tokens": 2, "draft_width": 3, "max_new_tokens": 12, "ignore_eos": True}
    penalised = engine.generate([3, 4, 5], repetition_penalty=1.3, **settings)
    plain = engine.generate(
        [3, 4, 5], strategy="plain", repetition_penalty=1.3, max_new_tokens=12, ignore_eos=True
    )
    assert penalised.token_ids == plain.token_ids
    for result in (penalised, engine.generate([3, 4, 5], temperature=1.0, seed=0, **settings)):
        spec = result.speculation
        assert spec.num_draft_tokens <= 2 * spec.num_drafts


def test_the_width_pays_where_rows_are_cheap_and_runners_up_are_right() -> None:
    # Two drafts of four: 1 + .748 + .6 x .748 = 2.197 tokens in 14 s, .157; one .146, three .154.
    flat = StepCosts(verify=(10.0,) * 13, draft=2.0)
    steep = StepCosts(verify=tuple(10.0 + 5 * n for n in range(13)), draft=2.0)
    assert DraftLength(flat, max_drafts=8, prior=[0.6], width=None).best()[:2] == (2, 4)
    assert DraftLength(steep, max_drafts=8, prior=[0.4], width=None).best()[1] == 1
    length = DraftLength(flat, max_drafts=8, prior=[0.4], width=None)
    assert length.rescue(1) == 0 and abs(length.rescue(4) - 0.37) < 1e-9
    for _ in range(200):  # runners-up are never right
        length.update([Outcome(drafted=1, accepted=0)], width=4)
    assert length.rescue(4) < 0.06
    for _ in range(200):  # the second choice always is
        length.update([Outcome(drafted=1, accepted=1, rank=0)], width=4)
    assert length.rescue(2) > 0.8 and length.acceptance()[0] < 0.1
