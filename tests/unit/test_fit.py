"""The closed-form start against problems whose answer is known, and against gradient-free bounds."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from tiny_models import VOCABULARY, tiny_model

from multirate.models.base import BaseModel
from multirate.streams.accelerator import Accelerator
from multirate.streams.fit import Moments, fit_closed_form, reduced_rank, slow_states
from multirate.streams.layers import LeanLayer


def accelerator(base: BaseModel, preset: str, **overrides: object) -> Accelerator:
    torch.manual_seed(0)
    return Accelerator.from_preset(preset, base, **overrides)


def batches(seed: int, count: int = 40) -> list[tuple[torch.Tensor, list[int]]]:
    g = torch.Generator().manual_seed(seed)
    return [(torch.randint(3, VOCABULARY, (2, 20), generator=g), [20, 13]) for _ in range(count)]


def test_moments_recover_a_linear_map() -> None:
    g = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(3, 5, generator=g), torch.randn(3, generator=g)
    moments = Moments()
    for _ in range(4):
        x = torch.randn(50, 5, generator=g)
        moments.add(x, x @ weight.T + bias)
    found_weight, found_bias = moments.solve(ridge=1e-9)
    torch.testing.assert_close(found_weight.float(), weight, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found_bias.float(), bias, atol=1e-5, rtol=1e-5)
    assert moments.count == 200


def test_ridge_shrinks_weights_but_not_the_mean() -> None:
    x = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0))
    moments = Moments()
    moments.add(x, 2 * x + 7)
    weight, bias = moments.solve(ridge=1e6)
    assert float(weight.abs().max()) < 1e-4
    torch.testing.assert_close(bias.float(), torch.full((3,), 7.0), atol=0.2, rtol=0)


def test_reduced_rank_beats_plain_truncation_on_the_inputs() -> None:
    g = torch.Generator().manual_seed(0)
    # Inputs of very unequal size: the weight's own leading directions are not the useful ones.
    x = (torch.randn(3000, 6, generator=g) * torch.tensor([9.0, 5, 1, 0.3, 0.1, 0.1])).double()
    weight = torch.randn(6, 6, generator=g).double()
    a, b = reduced_rank(x.T @ x, weight, 2)
    u, s, v = torch.linalg.svd(weight)
    truncated = u[:, :2] * s[:2] @ v[:2]
    error = (x @ (b @ a - weight).T).square().sum()
    assert error < 0.5 * (x @ (truncated - weight).T).square().sum()
    # Eckart-Young on the fitted outputs: the error is exactly the energy of the dropped directions.
    dropped = torch.linalg.svdvals(x @ weight.T)[2:].square().sum()
    torch.testing.assert_close(error, dropped, rtol=1e-8, atol=0)


def test_a_batch_of_rows_too_short_to_fit_adds_nothing() -> None:
    stream = accelerator(BaseModel(tiny_model("llama")), "carry")
    short = (torch.tensor([[3, 4], [5, 0]]), [2, 1])
    assert fit_closed_form(stream, [*batches(0), short]) == 40 * (18 + 11)


def test_carry_entry_is_the_least_squares_map() -> None:
    """No other linear map of the same inputs has a smaller error on the text it was fitted to."""
    base = BaseModel(tiny_model("llama"))
    stream = accelerator(base, "carry")
    text = batches(0)
    assert fit_closed_form(stream, iter(text), ridge=1e-9) == 40 * (18 + 11)
    assert stream.entry is not None
    inputs, targets, ours = [], [], []
    for ids, lengths in text:
        gate = stream.config.gates[0]
        states, _ = slow_states(base, ids, {gate, *stream.carry_layers})
        for row, length in enumerate(lengths):
            now, before = slice(2, length), slice(1, length - 1)
            parts = [base.embed(ids[row, now])]
            parts += [states[i][row, before] for i in stream.carry_layers]
            inputs.append(torch.cat([*parts, torch.ones(length - 2, 1)], 1))
            targets.append(states[gate][row, now])
            ours.append(stream.entry(parts[0], parts[1:], own=False))
    x, y = torch.cat(inputs).detach().double(), torch.cat(targets).detach().double()
    best = torch.linalg.lstsq(x, y).solution
    optimum = (x @ best - y).square().mean()
    error = (torch.cat(ours).detach().double() - y).square().mean()
    assert error.item() == pytest.approx(optimum.item(), rel=1e-3)


@pytest.mark.parametrize("gates", [(0, 2), (0, 1, 3), (1, 4)])
def test_lean_layers_approach_their_targets(gates: tuple[int, ...]) -> None:
    """With full rank the last layer of an interval is the regression of h_N on the gate state."""
    base = BaseModel(tiny_model("llama"))
    rank = base.hidden_size
    stream = accelerator(base, "paper", gates=gates, rank=rank, attended_tokens=None)
    text = batches(1)
    fit_closed_form(stream, iter(text), ridge=1e-9)
    for interval, (start, stop) in enumerate(pairwise(gates)):
        x, y, ours = [], [], []
        for ids, lengths in text:
            states, final = slow_states(base, ids, {start})
            p = states[start]
            for layer in stream.layers[start - gates[0] : stop - gates[0]]:
                assert isinstance(layer, LeanLayer)
                p = p + layer.mix(p, torch.zeros_like(p))  # attention starts as nothing
            for row, length in enumerate(lengths):
                x.append(torch.cat([states[start][row, 2:length], torch.ones(length - 2, 1)], 1))
                y.append(final[row, 2:length])
                ours.append(p[row, 2:length])
        inputs, target = torch.cat(x).double(), torch.cat(y).double()
        best = torch.linalg.lstsq(inputs, target).solution
        optimum = (inputs @ best - target).square().mean()
        error = (torch.cat(ours).detach().double() - target).square().mean()
        assert error.item() == pytest.approx(optimum.item(), rel=2e-2), interval


def test_more_rank_is_never_worse_and_any_beats_a_raw_exit() -> None:
    base = BaseModel(tiny_model("llama"))
    errors = []
    for rank in (1, 4, 16, 32):
        stream = accelerator(base, "paper", gates=(0, 2), rank=rank)
        fit_closed_form(stream, iter(batches(1)), ridge=1e-9)
        total = 0.0
        for ids, _ in batches(1):
            states, final = slow_states(base, ids, {0})
            p = states[0]
            for layer in stream.layers:
                assert isinstance(layer, LeanLayer)
                p = p + layer.mix(p, torch.zeros_like(p))
            total += float((p - final)[0, 2:].detach().square().sum())
        errors.append(total)
    assert errors == sorted(errors, reverse=True)
    raw = sum(
        float(
            (slow_states(base, ids, {0})[0][0] - slow_states(base, ids, ())[1])[0, 2:]
            .detach()
            .square()
            .sum()
        )
        for ids, _ in batches(1)
    )
    assert errors[0] < raw
