"""Linear layers that read the same input, as one matrix product.

Queries, keys and values are three products with one input, gate and up are two. A decoding step makes
hundreds of products that take microseconds each, and starting one costs about as much again. The modules
are called one by one, so the first one called computes for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

# Names of sibling modules that transformers' layers call with one and the same tensor.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _Joint:
    """Several layers' outputs side by side; the last result stays until every part was taken."""

    def __init__(self, linear: nn.Module) -> None:
        self.linear = linear
        self._known: tuple[Tensor, Tensor] | None = None

    def part(self, x: Tensor, start: int, stop: int) -> Tensor:
        known = self._known
        if known is None or known[0] is not x:
            self._known = known = (x, self.linear(x))
        out = known[1]
        if stop == out.shape[-1]:
            self._known = None
        return out[..., start:stop]


class Sibling(nn.Module):
    """One of the layers: outputs `start .. stop-1` of a joint product; `[..., in]` to `[..., out]`."""

    def __init__(self, joint: _Joint, start: int, stop: int) -> None:
        super().__init__()
        self.start, self.stop = start, stop
        self.__dict__["joint"] = joint
        if start == 0:  # weights belong to the module tree once
            self.linear = joint.linear

    joint: _Joint

    def forward(self, x: Tensor) -> Tensor:
        return self.joint.part(x, self.start, self.stop)


def sibling_linears(module: nn.Module) -> Iterator[tuple[list[str], list[nn.Linear]]]:
    """Groups of linear layers below a module that read the same input: their names, and they."""
    for path, parent in module.named_modules():
        for names in GROUPS:
            linears = [getattr(parent, name, None) for name in names]
            kinds = {type(linear) for linear in linears}
            biases = {getattr(linear, "bias", None) is None for linear in linears}
            if kinds == {nn.Linear} and len(biases) == 1:
                prefix = f"{path}." if path else ""
                yield [prefix + name for name in names], linears  # type: ignore[misc]


def joint_linear(linears: list[nn.Linear]) -> nn.Linear:
    """One layer whose outputs are those of all, side by side."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    joint = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    joint.weight = nn.Parameter(weight, requires_grad=False)
    if linears[0].bias is not None:
        bias = torch.cat([linear.bias.detach() for linear in linears])
        joint.bias = nn.Parameter(bias, requires_grad=False)
    return joint


def siblings_of(joint: nn.Module, linears: list[nn.Linear]) -> Iterator[Sibling]:
    """What takes each layer's place, `joint` computing all of them."""
    shared, start = _Joint(joint), 0
    for linear in linears:
        yield Sibling(shared, start, start + linear.out_features)
        start += linear.out_features
