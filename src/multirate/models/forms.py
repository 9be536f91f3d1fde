"""In what form a model's weights are loaded and used: dtypes, packed, 4 or 8 bits."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from multirate.config.errors import MultirateError
from multirate.models.architectures import ARCHITECTURES
from multirate.models.packed import PACKED, can_pack
from multirate.models.packing import has_kernel
from multirate.models.places import Place, locate
from multirate.models.quantized import INT4, QUANTIZATIONS

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class Form:
    """What is loaded, and in what form.

    Attributes:
        place: where the model is.
        stored: the dtype that it is loaded in; "auto" for that of its files.
        packing: what its linear layers are then packed as ("packed", "int8", "int4"); None if they are
            used as they are loaded.
        if_exact: whether the packing is for weights that it keeps exactly; others are `PACKED`.
    """

    place: Place
    stored: str | torch.dtype
    packing: str | None = None
    if_exact: bool = False


def choose_form(
    model: str | Path | Place,
    *,
    dtype: str | torch.dtype | None = None,
    quantize: str | None = None,
    device: str | None = None,
) -> Form:
    """The form that was asked for, or the one that decodes a model fastest on a device.

    That is, on an x86 CPU, 4 bits where a model came in a GGUF file and they hold its weights exactly,
    else packed; bfloat16 elsewhere, and for mixtures of experts. What is to be quantised on a CPU is
    loaded as it is stored, because weights out of a GGUF file are on a grid already; on a GPU in
    bfloat16, the type of activations there.

    Args:
        model: as for `load_pretrained`.
        dtype: a dtype's name, "auto" or "packed".
        quantize: "int8" or "int4".
        device: as for `load_pretrained`.

    Raises:
        MultirateError: no such model, an unknown quantisation or device, or both a quantisation and a
            dtype.
    """
    if quantize is not None:
        _require_quantization(quantize, dtype)
        stored = "auto" if parse_device(device).type == "cpu" else torch.bfloat16
        return Form(locate(model), stored, quantize)
    packs = can_pack(parse_device(device))
    if dtype not in (None, PACKED):
        parse_dtype(dtype)  # before the model is looked for
    place = locate(model)
    if dtype is None and packs:
        kind = ARCHITECTURES.get(place.config.model_type)
        packs = kind is not None and not kind.experts
    if dtype == PACKED or (dtype is None and packs):
        if dtype is None and place.converted and has_kernel():
            return Form(place, "auto", INT4, if_exact=True)
        return Form(place, torch.float16, PACKED)
    return Form(place, torch.bfloat16 if dtype is None else dtype)


def _require_quantization(quantize: str, dtype: str | torch.dtype | None) -> None:
    if quantize not in QUANTIZATIONS:
        raise MultirateError(
            f"Unknown quantisation {quantize!r}. Use one of: {', '.join(QUANTIZATIONS)}."
        )
    if dtype is not None:
        raise MultirateError(
            f"--quantize {quantize} and --dtype {str(dtype).removeprefix('torch.')} both name the "
            f"weights' type. Leave one of them out."
        )


def batch_dtype(device: torch.device | str) -> torch.dtype:
    """The dtype whose matmuls of many rows are fastest: bfloat16 if the device has it, else float32.

    A CPU without bfloat16 instructions (AVX-512 BF16, AMX) emulates it, five times slower than
    float32 here, and no flag that torch shows tells all such CPUs: so it is measured, in 0.1 s.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    if device.type != "cpu":
        return torch.float32
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(256, 512, dtype=dtype)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            x @ x.T
            times.append(time.perf_counter() - start)
        seconds[dtype] = min(times)
    return min(seconds, key=lambda dtype: seconds[dtype])


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | str:
    if dtype is None:
        return torch.bfloat16
    name = str(dtype).removeprefix("torch.")
    if name != "auto" and name not in DTYPES:
        raise MultirateError(
            f"Unknown dtype {name!r}. Use one of: auto, {', '.join(DTYPES)}; `generate`, `bench` and "
            f"`demo` on a CPU also take {PACKED}. For {' and '.join(QUANTIZATIONS)} use --quantize."
        )
    return DTYPES.get(name, "auto")


def parse_device(device: str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    available = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        available += [kind.type]
        available += [f"{kind.type}:{i}" for i in range(torch.accelerator.device_count())]
    if device not in available:
        raise MultirateError(
            f"No device {device!r} on this machine. Available: {', '.join(available)}."
        )
    return torch.device(device)
