"""The closed-form start: every linear part of an accelerator by ridge regression, in one pass.

The pass accumulates second moments in float64, so memory does not grow with the text. Everything the
fit needs follows from them:

- carry entry: one regression of the gate's slow state on (embedding, carried states), and one with the
  slow stream standing in for the stream's own states, for later draft steps;
- lean layers: their linear paths compose, so the moments of (gate state, targets) give layer after
  layer the best rank-r map of p_i onto what is missing to its target (reduced-rank regression);
- tied layers start as the base layer itself: with zero adapters they already are the linear fit's
  continuation.

Shapes: T positions, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from multirate.models.base import BaseModel
from multirate.streams.accelerator import Accelerator
from multirate.streams.entry import FusedInputs
from multirate.streams.layers import LeanLayer

Batch = tuple[Tensor, Sequence[int]]  # ids [B, n] right-padded, and each row's length
States = Callable[[BaseModel, Tensor, Iterable[int]], tuple[dict[int, Tensor], Tensor]]

# The first position's states are outliers in most models (it serves as the attention sink), and
# squared errors would be spent on it alone; a carried state comes from one position before.
FIRST_POSITION = 2


class Moments:
    """Sums of x xᵀ and x yᵀ over positions, with a constant appended to x for the bias."""

    def __init__(self) -> None:
        self.xx: Tensor | None = None
        self.xy: Tensor | None = None
        self.count = 0

    def add(self, x: Tensor, y: Tensor) -> None:
        """x `[T, in]`, y `[T, out]`."""
        x = torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64, device=x.device)], 1)
        xx, xy = x.T @ x, x.T @ y.double()
        self.xx = xx if self.xx is None else self.xx + xx
        self.xy = xy if self.xy is None else self.xy + xy
        self.count += len(x)

    def solve(self, ridge: float) -> tuple[Tensor, Tensor]:
        """Ridge regression: W `[out, in]` and bias `[out]`, float64. The bias is not shrunk."""
        assert self.xx is not None and self.xy is not None
        return ridge_solve(self.xx, self.xy, ridge)


def ridge_solve(xx: Tensor, xy: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Solve `(xx + λ) W = xy`, where the last input is the constant 1 and is not shrunk.

    λ is `ridge` times the mean diagonal of the inputs' own moments.
    """
    inputs = xx.shape[0] - 1
    penalty = torch.zeros(inputs + 1, dtype=xx.dtype, device=xx.device)
    # The floor keeps a unit that never fires (a zero row) from making the system singular.
    penalty[:inputs] = (ridge * xx.diagonal()[:inputs].mean()).clamp(min=1e-12)
    solution = torch.linalg.solve(xx + penalty.diag(), xy)
    return solution[:inputs].T, solution[inputs]


def reduced_rank(xx: Tensor, weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Best rank-r stand-in for a fitted map, measured on the inputs it will see.

    Minimises E |W x - B A x|² rather than |W - B A|², by projecting on the leading eigenvectors of the
    fitted outputs' second moment W xx Wᵀ.

    Args:
        xx: `[in, in]` second moment of the inputs.
        weight: W `[out, in]`.
        rank: r.

    Returns:
        A `[r, in]`, B `[out, r]`.
    """
    _, vectors = torch.linalg.eigh(weight @ xx @ weight.T)
    basis = vectors[:, -rank:]
    return basis.T @ weight, basis


def slow_states(
    base: BaseModel, ids: Tensor, layers: Iterable[int]
) -> tuple[dict[int, Tensor], Tensor]:
    """Run the slow stream over whole rows: the named states `[B, n, D]` and h_N."""
    rows, n = ids.shape
    states: dict[int, Tensor] = dict.fromkeys(layers, cast(Tensor, None))
    arena = base.arena(rows=rows, max_len=n)
    final = base.run_layers(
        base.embed(ids), 0, base.num_layers, base.block([0] * rows, n), arena, states=states
    )
    return states, final


def _positions(x: Tensor, lengths: Sequence[int], shift: int = 0) -> Tensor:
    """Rows `[B, n, D]` to the `[T, D]` positions that are fitted, or those `shift` before them."""
    return torch.cat(
        [
            row[FIRST_POSITION - shift : length - shift]
            for row, length in zip(x, lengths, strict=True)
        ]
    )


@torch.no_grad()
def fit_closed_form(
    accelerator: Accelerator,
    batches: Iterable[Batch],
    *,
    ridge: float = 1e-3,
    states: States = slow_states,
) -> int:
    """Set every linear part of an accelerator from one pass over text.

    Args:
        accelerator: changed in place.
        batches: (ids `[B, n]` right-padded, lengths) from the base model's own text.
        ridge: shrinkage, relative to the inputs' mean second moment.
        states: where slow states come from; `slow_states`, or something that remembers its results.

    Returns:
        int: positions that were used.
    """
    if accelerator.entry is not None:
        return _fit_carry(accelerator, batches, ridge, states)
    return _fit_gates(accelerator, batches, ridge, states)


def _fit_carry(
    accelerator: Accelerator, batches: Iterable[Batch], ridge: float, slow: States
) -> int:
    base, config = accelerator.base, accelerator.config
    gate, final, carried = config.gates[0], config.num_layers, config.carry_layers
    first, again = Moments(), Moments()
    for ids, lengths in batches:
        states, _ = slow(base, ids, {gate, final, *carried})
        embedding = _positions(base.embed(ids), lengths)
        target = _positions(states[gate], lengths)
        before = {i: _positions(states[i], lengths, shift=1) for i in states}
        first.add(torch.cat([embedding, *(before[i] for i in carried)], 1), target)
        # Stand-ins: what a well-trained stream leaves behind is close to these slow states.
        again.add(torch.cat([embedding, before[gate], before[final]], 1), target)
    assert accelerator.entry is not None
    set_fused(accelerator.entry.first, first, ridge)
    set_fused(accelerator.entry.again, again, ridge)
    return first.count


def set_fused(module: FusedInputs, moments: Moments, ridge: float) -> None:
    """Set a fused map by ridge regression, each input first brought to unit size."""
    assert moments.xx is not None and moments.xy is not None
    inputs = len(module.scale)
    size = (moments.xx.shape[0] - 1) // inputs
    power = moments.xx.diagonal()[:-1].view(inputs, size).mean(1) / moments.count
    scale = power.clamp(min=1e-12).rsqrt()
    per_column = torch.cat([scale.repeat_interleave(size), scale.new_ones(1)])
    weight, bias = ridge_solve(
        moments.xx * per_column[:, None] * per_column, moments.xy * per_column[:, None], ridge
    )
    module.scale.copy_(scale)
    module.linear.weight.copy_(weight)
    module.linear.bias.copy_(bias)


def _fit_gates(
    accelerator: Accelerator, batches: Iterable[Batch], ridge: float, slow: States
) -> int:
    base, config = accelerator.base, accelerator.config
    schedule, gates = config.schedule, config.gates
    targets = {i + 1: schedule.target_layer(i + 1) for i in schedule.layers}
    moments = [Moments() for _ in range(schedule.num_intervals)]
    spans = list(pairwise(gates))
    for ids, lengths in batches:
        states, _ = slow(base, ids, {*gates[:-1], *targets.values()})
        for (start, stop), sums in zip(spans, moments, strict=True):
            wanted = [_positions(states[targets[i]], lengths) for i in range(start + 1, stop + 1)]
            sums.add(_positions(states[start], lengths), torch.cat(wanted, 1))
    for (start, stop), sums in zip(spans, moments, strict=True):
        layers = accelerator.layers[start - gates[0] : stop - gates[0]]
        if config.layer_kind == "lean":
            fit_lean(cast(Sequence[LeanLayer], layers), sums, ridge)
    return moments[0].count


def fit_lean(layers: Sequence[LeanLayer], moments: Moments, ridge: float) -> None:
    """Layer after layer, from moments alone: p_i is linear in the gate state, p_i = L [p_0; 1]."""
    assert moments.xx is not None and moments.xy is not None
    size = moments.xx.shape[0] - 1
    so_far = torch.eye(size, size + 1, dtype=torch.float64, device=moments.xx.device)
    one = torch.zeros(1, size + 1, dtype=torch.float64, device=moments.xx.device)
    one[0, size] = 1
    for layer, target in zip(layers, moments.xy.split(size, dim=1), strict=True):
        stream = torch.cat([so_far, one])  # [p_i; 1] from [p_0; 1]
        missing = target - moments.xx @ so_far.T  # E [p_0; 1] (target - p_i)ᵀ
        second = stream @ moments.xx @ stream.T
        weight, _ = ridge_solve(second, stream @ missing, ridge)
        a, b = reduced_rank(second[:size, :size], weight, layer.mix.A.shape[0])
        # The rank cut changes what the constant has to make up for, so it is solved again, exactly.
        mean = second[size] / second[size, size]
        bias = missing[size] / moments.xx[size, size] - b @ (a @ mean[:size])
        layer.mix.A.copy_(a)
        layer.mix.B.copy_(b)
        layer.mix.bias.copy_(bias)
        so_far = so_far + b @ a @ so_far + bias[:, None] * one
