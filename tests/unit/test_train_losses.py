"""The losses against their definitions, and what their gradients may touch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY
from torch import Tensor
from torch.nn import functional as F
from training import text_rows, tiny_base

from multirate.models.base import BaseModel
from multirate.streams.accelerator import Accelerator
from multirate.train.batches import Batch, collate, drafted_positions, trained_positions
from multirate.train.losses import StreamLoss, state_distance
from multirate.train.options import TrainingOptions
from multirate.train.teacher import Needs, TeacherStates, run_teacher
from multirate.train.unroll import unroll


def shaken(base: BaseModel, preset: str, **shape: Any) -> Accelerator:
    torch.manual_seed(0)
    stream = Accelerator.from_preset(preset, base, rank=4, **shape)
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in stream.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=g))
    return stream


def taught(stream: Accelerator, batch: Batch) -> TeacherStates:
    return run_teacher(stream.base, batch, Needs.of(stream.config))


def test_windows_hold_what_is_trained() -> None:
    rows = text_rows(count=12)
    batch = collate(rows)
    for i, row in enumerate(rows):
        expected = {
            t for a, b in row.spans for t in range(a - 1, b - 1) if t >= 2
        }  # the next token is learned
        found = {batch.starts[i] + int(t) for t in batch.trained[i].nonzero()[:, 0]}
        assert found == expected == set(trained_positions(row).nonzero()[0].tolist())
        assert batch.starts[i] == min(expected)
    blank = collate(rows[:1], blank=True)
    assert blank.trained.shape == (1, 1) and not blank.trained.any()


def test_drafts_start_inside_an_answer() -> None:
    trained = torch.tensor([[True, True, True, False, False, True, True]])
    expected = {
        1: [1, 1, 1, 0, 0, 1, 1],
        2: [0, 1, 1, 0, 0, 0, 1],
        3: [0, 0, 1, 0, 0, 0, 0],
    }
    for step, wanted in expected.items():
        assert drafted_positions(trained, step).int().tolist() == [wanted]


@pytest.mark.parametrize("kind", ["cosine", "l1"])
@pytest.mark.parametrize("preset", ["carry", "paper"])
def test_loss_equals_its_definition(preset: str, kind: Any) -> None:
    stream = shaken(tiny_base(), preset, draft_vocab_size=50)
    stream.set_draft_ids(torch.arange(40, 90))
    options = TrainingOptions(
        draft_steps=2, step_decay=0.5, distillation_weight=0.3, prediction_weight=0.7,
        distillation_loss=kind,
    )  # fmt: skip
    batch = collate(text_rows(count=5))
    teacher = taught(stream, batch)
    with torch.no_grad():
        loss, parts = StreamLoss(stream, options)(batch, teacher)
        expected = 0.0
        for drafted in unroll(stream, batch, teacher, 2):
            entropies, distances = [], []
            for b, t in drafted_positions(batch.trained, drafted.step).nonzero().tolist():
                place = batch.starts[b] + t
                h = stream.base.head(run_whole(stream.base, batch, b, place))[40:90]
                log_p = torch.log_softmax(stream.draft_logits(drafted.exit[b, t]), dim=-1)
                entropies.append(-(torch.softmax(h, dim=-1) * log_p).sum())
                for p, target in drafted.pairs:
                    p, target = p[b, t], target[b, t]
                    if kind == "cosine":
                        distances.append(1 - p @ target / p.norm() / target.norm())
                    else:
                        distances.append((p - target).abs().mean() / target.abs().mean())
            entropy, distance = torch.stack(entropies).mean(), torch.stack(distances).mean()
            torch.testing.assert_close(parts[f"cross_entropy_{drafted.step}"], entropy)
            torch.testing.assert_close(parts[f"distillation_{drafted.step}"], distance)
            expected += 0.5 ** (drafted.step - 1) * (0.7 * entropy + 0.3 * distance)
    torch.testing.assert_close(loss, torch.as_tensor(expected))


def run_whole(base: BaseModel, batch: Batch, row: int, position: int) -> Tensor:
    """h_N of one position, by a run of its own."""
    ids = batch.ids[row : row + 1, : position + 1]
    arena = base.arena(rows=1, max_len=position + 1)
    block = base.block([0], position + 1)
    return base.run_layers(base.embed(ids), 0, base.num_layers, block, arena)[0, position]


def test_distances_of_known_pairs() -> None:
    p, h = torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([[6.0, 8.0], [0.0, 2.0]])
    torch.testing.assert_close(state_distance(p, h, "cosine"), torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(state_distance(p, h, "l1"), torch.tensor([0.5, 1.5]))


def test_reach_weighting() -> None:
    """Step 2 counts as much as the stream itself believes in the token before."""
    stream = shaken(tiny_base(), "carry", draft_vocab_size=VOCABULARY)
    stream.set_draft_ids(torch.arange(VOCABULARY))
    batch = collate(text_rows(count=4))
    teacher = taught(stream, batch)
    with torch.no_grad():
        loss = StreamLoss(stream, TrainingOptions(draft_steps=2, reach_weighting=True))
        _, parts = loss(batch, teacher)
        _, plain = StreamLoss(stream, TrainingOptions(draft_steps=2))(batch, teacher)
        first, second = unroll(stream, batch, teacher, 2)
        weights, entropies = [], []
        for b, t in drafted_positions(batch.trained, 2).nonzero().tolist():
            token = int(batch.ids[b, batch.starts[b] + t])
            weights.append(torch.softmax(stream.draft_logits(first.exit[b, t - 1]), -1)[token])
            target = torch.softmax(stream.base.head(teacher.at(stream.base.num_layers)[b, t]), -1)
            logits = stream.draft_logits(second.exit[b, t])
            entropies.append(-(target * torch.log_softmax(logits, -1)).sum())
        weight, entropy = torch.stack(weights), torch.stack(entropies)
    torch.testing.assert_close(parts["cross_entropy_1"], plain["cross_entropy_1"])
    expected = (weight * entropy).mean()
    torch.testing.assert_close(parts["cross_entropy_2"], expected)
    assert abs(expected - plain["cross_entropy_2"]) > 1e-4


@pytest.mark.parametrize("reach_weighting", [False, True])
def test_shares_of_a_batch_add_up(reach_weighting: bool) -> None:
    stream = shaken(tiny_base(), "carry", draft_vocab_size=50)
    rows = text_rows(count=7)
    options = TrainingOptions(draft_steps=3, reach_weighting=reach_weighting)
    module = StreamLoss(stream, options)
    whole = collate(rows)
    counts = [int(drafted_positions(whole.trained, s).sum()) for s in (1, 2, 3)]
    with torch.no_grad():
        loss, _ = module(whole, taught(stream, whole))
        total = 0.0
        for share in (collate(rows[::2]), collate(rows[1::2]), collate(rows[:1], blank=True)):
            total += module(share, taught(stream, share), counts)[0]
    torch.testing.assert_close(torch.as_tensor(total), loss)


def test_a_window_changes_nothing_but_work() -> None:
    """The same positions trained with the window started at the row's first."""
    stream = shaken(tiny_base("mistral"), "carry", draft_vocab_size=50)
    rows = text_rows(count=3)
    narrow = collate(rows)
    ids = narrow.ids
    width = ids.shape[1] - 2
    trained = torch.zeros(3, width, dtype=torch.bool)
    for i, row in enumerate(rows):
        trained[i, torch.from_numpy(trained_positions(row).nonzero()[0]) - 2] = True
    wide = Batch(ids, narrow.rows, (2, 2, 2), trained)
    module = StreamLoss(stream, TrainingOptions(draft_steps=3))
    with torch.no_grad():
        one, other = module(narrow, taught(stream, narrow)), module(wide, taught(stream, wide))
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def gradients(loss: Tensor, parameters: list[Tensor]) -> list[Tensor | None]:
    return list(torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True))


@pytest.mark.parametrize("kind", ["tied", "lean"])
def test_intervals_do_not_touch_each_other(kind: str) -> None:
    gates = (0, 2, 3, 4)
    shape: dict[str, Any] = {"gates": gates, "layer_kind": kind, "draft_vocab_size": 50}
    stream = shaken(tiny_base(), "paper", **shape)
    batch = collate(text_rows(count=4))
    teacher = taught(stream, batch)
    options = TrainingOptions(draft_steps=2)
    loss, parts = StreamLoss(stream, options)(batch, teacher)
    assert {"gate1_cross_entropy_1", "gate2_cross_entropy_1", "cross_entropy_2"} <= parts.keys()
    assert "gate1_cross_entropy_2" not in parts  # only drafts run several steps
    whole = gradients(loss, list(stream.parameters()))
    assert all(g is not None and g.abs().sum() > 0 for g in whole)
    intervals = [list(stream.layers[a:b].parameters()) for a, b in pairwise(gates)]
    for j, (start, _) in enumerate(pairwise(gates)):
        # The loss of interval j as a function of all parameters.
        from multirate.train.unroll import unroll_interval

        drafted = unroll_interval(stream, j, batch, teacher)
        pieces = [F.mse_loss(p, h) for p, h in drafted.pairs]
        for k, parameters in enumerate(intervals):
            found = gradients(torch.stack(pieces).sum(), parameters)
            if k == j:
                assert all(g is not None for g in found)
            else:
                assert all(g is None for g in found), (j, k)
        assert not teacher.at(start).requires_grad


def test_lean_attention_to_few_tokens_trains() -> None:
    """Gradients flow into queries and outputs through the tokens that are attended."""
    stream = shaken(tiny_base(), "paper", attended_tokens=3)
    batch = collate(text_rows(count=4))
    loss, _ = StreamLoss(stream, TrainingOptions(draft_steps=2))(batch, taught(stream, batch))
    loss.backward()
    for name, parameter in stream.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
