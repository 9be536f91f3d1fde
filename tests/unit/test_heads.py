"""Medusa and DEED: each does what its paper says, and neither changes the output."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch
from test_rivals import exact
from tiny_models import NUM_LAYERS, VOCABULARY, tiny_model
from torch.nn import functional as F
from training import text_rows

from multirate.config.errors import MultirateError
from multirate.config.generation import GenerationOptions
from multirate.decode.deed import DeedDrafter, ExitHeads, default_exits
from multirate.decode.drafter import Drafter, DraftRequest
from multirate.decode.engine import Engine
from multirate.decode.heads import CONFIG_FILE, DraftHead
from multirate.decode.loop import prefill
from multirate.decode.medusa import HEADS, MedusaDrafter, MedusaHeads, sparse_tree
from multirate.decode.sampling import Sampler
from multirate.models.base import BaseModel
from multirate.models.packed import can_pack
from multirate.train.batches import batches
from multirate.train.heads import (
    HeadOptions,
    judge_deed,
    judge_medusa,
    read_states,
    train_deed,
    train_medusa,
)

BASE = BaseModel(tiny_model("llama"))
BASE.model.requires_grad_(False)
PROMPTS = [[5, 9, 11, 7, 5, 9, 11], [8, 3, 8], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29]]
NEW = 20
EVERY = torch.arange(VOCABULARY)
ACCURACY = ((0.5, 0.2, 0.1), (0.4, 0.2, 0.1), (0.3, 0.1, 0.05), (0.2, 0.1, 0.01))
OPTIONS = HeadOptions(tokens=600, draft_vocab_size=60, epochs=2, batch=32, batch_tokens=96)


def medusa(base: BaseModel = BASE) -> MedusaDrafter:
    heads = MedusaHeads(base, torch.arange(3, VOCABULARY).flip(0))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in heads.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return MedusaDrafter(heads.requires_grad_(False), ACCURACY)


def deed(
    base: BaseModel = BASE, *, exits: tuple[int, ...] = (1, 2, 4), confidence: float = 0.05
) -> DeedDrafter:
    heads = ExitHeads(base, EVERY, exits)
    with torch.no_grad():
        for adapter in heads.adapters:
            adapter.weight.copy_(torch.eye(base.hidden_size))
            adapter.bias.zero_()
    return DeedDrafter(heads.requires_grad_(False), confidence=confidence)


def request(ids: list[list[int]], **changes: object) -> DraftRequest:
    """What the loop asks after a prefill of all but each row's last token."""
    arena = BASE.arena(rows=len(ids), max_len=32)
    _, states = prefill(BASE, [row[:-1] for row in ids], arena, [NUM_LAYERS])
    asked = DraftRequest(
        torch.tensor([row[-1] for row in ids]), [len(row) - 1 for row in ids], states, arena, ids,
        count=4, sampler=Sampler(GenerationOptions(), device="cpu"), go_on=lambda *_: True,
    )  # fmt: skip
    return replace(asked, **changes)


@pytest.mark.parametrize("make", [medusa, deed])
@pytest.mark.parametrize("drafts, width", [(1, 1), (4, 1), (4, 4)])
def test_greedy_output_is_the_plain_one(
    make: Callable[[], Drafter], drafts: int, width: int
) -> None:
    engine = Engine(BASE, drafter=make())
    options = GenerationOptions(max_new_tokens=NEW, ignore_eos=True)
    plain = [engine.generate(p, options, strategy="plain").token_ids for p in PROMPTS]
    results = engine.generate(PROMPTS, options, num_draft_tokens=drafts, draft_width=width)
    assert [r.token_ids for r in results] == plain
    assert sum(r.speculation.num_draft_tokens for r in results) > 0


@pytest.mark.parametrize("make", [medusa, deed])
def test_draft_length_by_measured_costs(make: Callable[[], Drafter]) -> None:
    engine = Engine(BASE, drafter=make())
    plain = engine.generate(PROMPTS[0], max_new_tokens=NEW, ignore_eos=True, strategy="plain")
    result = engine.generate(PROMPTS[0], max_new_tokens=NEW, ignore_eos=True)
    assert result.token_ids == plain.token_ids


def test_sampling_keeps_the_distribution() -> None:
    """Medusa's tree is not drawn at random: acceptance must not favour what it holds."""
    base = BaseModel(tiny_model("llama", vocab_size=16, seed=3))
    heads = MedusaHeads(base, torch.arange(16))
    engine = Engine(base, drafter=MedusaDrafter(heads.requires_grad_(False), ACCURACY))
    prompt, counts = [3, 7, 3, 11, 3, 7], torch.zeros(16, 16)
    for seed in range(4):
        results = engine.generate(
            [prompt] * 2000, max_new_tokens=3, ignore_eos=True, temperature=0.8,
            num_draft_tokens=2, draft_width=3, seed=seed,
        )  # fmt: skip
        for result in results:
            counts[result.token_ids[1], result.token_ids[2]] += 1
    expected = torch.from_numpy(exact(base, prompt, 0.8)).float()
    spread = (counts / counts.sum() - expected).abs().sum()
    assert spread < 0.25  # 8,000 draws over 256 pairs; half of it is usual


# ------------------------------------------------------------------ Medusa


def test_a_head_starts_as_the_base_models_own() -> None:
    """W zero: head i says what the LM head says at its state (the paper, section 2.1.1)."""
    heads = MedusaHeads(BASE, EVERY)
    h = torch.randn(5, BASE.hidden_size, generator=torch.Generator().manual_seed(0))
    logits = heads(h)
    assert logits.shape == (5, HEADS, VOCABULARY)
    for i in range(HEADS):
        torch.testing.assert_close(logits[:, i], BASE.head(h))
    trained = medusa().heads
    x, block = BASE.final_norm(h), trained.blocks[2]
    by_hand = BASE.lm_head(x + F.silu(x @ block.weight.T + block.bias))
    torch.testing.assert_close(trained(h)[:, 2], by_hand[:, trained.head.ids])


def test_heads_read_the_state_before_the_last_token_and_guess_in_order() -> None:
    drafter = medusa()
    ids = [[5, 9, 11, 7, 8], [4, 6, 3]]
    with torch.inference_mode():
        draft = drafter.draft(request(ids, width=10))
        assert draft.parents.tolist()[:4] == [-1, 0, 1, 2]  # the all-first path stands in front
        for row, text in enumerate(ids):
            h = BASE.model.model(torch.tensor([text[:-1]]), output_hidden_states=True)
            x = h.last_hidden_state[0, -1]  # normed already
            for i, block in enumerate(drafter.heads.blocks):
                guess = BASE.lm_head(x + F.silu(block(x)))
                guess[:3] = -torch.inf  # not in the draft vocabulary
                assert int(draft.tokens[row, i]) == int(guess.argmax())


def test_the_tree_holds_the_likeliest_paths() -> None:
    nodes, parents = sparse_tree(ACCURACY, 20, 4)
    assert nodes[:5] == ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (1,))
    for node, parent in zip(nodes, parents, strict=True):
        assert (nodes[parent] if parent >= 0 else ()) == node[:-1]
        assert parent < nodes.index(node)

    def chance(node: tuple[int, ...]) -> float:
        return prod(ACCURACY[i][rank] for i, rank in enumerate(node))

    everything = [n for depth in range(1, 5) for n in product(range(3), repeat=depth)]
    best = sorted((chance(n) for n in everything), reverse=True)[:20]
    assert sorted(map(chance, nodes), reverse=True) == pytest.approx(best)
    assert max(map(len, sparse_tree(ACCURACY, 60, 2)[0])) == 2
    assert len(sparse_tree(ACCURACY, 1000, 4)[0]) == 3 + 9 + 27 + 81


def test_medusa_learns_and_is_calibrated(tmp_path: Path) -> None:
    rows = text_rows(count=30)
    for row in rows:
        row.ids[:] = [10 + i % 3 for i in range(len(row))]
    lines: list[str] = []
    options = replace(OPTIONS, learning_rate=3e-2, epochs=8)
    drafter = train_medusa(BASE, rows[:24], rows[24:], options, lines.append)
    fresh = MedusaHeads(BASE, drafter.heads.head.ids)
    seen = read_states(BASE, rows[24:], [NUM_LAYERS], ahead=5, batch_tokens=96)
    before, after = (judge_medusa(BASE, heads, seen) for heads in (fresh, drafter.heads))
    assert before[1][0] < 0.2 and after[1][0] > 0.9  # the text's period is easily learned
    assert after[0][3][0] > 0.9  # by every head
    assert drafter.accuracy == tuple(map(tuple, after[0])) and "epoch 8 of 8" in lines[-1]

    loaded = MedusaDrafter.from_folder(drafter.save(tmp_path / "medusa"), BASE)
    h = seen.states[NUM_LAYERS][:4]
    torch.testing.assert_close(loaded.heads(h), drafter.heads(h), atol=1e-2, rtol=1e-2)
    assert loaded.accuracy == drafter.accuracy


def test_targets_are_the_tokens_ahead() -> None:
    rows = text_rows(count=6)
    seen = read_states(BASE, rows, [0], ahead=3, batch_tokens=96)
    place = 0
    for batch in batches(rows, tokens=96):
        for row, start, trained in zip(batch.rows, batch.starts, batch.trained, strict=True):
            learned = {p for a, b in row.spans for p in range(a, b)}
            for offset in trained.nonzero()[:, 0].tolist():
                at = start + offset
                torch.testing.assert_close(
                    seen.states[0][place], BASE.embed(torch.tensor(row.ids[at : at + 1]).long())[0]
                )
                wanted = [int(row.ids[at + k]) if at + k in learned else -1 for k in (1, 2, 3)]
                assert seen.targets[place].tolist() == wanted
                place += 1
    assert place == len(seen.targets)


# ------------------------------------------------------------------ DEED


def test_exits_go_as_deep_as_confidence_asks() -> None:
    """Drafts of any mixture of depths equal those of a run through the same layers from the start."""
    ids = [[5, 9, 11, 7, 8]]
    drafter = deed()
    depths: list[int] = []
    forward = drafter.heads.forward

    def record(h: torch.Tensor, index: int) -> torch.Tensor:
        depths.append(index)
        return forward(h, index)

    drafter.heads.forward = record  # type: ignore[method-assign]
    mixtures = set()
    for confidence in (0.0, 0.03, 0.035, 0.04, 0.05, 2.0):
        drafter.confidence = confidence
        depths.clear()
        with torch.inference_mode():
            draft = drafter.draft(request(ids)).tokens[0].tolist()
        if confidence == 0.0:
            assert depths == [0, 0, 0, 0]  # all are sure at the first exit
        if confidence == 2.0:  # nobody ever is: to the last exit, and no further draft
            assert depths == [0, 1, 2] and len(draft) == 1
        mixtures.add(tuple(depths))
    assert len(mixtures) > 2


def test_deeper_keys_and_values_are_computed_just_in_time() -> None:
    """A token that goes through all layers sees earlier drafts that left early as if they had not."""
    ids = [[5, 9, 11, 7, 8], [3, 4, 6, 12]]
    drafter, calls = deed(confidence=0.5), 0
    forward = drafter.heads.forward
    found: list[torch.Tensor] = []

    def scripted(h: torch.Tensor, index: int) -> torch.Tensor:
        """Sure at exits 1, 0, 2, 0, 2 of the five drafts, whatever the states are."""
        nonlocal calls
        wanted = (1, 0, 2, 0, 2)[calls]
        logits = forward(h, index)
        found.append(logits)
        if index == wanted:
            calls += 1
            logits = logits * 1e4
        else:
            logits = logits * 0
        return logits

    drafter.heads.forward = scripted  # type: ignore[method-assign]
    with torch.inference_mode():
        draft = drafter.draft(request(ids, count=5)).tokens
        assert calls == 5
        texts = [[*row, *new] for row, new in zip(ids, draft.tolist(), strict=True)]
        for made, place in ((2, 5), (4, -1)):  # calls: exits 0 1 | 0 | 0 1 2 | 0 | 0 1 2
            for row, text in enumerate(texts):
                whole = BASE.model(torch.tensor([text[: len(ids[row]) + made]])).logits[0, -1]
                torch.testing.assert_close(found[place][row], whole, atol=1e-4, rtol=1e-3)


def test_with_all_layers_every_draft_is_right() -> None:
    engine = Engine(BASE, drafter=deed(exits=(NUM_LAYERS,), confidence=0.0))
    for result in engine.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True, num_draft_tokens=3):
        counts = result.speculation
        assert 0 < counts.num_draft_tokens == counts.num_accepted_tokens


def test_deed_is_fitted(tmp_path: Path) -> None:
    rows = text_rows(count=40)
    drafter = train_deed(BASE, rows[:34], rows[34:], OPTIONS, lambda line: None, exits=(2, 4))
    last = drafter.heads.adapters[1]
    size = BASE.hidden_size
    # From the final state itself the best map is the identity.
    assert (last.weight - torch.eye(size)).norm() < 0.2 * torch.eye(size).norm()
    seen = read_states(BASE, rows[34:], [2, 4], ahead=1, batch_tokens=96)
    h = seen.states[2]
    error = (drafter.heads.adapters[0](h) - seen.states[4]).square().mean()
    assert error < 0.8 * (h - seen.states[4]).square().mean()
    _, leave, accuracy = judge_deed(BASE, drafter, seen)
    assert sum(leave) == pytest.approx(1) and drafter.expected_acceptance == (accuracy,)

    loaded = DeedDrafter.from_folder(drafter.save(tmp_path / "deed"), BASE)
    assert loaded.heads.exits == (2, 4)
    torch.testing.assert_close(loaded.heads(h, 0), drafter.heads(h, 0), atol=1e-2, rtol=1e-2)


# ------------------------------------------------------------------ folders and mistakes


@pytest.mark.skipif(not can_pack("cpu"), reason="no packed weights here")
@pytest.mark.parametrize("train", [train_medusa, train_deed])
def test_a_bfloat16_model_trains_heads_too(
    train: Callable[..., MedusaDrafter | DeedDrafter],
) -> None:
    base = BaseModel(tiny_model("llama").to(torch.bfloat16))
    base.model.requires_grad_(False)
    drafter = train(
        base, text_rows(), text_rows()[:4], replace(OPTIONS, epochs=1), lambda line: None
    )
    assert all(bool(p.isfinite().all()) for p in drafter.heads.parameters())
    assert 0 < drafter.expected_acceptance[0] <= 1


def test_heads_of_a_packed_model() -> None:
    base = BaseModel(tiny_model("llama"))
    ids = torch.tensor([5, 3, 60])
    wanted = DraftHead(base, ids)
    h = torch.randn(2, base.hidden_size, generator=torch.Generator().manual_seed(0))
    expected = wanted(wanted.norm(h))
    base.pack()
    packed = DraftHead(base, ids)
    torch.testing.assert_close(packed(packed.norm(h)), expected, atol=1e-2, rtol=1e-2)


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(MultirateError, match=r"no weights of medusa in .*train_rival.py medusa"):
        MedusaDrafter.from_folder(tmp_path / "none", BASE)
    for exits in ((), (0, 2), (2, 1), (2, NUM_LAYERS + 1)):
        with pytest.raises(MultirateError, match="rising numbers of layers from 1 to 4"):
            ExitHeads(BASE, EVERY, exits)
    folder = deed().save(tmp_path / "deed")
    deed().save(folder)  # replaces it
    with pytest.raises(MultirateError, match="holds weights of deed, not of medusa"):
        MedusaDrafter.from_folder(folder, BASE)
    with pytest.raises(MultirateError, match=r"made for .*, not for"):
        DeedDrafter.from_folder(folder, BaseModel(tiny_model("qwen3")))
    (folder / CONFIG_FILE).write_text("{")
    with pytest.raises(MultirateError, match="is damaged"):
        DeedDrafter.from_folder(folder, BASE)
    (tmp_path / "file").write_text("")
    with pytest.raises(MultirateError, match="holds no rival's weights"):
        deed().save(tmp_path / "file")
    assert json.loads((medusa().save(tmp_path / "m") / CONFIG_FILE).read_text())["num_heads"] == 4
    assert default_exits(30) == (6, 12, 18, 24)
    assert default_exits(2) == (1, 2) or default_exits(2) == (1,)
