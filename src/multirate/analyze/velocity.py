"""Residual velocity: how far each layer turns and stretches the residual stream (M2R2, Fig. 2a).

Shapes: B rows, n positions, D hidden size, N layers, C token classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from multirate.analyze.text import TOKEN_CLASSES

PADDING = -1  # the class of positions that are left out


class Velocity:
    """Sums over positions, by token class and layer.

    Args:
        num_layers: N.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        classes = len(TOKEN_CLASSES)
        self.counts = torch.zeros(classes, dtype=torch.float64)
        self.direction = torch.zeros(classes, num_layers, dtype=torch.float64)
        self.log_norm = torch.zeros(classes, num_layers, dtype=torch.float64)
        self.to_final = torch.zeros(classes, num_layers + 1, dtype=torch.float64)

    def add(self, states: dict[int, Tensor], classes: Tensor) -> None:
        """All N + 1 slow states `[B, n, D]` of some rows, and their token classes `[B, n]`."""
        used = classes != PADDING
        member = F.one_hot(classes[used], len(TOKEN_CLASSES)).double().T.cpu()  # [C, T]
        self.counts += member.sum(1)
        final = states[self.num_layers][used].float()
        before = states[0][used].float()
        self.to_final[:, 0] += member @ _cosine(before, final)
        for i in range(self.num_layers):
            after = states[i + 1][used].float()
            self.direction[:, i] += member @ (1 - _cosine(before, after))
            ratio = after.norm(dim=-1) / before.norm(dim=-1).clamp(min=1e-12)
            self.log_norm[:, i] += member @ ratio.clamp(min=1e-12).log().double().cpu()
            self.to_final[:, i + 1] += member @ _cosine(after, final)
            before = after

    def numbers(self) -> dict[str, Any]:
        """Means, JSON-ready: for every token class that occurs, and for all of them together."""
        found = {
            name: self._means(torch.tensor([i]))
            for i, name in enumerate(TOKEN_CLASSES)
            if self.counts[i] > 0
        }
        return {
            "definition": {
                "direction_change": "mean of 1 - cos(h_i, h_{i+1}), a number a layer",
                "norm_ratio": "geometric mean of |h_{i+1}| / |h_i|, a number a layer",
                "cosine_to_final": "mean of cos(h_i, h_N), for i = 0 to N",
                "token_class": "of the token that the position reads",
            },
            "classes": {**found, "all": self._means(torch.arange(len(TOKEN_CLASSES)))},
        }

    def _means(self, classes: Tensor) -> dict[str, Any]:
        count = self.counts[classes].sum()

        def mean(sums: Tensor) -> Tensor:
            return sums[classes].sum(0) / count

        return {
            "positions": int(count),
            "direction_change": mean(self.direction).tolist(),
            "norm_ratio": mean(self.log_norm).exp().tolist(),
            "cosine_to_final": mean(self.to_final).tolist(),
        }


def _cosine(x: Tensor, y: Tensor) -> Tensor:
    return F.cosine_similarity(x, y, dim=-1).double().cpu()
