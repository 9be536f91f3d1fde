"""Draft trees: shape, greedy acceptance, and losslessness of any tree that a drafter may give."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from test_stream_steps import shaken
from tiny_models import MAX_POSITIONS, VOCABULARY, tiny_model
from torch import Tensor

from multirate.config.generation import GenerationOptions
from multirate.decode import loop
from multirate.decode.acceptance import accept_greedy
from multirate.decode.costs import StepCosts
from multirate.decode.draft_length import DraftLength, EvenGrowth
from multirate.decode.drafter import Draft, Drafter, DraftRequest
from multirate.decode.engine import Engine
from multirate.decode.outcomes import Outcome
from multirate.decode.results import GenerationResult
from multirate.decode.rivals import EarlyExitDrafter
from multirate.decode.sampling import Sampler
from multirate.decode.stream import AcceleratorDrafter
from multirate.decode.tree import Tree, caterpillar, path_to
from multirate.models.arena import KVArena
from multirate.models.base import BaseModel
from multirate.streams.accelerator import Accelerator, Carried

CPU = torch.device("cpu")


def test_shape_by_hand() -> None:
    tree = Tree.of([[-1, 0, -1, 1, 2]], CPU)
    assert tree.parents.tolist() == [[0, 1, 0, 2, 3]]
    assert tree.depths.tolist() == [[0, 1, 2, 1, 3, 2]]
    assert tree.mask[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 0],
        [1, 1, 1, 0, 1, 0],
        [1, 0, 0, 1, 0, 1],
    ]
    assert path_to(4, tree.parents[0].tolist()) == [1, 2, 4] and path_to(0, [0]) == []


def test_a_long_chain_is_the_tree_of_its_parents() -> None:
    for n in (0, 1, 2, 3, 4, 5, 16, 33):
        tree, chain = Tree.of([list(range(-1, n - 1))], CPU), Tree.chain(n, CPU)
        for made, known in zip(tree.__dict__.values(), chain.__dict__.values(), strict=True):
            assert torch.equal(made, known)


def test_caterpillar_by_hand() -> None:
    tokens, parents = caterpillar(torch.tensor([[11, 12]]), torch.tensor([[[21, 31], [22, 32]]]))
    assert tokens.tolist() == [[11, 12, 21, 31, 22, 32]]
    assert parents.tolist() == [-1, 0, -1, -1, 0, 0]


def walk(tokens: list[int], parents: list[int], length: int, targets: list[int]) -> list[int]:
    """What greedy decoding writes along the tree, token by token; parents are block entries."""
    block, entry = [targets[0]], 0
    while True:
        hits = [
            i + 1
            for i in range(length)
            if parents[i] == entry and tokens[i] == block[-1]
        ]  # fmt: skip
        if not hits:
            return block
        entry = hits[0]
        block.append(targets[entry])


def test_acceptance_against_a_walk() -> None:
    """Random trees, another for each row; siblings may be equal here, the eldest then counts."""
    g = torch.Generator().manual_seed(0)
    branched = 0
    for _ in range(300):
        n = int(torch.randint(0, 9, (), generator=g))
        tokens = torch.randint(0, 3, (4, n), generator=g)
        parents = (
            torch.stack([torch.randint(-1, max(i, 0), (4,), generator=g) for i in range(n)], 1)
            if n
            else torch.empty(4, 0, dtype=torch.long)
        )
        for i in range(n):  # no token twice below one parent
            for r in range(4):
                same = (tokens[r, :i] == tokens[r, i]) & (parents[r, :i] == parents[r, i])
                if same.any():
                    tokens[r, i] = 5 + i
        targets = torch.randint(0, 3, (4, n + 1), generator=g)
        lengths = torch.randint(0, n + 1, (4,), generator=g)
        blocks, paths = accept_greedy(
            *(x.tolist() for x in (tokens, parents, lengths, targets))
        )  # fmt: skip
        for r in range(4):
            up = (parents[r] + 1).tolist()
            expected = walk(tokens[r].tolist(), up, int(lengths[r]), targets[r].tolist())
            assert blocks[r] == expected
            assert [int(tokens[r, i - 1]) for i in paths[r]] == expected[:-1]
            branched += paths[r] != list(range(1, len(paths[r]) + 1))
    assert branched > 100


class Forest(Drafter):
    """Random trees, another for each row and cycle, some of whose branches are the true output.

    Args:
        outputs: what each prompt is continued with by plain decoding.
        entries: drafts of a row, different for each.
        shared: the same shape for all rows.
    """

    def __init__(
        self, outputs: dict[tuple[int, ...], list[int]], entries: int, *, shared: bool
    ) -> None:
        self.outputs, self.entries, self.shared = outputs, entries, shared
        self.generator = torch.Generator().manual_seed(1)

    def draft(self, request: DraftRequest) -> Draft:
        n, g = self.entries, self.generator
        rows = len(request.ids)
        parents = [
            [int(torch.randint(-1, i, (), generator=g)) if i else -1 for i in range(n)]
        ] * rows
        if not self.shared:
            parents = [
                [int(torch.randint(-1, i, (), generator=g)) if i else -1 for i in range(n)]
                for _ in range(rows)
            ]
        tokens, lengths = [], []
        for ids, up in zip(request.ids, parents, strict=True):
            text, output = next(
                (p, o) for p, o in self.outputs.items() if tuple(ids[: len(p)]) == p
            )
            ahead = [*output[len(ids) - len(text) :], *[0] * n]
            depth: list[int] = []
            taken: set[tuple[int, int]] = set()
            row = []
            for parent in up:
                depth.append(0 if parent < 0 else depth[parent] + 1)
                right = int(torch.randint(0, 3, (), generator=g)) > 0
                token = (
                    ahead[depth[-1]]
                    if right
                    else int(torch.randint(0, VOCABULARY, (), generator=g))
                )
                while (parent, token) in taken:
                    token = (token + 1) % VOCABULARY
                taken.add((parent, token))
                row.append(token)
            tokens.append(row)
            lengths.append(int(torch.randint(0, n + 1, (), generator=g)))
        up_tensor = torch.tensor(parents[0] if self.shared else parents)
        return Draft(torch.tensor(tokens), up_tensor, lengths=lengths)


def forest(base: BaseModel, prompts: Sequence[list[int]], *, entries: int, shared: bool, new: int,
           **settings: object) -> tuple[list[GenerationResult], list[GenerationResult]]:  # fmt: skip
    plain = Engine(base).generate(list(prompts), max_new_tokens=new, ignore_eos=True, **settings)
    outputs = {tuple(p): r.token_ids for p, r in zip(prompts, plain, strict=True)}
    engine = Engine(base, drafter=Forest(outputs, entries, shared=shared))
    found = engine.generate(
        list(prompts), max_new_tokens=new, num_draft_tokens=8, ignore_eos=True, **settings
    )
    return plain, found


PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [14, 15, 16, 17]]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "name", ["llama", "mistral", "gemma3_text", "qwen3", "gemma2", "llama-eager", "mixtral"]
)
def test_any_tree_writes_what_plain_decoding_writes(name: str, shared: bool) -> None:
    """Other trees for each row, accepted paths that lie scattered, windows shorter than the text."""
    plain, found = forest(BaseModel(tiny_model(name)), PROMPTS, entries=8, shared=shared, new=40)
    assert [f.token_ids for f in found] == [p.token_ids for p in plain]
    accepted = sum(f.speculation.num_accepted_tokens for f in found if f.speculation)
    assert accepted > 30


def test_trees_up_to_the_end_of_the_context() -> None:
    base = BaseModel(tiny_model("llama"))
    plain, found = forest(base, PROMPTS, entries=8, shared=False, new=MAX_POSITIONS)
    assert [f.token_ids for f in found] == [p.token_ids for p in plain]
    assert [len(f.token_ids) + f.prompt_tokens for f in found] == [MAX_POSITIONS] * 3


@pytest.mark.parametrize("new", [1, 2, 3, 5])
def test_a_limit_inside_an_accepted_path(new: int) -> None:
    plain, found = forest(BaseModel(tiny_model("llama")), PROMPTS, entries=8, shared=False, new=new)
    assert [f.token_ids for f in found] == [p.token_ids for p in plain]
    for f in found:
        assert f.speculation is not None and f.speculation.num_accepted_tokens <= max(0, new - 1)


def test_an_end_token_inside_an_accepted_path() -> None:
    """The row ends at it, whatever of its path stands behind, and the others go on."""
    base = BaseModel(tiny_model("llama"))
    outputs = {
        tuple(p): r.token_ids
        for p, r in zip(PROMPTS, Engine(base).generate(PROMPTS, max_new_tokens=30, ignore_eos=True),
                        strict=True)
    }  # fmt: skip
    base.model.generation_config.eos_token_id = next(iter(outputs.values()))[11]
    plain = Engine(base).generate(PROMPTS, max_new_tokens=30)
    assert min(len(p.token_ids) for p in plain) < 30
    engine = Engine(base, drafter=Forest(outputs, 8, shared=False))
    found = engine.generate(PROMPTS, max_new_tokens=30, num_draft_tokens=8)
    assert [f.token_ids for f in found] == [p.token_ids for p in plain]
    assert [f.finish_reason for f in found] == [p.finish_reason for p in plain]


def test_processors_see_the_path_of_each_branch() -> None:
    plain, found = forest(
        BaseModel(tiny_model("llama")), PROMPTS, entries=8, shared=False, new=30,
        repetition_penalty=1.3,
    )  # fmt: skip
    assert [f.token_ids for f in found] == [p.token_ids for p in plain]
    assert sum(f.speculation.num_accepted_tokens for f in found if f.speculation) > 20


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


# ------------------------------------------------------------------ growing trees

FLAT = StepCosts(verify=tuple(100 + 0.1 * n for n in range(17)), draft=(0.1, 0.11, 0.12, 0.13))
STEEP = StepCosts(verify=tuple(100 + 20.0 * n for n in range(17)), draft=(0.1, 0.11, 0.12, 0.13))


def grown(
    base: BaseModel, preset: str, costs: StepCosts, **settings: object
) -> list[GenerationResult]:
    engine = Engine(base, accelerator=shaken(base, preset))
    engine.step_costs = lambda **_: costs  # type: ignore[method-assign]
    return engine.generate(PROMPTS, max_new_tokens=40, ignore_eos=True, **settings)


@pytest.mark.parametrize("preset", ["carry", "paper"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "llama-eager"])
def test_grown_trees_write_what_plain_decoding_writes(name: str, preset: str) -> None:
    """Both kinds of accelerated layer, windows shorter than the text, soft caps."""
    base = BaseModel(tiny_model(name))
    plain = Engine(base).generate(PROMPTS, max_new_tokens=40, ignore_eos=True)
    for costs in (FLAT, STEEP):
        found = grown(base, preset, costs)
        assert [f.token_ids for f in found] == [p.token_ids for p in plain]
    tall = [f.speculation for f in grown(base, preset, FLAT) if f.speculation]
    assert sum(s.num_draft_tokens for s in tall) > 2 * sum(s.num_drafts for s in tall)


def true_engine(name: str) -> tuple[Engine, BaseModel]:
    """A drafter that is the model itself, so that the likeliest path is always right."""
    base = BaseModel(tiny_model(name))
    engine = Engine(base, drafter=EarlyExitDrafter(base, base.num_layers))
    engine.step_costs = lambda **_: FLAT  # type: ignore[method-assign]
    return engine, base


def test_the_likeliest_path_is_drafted() -> None:
    engine, _ = true_engine("llama")
    found = engine.generate(PROMPTS[0], max_new_tokens=41, ignore_eos=True)
    assert found.token_ids == engine.generate(
        PROMPTS[0], strategy="plain", max_new_tokens=41, ignore_eos=True
    ).token_ids  # fmt: skip
    assert found.speculation.mean_acceptance_length > 2


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3"])
def test_a_level_is_scored_as_each_of_its_paths_alone(name: str) -> None:
    """Several nodes a step, with their own slots, masks and states: the same as chains one by one."""
    base = BaseModel(tiny_model(name))
    stream = shaken(base, "carry")
    drafter = AcceleratorDrafter(stream)
    sampler = Sampler(GenerationOptions(), device="cpu")
    with torch.inference_mode():
        arena = base.arena(rows=3, max_len=40)
        _, states = loop.prefill(base, PROMPTS, arena, drafter.carry_layers)
        lengths = [len(p) for p in PROMPTS]
        last = torch.tensor([3, 4, 5])
        request = DraftRequest(
            last, lengths, states, arena, [[*p, 3 + i] for i, p in enumerate(PROMPTS)], count=4,
            sampler=sampler, go_on=lambda *_: True, width=3, growth=EvenGrowth(3),
        )  # fmt: skip
        tree = drafter.draft(request)
        assert tree.steps == (1, 3, 3, 3) and tree.chances is not None
        parents = tree.parent_lists()
        inner = sorted({i for i in parents[0] if i >= 0})
        assert len(inner) > 5
        for row in range(3):
            for node in {i for i in parents[row] if i >= 0}:
                path = [node]
                while parents[row][path[0]] >= 0:
                    path.insert(0, parents[row][path[0]])
                q = chain_probabilities(stream, states, arena, lengths, row, [int(last[row]), *(
                    int(tree.tokens[row, i]) for i in path)])  # fmt: skip
                for child in (i for i, p in enumerate(parents[row]) if p == node):
                    claim = tree.chances[row][child]
                    assert claim == pytest.approx(float(q[tree.tokens[row, child]]), abs=1e-5)


def chain_probabilities(
    stream: Accelerator, states: dict[int, Tensor], arena: KVArena, lengths: Sequence[int], row: int,
    tokens: Sequence[int],
) -> Tensor:  # fmt: skip
    """What one row's stream says after a chain of tokens."""
    carried = Carried(tuple(states[i] for i in stream.carry_layers), own=False)
    for made, token in enumerate(tokens):
        block = stream.base.block([n + made for n in lengths], 1)
        prefix = stream.prefix(lengths, block.positions)
        ids = torch.full((len(lengths), 1), token)
        logits, carried = stream.step(ids, carried, block, arena, prefix)
    return logits[row, 0].softmax(-1)


def of(tokens: list[int], parents: list[int], chances: list[float]) -> Draft:
    return Draft.of_rows(
        [tokens], [parents], device=torch.device("cpu"), chances=[chances], steps=(1,)
    )


def test_what_is_kept_is_worth_its_rows() -> None:
    """Values of the paths: 0.6, 0.3, 0.36, 0.03, 0.18."""
    draft = of([1, 2, 3, 4, 5], [-1, -1, 0, 1, 2], [0.6, 0.3, 0.6, 0.1, 0.5])

    def kept(row: float) -> list[int]:
        costs = StepCosts(tuple(10 + row * n for n in range(17)), (1e-9,))
        length = DraftLength(costs, max_drafts=4, prior=[1e-9], width=None)
        assert length.price() == pytest.approx(0.1)
        return length.keep(draft).tokens[0].tolist()

    assert kept(0.2) == [1, 3, 5, 2, 4]  # depth first, the likeliest path in front
    assert kept(1.0) == [1, 3, 5, 2]
    assert kept(2.5) == [1, 3, 2]
    assert kept(3.5) == [1, 3]
    assert kept(5.0) == [1]
    assert kept(7.0) == []
    chain = of([1, 2, 3], [-1, 0, -1], [0.9, 0.9, 0.01])
    assert chain.pruned([[0.9, 0.81, 0.01]], 2).parents is None


def test_rows_keep_trees_of_their_own() -> None:
    draft = Draft.of_rows(
        [[1, 2, 3], [4, 5, 6]], [[-1, 0, -1], [-1, 0, -1]], device=torch.device("cpu"),
        chances=[[0.9, 0.9, 0.1], [0.5, 0.1, 0.4]], steps=(1,),
    )  # fmt: skip
    kept = draft.pruned([[0.9, 0.81, 0.1], [0.5, 0.05, 0.4]], 2)
    assert kept.tokens.tolist() == [[1, 2], [4, 6]]
    assert kept.parent_lists() == [[-1, 0], [-1, -1]]


def test_levels_widen_where_it_pays() -> None:
    costs = StepCosts((10.0,) + (10.5,) * 16, (1.0, 1.0, 1.0, 5.0))
    length = DraftLength(costs, max_drafts=4, prior=[0.5], width=None)
    assert length.beam(0, [[1.0]], 1) == 1
    assert length.beam(1, [[0.9, 0.5, 0.4, 0.4]], 4) == 3  # the fourth would cost four seconds more
    assert length.beam(1, [[0.9, 0.5, 0.4, 0.4]], 2) == 2
    assert length.beam(1, [[0.2, 0.01, 0.01, 0.01]], 4) == 0
    assert length.beam(4, [[1.0]], 4) == 0  # deep enough


def test_claims_are_corrected_by_what_was_seen() -> None:
    length = DraftLength(FLAT, max_drafts=4, prior=[0.5], width=None)
    assert length.chance(0.6) == 0.6
    draft = of([1, 2, 3], [-1, -1, 1], [0.6, 0.3, 0.6])
    for _ in range(200):  # the second is right, the first never, what follows the second is
        length.update([Outcome(2, 2)], draft, [[2, 3]])
    assert length.chance(0.3) > 0.7 and length.chance(0.6) == pytest.approx(0.5, abs=0.02)
    assert length.chance(0.05) == pytest.approx(0.05)  # of which nothing was seen
    assert length.gain()[1] > 1.7  # two tokens a cycle
