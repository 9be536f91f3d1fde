"""Which form a linear layer's weights get: FBGEMM's, our own kernel's, torchao's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import nn

from multirate.models import kernels
from multirate.models.packed import PACKED, PackedLinear
from multirate.models.quantized import BITS, HalfLinear, QuantizedLinear, is_exact, load_kernel

Packer = Callable[[nn.Linear], nn.Module]

# Weights of 4 bits that a base holds as float16 are off their grid by up to this share of them.
HALF_ROUNDING = 2.0**-11

# Bits of what only drafts: a verify pass corrects it, so speed is all that counts. Adapters that were
# folded into 4-bit weights leave their grid, hence not 4; beside them they may stay (`adapted_packer`).
DRAFT_BITS = 8


def layer_packer(kind: str, head: nn.Module) -> Packer:
    """What packs a base model's linear layers on a CPU.

    Args:
        kind: "packed", "int8" or "int4".
        head: its LM head, which keeps at least 8 bits: it is where rounding shows most.
    """
    if kind == PACKED:
        return HalfLinear.of if _prefers_own_half() else PackedLinear.of
    bits = BITS[kind]
    return lambda linear: QuantizedLinear.of(linear, 8 if linear is head else bits)


def draft_packer(kind: str, device: torch.device) -> Packer:
    """What packs a drafter's linear layers beside a base packed as `kind`.

    On CUDA they stay as they are.
    """
    if device.type != "cpu":
        return lambda linear: linear
    if kind == PACKED and not has_kernel():
        return PackedLinear.of
    return lambda linear: QuantizedLinear.of(linear, DRAFT_BITS)


def adapted_packer(linears: Iterable[nn.Linear]) -> Callable[[nn.Linear], QuantizedLinear] | None:
    """What packs a drafter's copy of base layers that low-rank adapters stay beside, or None: fold them.

    Where 4 bits hold the base's weights, half the bytes of folded ones are read.
    """
    linears = list(linears)
    if not all(linear.weight.device.type == "cpu" for linear in linears) or not has_kernel():
        return None
    if not all(is_exact(linear.weight, 4, tolerance=HALF_ROUNDING) for linear in linears):
        return None
    return lambda linear: QuantizedLinear.of(linear, 4)


def _prefers_own_half() -> bool:
    """Our kernel reads float16 faster than FBGEMM on AVX-512, and slower without it."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and has_kernel()


@cache
def has_kernel() -> bool:
    """Whether there is our own kernel, or can be; FBGEMM serves as well."""
    return kernels.has_kernel(load_kernel, "Weights are packed as 16 bits by FBGEMM")
