"""What a plain step must cost on this device, and what it does cost.

A step reads all weights that it multiplies with, and the keys and values of the tokens before it. What
that takes at the memory's speed is the floor of a step, as long as multiplying takes less (the roofline
model: Williams, Waterman, Patterson 2009). The roofline fraction is floor over measured step: what is
missing to 1 is what better code could save.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multirate.decode.costs import synchronizer
from multirate.decode.engine import Engine
from multirate.decode.lookup import PromptLookupDrafter
from multirate.models.base import BaseModel
from multirate.models.packed import PackedLinear
from multirate.models.quantized import HalfLinear, QuantizedLinear

STREAM_BYTES = 2**28  # larger than any level of cache, so that it comes from memory
MATMUL_SIZE = 1024
REPEATS = 5  # best of


@dataclass(frozen=True)
class CostCard:
    """Of one plain decoding step.

    Attributes:
        rows: prompts that are decoded together.
        context: tokens before the step, of each.
        weight_bytes: weights that the step reads; embeddings that are looked up are none.
        kv_bytes_per_token: keys and values of one token.
        bandwidth: bytes a second of a stream read with torch's threads.
        matmul_rate: floating-point operations a second of a large matmul in the activations' type.
        flops: floating-point operations of the step, attention left out.
        step_seconds: of a plain step, measured.
    """

    rows: int
    context: int
    weight_bytes: int
    kv_bytes_per_token: int
    bandwidth: float
    matmul_rate: float
    flops: float
    step_seconds: float

    @property
    def floor_seconds(self) -> float:
        """Of a step that does nothing but read."""
        read = self.weight_bytes + self.rows * self.context * self.kv_bytes_per_token
        return read / self.bandwidth

    @property
    def matmul_seconds(self) -> float:
        """Of a step that does nothing but multiply, at a large matmul's rate."""
        return self.flops / self.matmul_rate

    @property
    def roofline_fraction(self) -> float:
        return self.floor_seconds / self.step_seconds

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "floor_seconds": self.floor_seconds,
            "matmul_seconds": self.matmul_seconds,
            "roofline_fraction": self.roofline_fraction,
        }


def measure_cost_card(engine: Engine, *, rows: int, context: int) -> CostCard:
    """Measure the device and a plain step on it.

    Args:
        engine: with the model.
        rows: prompts that are decoded together.
        context: tokens before the step; rounded up as `Engine.step_costs` does.
    """
    base = engine.base
    context = max(256, 1 << (context - 1).bit_length())
    weights, weight_bytes = step_weights(base)
    arena = base.arena(rows=1, max_len=1)
    # Prompt lookup has no model of its own, so this also works where nothing drafts.
    steps = Engine(base, drafter=PromptLookupDrafter())
    return CostCard(
        rows=rows,
        context=context,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=arena.nbytes,
        bandwidth=measure_bandwidth(base.device),
        matmul_rate=measure_matmul(base.device, base.dtype),
        flops=2.0 * rows * weights,
        step_seconds=steps.step_costs(rows=rows, context=context, max_drafts=1).verify[0],
    )


def step_weights(base: BaseModel) -> tuple[int, int]:
    """Weights that one token is multiplied with, and their bytes as they are stored.

    Of a mixture of experts, stored as `[experts, out, in]`, only the experts that a token meets.
    """
    chosen = int(getattr(base.config, "num_experts_per_tok", 0) or 0)
    count = size = 0
    parts: list[nn.Module] = [base.layers, base.final_norm, base.lm_head]
    for part in parts:
        for module in part.modules():
            if isinstance(module, PackedLinear | QuantizedLinear | HalfLinear):
                count += module.in_features * module.out_features
                size += module.nbytes
                continue
            for weight in module.parameters(recurse=False):
                share = chosen / weight.shape[0] if weight.dim() == 3 else 1.0
                count += int(share * weight.numel())
                size += int(share * _stored_bytes(weight))
    return count, size


def _stored_bytes(weight: Tensor) -> int:
    """Of a tensor, or of the tensors that a quantised one (torchao's) is made of."""
    if not hasattr(weight, "__tensor_flatten__"):
        return weight.nbytes
    names, _ = weight.__tensor_flatten__()
    return sum(_stored_bytes(getattr(weight, name)) for name in names)


def measure_bandwidth(device: torch.device) -> float:
    """Bytes a second of reading a buffer from memory once, with torch's threads."""
    buffer = torch.ones(STREAM_BYTES // 4, device=device)
    return buffer.nbytes / _best(device, lambda: buffer.sum())


def measure_matmul(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a square matmul."""
    matrix = torch.ones(MATMUL_SIZE, MATMUL_SIZE, dtype=dtype, device=device)
    return 2 * MATMUL_SIZE**3 / _best(device, lambda: matrix @ matrix)


def _best(device: torch.device, job: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs: what the device can do, undisturbed."""
    synchronize = synchronizer(device)
    seconds = []
    for _ in range(REPEATS + 1):  # the first warms up
        synchronize()
        start = time.perf_counter()
        job()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
