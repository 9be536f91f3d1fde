"""The carry entry: where the accelerated stream starts when early slow states say too little.

A token's own embedding does not tell what comes next, but the previous position's deep states nearly
do: h_N there holds the model's expectation of this very token's surroundings. The entry is one linear
map of both (the idea of EAGLE's feature fusion, arXiv 2401.15077 and 2503.01840, here a closed-form
fit), plus a second map for later draft steps, where the stream's own states stand in for the slow ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


class FusedInputs(nn.Module):
    """A linear map of several D-wide inputs, each divided by its typical size first.

    Embeddings and deep states differ in size by orders of magnitude; `scale` (set by the fit) evens
    them out, so that one learning rate and one ridge serve all.
    """

    scale: Tensor

    def __init__(self, num_inputs: int, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_inputs * size, size)
        self.register_buffer("scale", torch.ones(num_inputs))
        # Kept out of the module tree: it is no state to save.
        self.__dict__["packed"] = None

    packed: nn.Module | None

    def pack(self, pack: Callable[[nn.Linear], nn.Module]) -> None:
        """Draft faster: use what `pack` makes of the linear layer (`models.packed`, for one)."""
        self.__dict__["packed"] = pack(self.linear)

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Inputs, each `[..., D]`, to `[..., D]`."""
        return fuse(inputs, self.scale, self.packed or self.linear)


def fuse(inputs: Sequence[Tensor], scale: Tensor, linear: nn.Module) -> Tensor:
    """`FusedInputs` as a function."""
    x = torch.stack(tuple(inputs), dim=-2) * scale[:, None]
    out: Tensor = linear(x.flatten(-2))
    return out


class CarryEntry(nn.Module):
    """p at the gate from the token's embedding and what the previous position left behind.

    Args:
        num_states: slow states carried from the previous, verified position.
        size: D.
    """

    def __init__(self, num_states: int, size: int) -> None:
        super().__init__()
        self.first = FusedInputs(1 + num_states, size)  # after a verified position
        self.again = FusedInputs(3, size)  # after a drafted one: embedding, p at entry, p at exit

    def forward(self, embedding: Tensor, states: Sequence[Tensor], *, own: bool) -> Tensor:
        """`own`: the states are the stream's own (p at entry, p at exit), not the slow stream's."""
        return (self.again if own else self.first)((embedding, *states))
