"""Low-rank adapters: the only large thing an accelerator trains.

Shapes: `[..., in]` to `[..., out]`; r is the rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LowRank(nn.Module):
    """x -> B A x, with A `[r, in]` random and B `[out, r]` zero, so that it starts as nothing.

    (LoRA, arXiv 2106.09685.)
    """

    def __init__(self, in_features: int, out_features: int, rank: int) -> None:
        super().__init__()
        rank = min(rank, in_features, out_features)
        self.A = nn.Parameter(torch.empty(rank, in_features))
        self.B = nn.Parameter(torch.zeros(out_features, rank))
        nn.init.kaiming_uniform_(self.A, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.A), self.B)


class AdaptedLinear(nn.Module):
    """A frozen linear layer of the base model plus a low-rank adapter; the base's own is untouched."""

    def __init__(self, linear: nn.Linear, adapter: LowRank) -> None:
        super().__init__()
        self.linear, self.adapter = linear, adapter

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) + self.adapter(x)
        return out

    def folded(self) -> nn.Linear:
        """One plain linear layer with the adapter added into a copy of the weights."""
        linear, adapter = self.linear, self.adapter
        weight = linear.weight.detach()
        delta = (adapter.B.detach().float() @ adapter.A.detach().float()).to(weight.device)
        result = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
        result.weight = nn.Parameter((weight.float() + delta).to(weight.dtype), requires_grad=False)
        result.bias = linear.bias
        return result


class LowRankMix(nn.Module):
    """p -> B (A p + silu(G norm(p))) + b: a low-rank MLP with a linear path.

    The linear path (A, B, b) sees the raw stream, so a closed-form fit of it is exact; the gated path
    (G, zero at the start) is what training adds.
    """

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        rank = min(rank, size)
        self.A = nn.Parameter(torch.zeros(rank, size))
        self.G = nn.Parameter(torch.zeros(rank, size))
        self.B = nn.Parameter(torch.zeros(size, rank))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, p: Tensor, normed: Tensor) -> Tensor:
        inner = F.linear(p, self.A) + F.silu(F.linear(normed, self.G))
        return F.linear(inner, self.B, self.bias)


def rms_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x `[..., D]` divided by its root mean square over the last axis; no weight."""
    return F.rms_norm(x, (x.shape[-1],), eps=eps)
