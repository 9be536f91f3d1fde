"""Milliseconds that the matrices of all layers take by kernel, for passes of 1, 2, 4 and 8 rows.

    OMP_NUM_THREADS=1 python scripts/weight_kernels.py [--rounds 9]

Shapes of the embedded model, random weights, each layer its own; kernels take turns, the lower quartile
counts. torchao is timed where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from multirate.models.packed import PackedLinear
from multirate.models.quantized import GROUP, QuantizedLinear, load_kernel

SIZE, INNER, KEYS, LAYERS = 576, 1536, 192, 30
SHAPES = [(SIZE, SIZE), (KEYS, SIZE), (KEYS, SIZE), (SIZE, SIZE)]  # [out, in]: q, k, v, o
SHAPES += [(INNER, SIZE), (INNER, SIZE), (SIZE, INNER)]  # gate, up, down
TIMED = 10  # layers that are made and timed; all together they overflow the caches
ROWS = (1, 2, 4, 8)

Product = Callable[[Tensor], Tensor]


def int8pack(linear: nn.Linear) -> Product:
    """torch's int8 weights, bfloat16 inputs."""
    scale = linear.weight.abs().amax(1) / 127
    q = (linear.weight / scale[:, None]).round().to(torch.int8)
    return lambda x: torch._weight_int8pack_mm(x, q, scale.bfloat16())


def int4pack(linear: nn.Linear) -> Product:
    """torch's int4 weights, bfloat16 inputs and scales."""
    out, inputs = linear.weight.shape
    q = torch._convert_weight_to_int4pack_for_cpu(
        torch.randint(16, (out, inputs), dtype=torch.int32), 1
    )
    scales = torch.randn(inputs // GROUP, out, 2).bfloat16()
    return lambda x: torch._weight_int4pack_mm_for_cpu(x, q, GROUP, scales)


def fbgemm_int8(linear: nn.Linear) -> Product:
    """int8 weights, inputs rounded to 7 bits with one scale for all rows."""
    scale = linear.weight.abs().amax(1).double() / 127
    zero = torch.zeros(len(scale), dtype=torch.long)
    q = torch.quantize_per_channel(linear.weight, scale, zero, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(q, None)
    return lambda x: torch.ops.quantized.linear_dynamic.default._op(x, packed, True)


def torchao_int8(linear: nn.Linear) -> Product:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    holder = nn.Sequential(linear)
    quantize_(holder, Int8WeightOnlyConfig())
    return holder[0]


KERNELS: dict[str, tuple[Callable[[nn.Linear], Product], torch.dtype]] = {
    "float32": (lambda linear: linear, torch.float32),
    "bfloat16": (lambda linear: linear.bfloat16(), torch.bfloat16),
    "_weight_int8pack_mm": (int8pack, torch.bfloat16),
    "_weight_int4pack_mm_for_cpu": (int4pack, torch.bfloat16),
    "FBGEMM int8, 7-bit inputs": (fbgemm_int8, torch.float32),
    "packed (float16)": (PackedLinear.of, torch.float32),
    "--quantize int8": (lambda m: QuantizedLinear(m.weight, bits=8), torch.float32),
    "--quantize int4": (lambda m: QuantizedLinear(m.weight, bits=4), torch.float32),
}
if importlib.util.find_spec("torchao"):
    KERNELS["torchao int8"] = (torchao_int8, torch.float32)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    load_kernel()
    layers = {
        name: [[make(nn.Linear(i, o, bias=False)) for o, i in SHAPES] for _ in range(TIMED)]
        for name, (make, _) in KERNELS.items()
    }
    table: dict[str, list[float]] = {name: [] for name in KERNELS}
    for rows in ROWS:
        seconds: dict[str, list[float]] = {name: [] for name in KERNELS}
        inputs = {
            (size, dtype): torch.randn(rows, size, dtype=dtype)
            for size in (SIZE, INNER)
            for dtype in (torch.float32, torch.bfloat16)
        }
        for _ in range(args.rounds):
            for name, (_, dtype) in KERNELS.items():
                start = time.perf_counter()
                for layer in layers[name]:
                    for (_, size), product in zip(SHAPES, layer, strict=True):
                        product(inputs[size, dtype])
                seconds[name].append(time.perf_counter() - start)
        for name, times in seconds.items():
            table[name].append(sorted(times)[len(times) // 4] * LAYERS / TIMED * 1000)
    print(f"{'weights':28}" + "".join(f"{rows:>8}" for rows in ROWS) + "   rows")
    for name, values in table.items():
        print(f"{name:28}" + "".join(f"{value:8.1f}" for value in values))


if __name__ == "__main__":
    main()
