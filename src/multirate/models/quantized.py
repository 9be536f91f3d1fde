"""4- and 8-bit weights for decoding (`--quantize`): activations, keys and values stay what they are.

**On x86 CPUs** a weight is `d * q + m` with an unsigned q, and one pair of float16 numbers d and m for
each output and 32 inputs: with 4 bits the grid of llama.cpp's Q4_1, with 8 bits (m = -128 d) that of
Q8_0. Weights that came from such a file are therefore kept exactly, and the model computes what its
float32 form computes; "int8" keeps a matrix in 4 bits where these are exact. Inputs are float32, and on
a CPU with AVX512-VNNI 16-bit numbers with one scale for 32 of a row (an error of 2e-5 to 4e-5 of the
result), where llama.cpp rounds them to 8 bits. torch's own kernels for such weights take half as long
again or twice as long, and none takes float16 scales, so `quantized.cpp` has one, built on first use:
numbers are cut out of 32-bit words beside the multiplications of up to 14 rows. The same kernel
multiplies float16 weights (`HalfLinear`).

**On CUDA** torchao quantises (extra `multirate[quantize]`): int8 with one scale for an output, int4 with
one for 32 inputs, activations bfloat16.

Either way an LM head keeps at least 8 bits: it is where rounding shows most. What is quantised can no
longer be trained, saved or moved to another device.
"""

from __future__ import annotations

import importlib
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from multirate.config.errors import MultirateError
from multirate.models.kernels import load_library
from multirate.models.packed import can_pack

INT8, INT4 = "int8", "int4"
QUANTIZATIONS = (INT8, INT4)
BITS = {INT8: 8, INT4: 4}

STREAMED_FROM = 2**26  # bytes; the last level of a CPU's caches holds 32 MB or so for one process
STREAMED_TIMED = 2**28  # bytes of weights to time it with, at most
STREAMED_SLACK = 1.05  # of its time: what a drafter gains by caches of its own, and noise

GROUP = 32  # inputs that share a scale; as in quantized.cpp
_BLOCK = 32  # outputs stored side by side; as in quantized.cpp
_LANES = 16  # ranks are filled up to a multiple of this; whole vectors in quantized.cpp
_SOURCE = Path(__file__).with_name("quantized.cpp")


class Grid(NamedTuple):
    """A weight matrix as `d * q + m`.

    Attributes:
        q: `[out, groups, 32]` int32, unsigned numbers of so many bits.
        d: `[out, groups]` float16.
        m: `[out, groups]` float16.
    """

    q: Tensor
    d: Tensor
    m: Tensor

    @classmethod
    def of(cls, groups: Tensor, d: Tensor, m: Tensor, *, bits: int) -> Grid:
        """The nearest numbers of the grid for weights `[out, groups, 32]`."""
        step = d.float()[..., None]
        q = (groups - m.float()[..., None]) / torch.where(step == 0, 1, step)
        return cls(q.round().clamp(0, 2**bits - 1).int(), d, m)

    def groups(self) -> Tensor:
        """The weights that it stands for, `[out, groups, 32]` float32."""
        return self.q * self.d.float()[..., None] + self.m.float()[..., None]


def quantize_weight(weight: Tensor, bits: int) -> Grid:
    """Round a weight matrix to a grid.

    With 4 bits a group spans 15 steps of its grid, or as few as 8 where that is nearer: weights that
    are on such a grid already need not use all of it.

    Args:
        weight: `[out, in]`, of any type; padded with zeros to whole groups.
        bits: 4 or 8.
    """
    weight = F.pad(weight.detach().float(), (0, -weight.shape[1] % GROUP))
    groups = weight.unflatten(1, (-1, GROUP))
    if bits == 8:
        d = (groups.abs().amax(-1) / 127).half()
        return Grid.of(groups, d, d * -128, bits=8)
    low, high = groups.aminmax(dim=-1)
    m = low.half()
    best, least = None, None
    for steps in range(15, 7, -1):
        grid = Grid.of(groups, ((high - m.float()) / steps).half(), m, bits=4)
        error = (grid.groups() - groups).square().sum(-1)
        if best is None or least is None:
            best, least = grid, error
        else:
            better = error < least
            least = torch.where(better, error, least)
            q = torch.where(better[..., None], grid.q, best.q)
            best = Grid(q, torch.where(better, grid.d, best.d), m)
        if not least.any():
            break
    assert best is not None
    return best


def is_exact(weight: Tensor, bits: int, *, tolerance: float = 0.0) -> bool:
    """Whether weights `[out, in]` are on a grid of so many bits; most that are not show it early.

    Args:
        weight: of any type.
        bits: 4 or 8.
        tolerance: largest error, as a share of the weights (root mean squares).
    """

    def holds(part: Tensor) -> bool:
        part = part.detach().float()
        kept = quantize_weight(part, bits).groups().flatten(1)[:, : part.shape[1]]
        return bool((kept - part).norm() <= tolerance * part.norm())

    return holds(weight[:_BLOCK]) and holds(weight)


class _KernelLinear(nn.Module):
    """What the kernel computes: `[..., in]` float32 to `[..., out]` float32.

    Args:
        words: `[out / 32, in / (32 / bits), 32]` int32, `bits` to a weight; as in quantized.cpp.
        scales: `[out / 32, in / 32, ...]` float16.
        bias: `[out]` or None.
        bits: of a weight.
        outputs: without those that fill a block.

    Attributes:
        streamed: whether its weights pass the caches by, being a part of more than they hold.
    """

    weight: Tensor
    scales: Tensor
    in_features: int
    streamed = False

    def __init__(
        self, words: Tensor, scales: Tensor, bias: Tensor | None, *, bits: int, outputs: int
    ) -> None:
        super().__init__()
        self.bits, self.out_features = bits, outputs
        self.register_buffer("weight", words)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", None if bias is None else bias.detach().float())

    @property
    def nbytes(self) -> int:
        """Bytes of weights and scales that a pass reads."""
        return self.weight.nbytes + self.scales.nbytes

    @property
    def stored(self) -> dict[str, Tensor | int | None]:
        """What it is made of, buffers and sizes; `from_stored` makes it again."""
        sizes = {name: value for name, value in vars(self).items() if type(value) is int}
        return {**self._buffers, **sizes}

    @classmethod
    def from_stored(cls, stored: Mapping[str, Tensor | int | None]) -> Self:
        """The layer whose `stored` this is; it shares the tensors."""
        linear = cls.__new__(cls)
        nn.Module.__init__(linear)
        for name, value in stored.items():
            if isinstance(value, int):
                setattr(linear, name, value)
            else:
                linear.register_buffer(name, value)
        return linear

    def adapt(self, adapters: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add `B A x` to what it gives, from now on.

        Args:
            adapters: A `[r, in]` and B `[out, r]` of each layer whose outputs are side by side here;
                rounded to float16.
        """
        inner = torch.cat([A.detach() for A, _ in adapters]).half()  # [R, in]
        outer = torch.block_diag(*(B.detach().float() for _, B in adapters)).half()  # [out, R]
        blocks = _blocks(F.pad(outer, (0, 0, 0, -outer.shape[0] % _BLOCK)))  # [out / 32, R, 32]
        # Of its layer's columns only, or of two layers' where a block has outputs of both.
        used = _blocks(
            F.pad(
                torch.block_diag(*(torch.ones_like(B) for _, B in adapters)),
                (0, 0, 0, -outer.shape[0] % _BLOCK),
            )
        ).any(-1)  # [out / 32, R]
        depth = int(used.sum(1).max())
        starts = used.int().argmax(1).clamp(max=inner.shape[0] - depth)
        columns = starts[:, None] + torch.arange(depth)
        kept = blocks.gather(1, columns[..., None].expand(-1, -1, _BLOCK))
        padded = F.pad(inner.T, (0, -inner.shape[0] % _LANES)).contiguous()
        self.register_buffer("A", padded)
        self.register_buffer("B", kept.contiguous())
        self.register_buffer("starts", starts.int())

    def forward(self, x: Tensor) -> Tensor:
        # Not self.weight: looking three of them up costs as much as calling the kernel.
        known = self._buffers
        if "starts" in known:
            adapted: Tensor = torch.ops.multirate.adapted_linear.default(
                x, known["weight"], known["scales"], known["bias"], self.bits, self.out_features,
                self.streamed, known["A"], known["B"], known["starts"],
            )  # fmt: skip
            return adapted
        out: Tensor = torch.ops.multirate.quantized_linear.default(
            x, known["weight"], known["scales"], known["bias"], self.bits, self.out_features,
            self.streamed,
        )  # fmt: skip
        return out


class QuantizedLinear(_KernelLinear):
    """A linear layer of 4- or 8-bit weights; `[..., in]` float32 to `[..., out]` float32.

    Args:
        weight: `[out, in]`, of any type.
        bias: `[out]` or None.
        bits: 4 or 8.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, bits: int) -> None:
        grid = quantize_weight(F.pad(weight, (0, 0, 0, -weight.shape[0] % _BLOCK)), bits)
        depth = 32 // bits
        words = grid.q.view(grid.q.shape[0], -1, depth) << (bits * torch.arange(depth)).int()
        # Disjoint bits, whose sum wraps around to the sign as it should.
        packed = _blocks(words.sum(-1, dtype=torch.int32))
        scales = _blocks(torch.stack((grid.d, grid.m) if bits == 4 else (grid.d,), dim=-1))
        super().__init__(packed, scales, bias, bits=bits, outputs=weight.shape[0])
        self.in_features = weight.shape[1]

    @classmethod
    def of(cls, linear: nn.Linear, bits: int) -> QuantizedLinear:
        """The quantised form of a linear layer, which itself stays as it is.

        Where 4 bits hold the weights exactly they are used in place of 8, which would not.
        """
        if bits == 8 and is_exact(linear.weight, 4):
            bits = 4
        return cls(linear.weight, linear.bias, bits=bits)


class HalfLinear(_KernelLinear):
    """A linear layer of float16 weights; `[..., in]` float32 to `[..., out]` float32.

    Args:
        weight: `[out, in]`, of any type; rounded to float16.
        bias: `[out]` or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        outputs, inputs = weight.shape
        padding = (0, -inputs % GROUP, 0, -outputs % _BLOCK)
        halves = _blocks(F.pad(weight.detach().half(), padding))
        blocks, padded, _ = halves.shape
        words = halves.view(torch.int32).view(blocks, padded // 2, _BLOCK)
        scales = halves.new_empty(blocks, padded // GROUP, 0)
        super().__init__(words, scales, bias, bits=16, outputs=outputs)
        self.in_features = inputs

    @classmethod
    def of(cls, linear: nn.Linear) -> HalfLinear:
        """The float16 form of a linear layer, which itself stays as it is."""
        return cls(linear.weight, linear.bias)


def stream_weights(model: nn.Module) -> None:
    """Let the weights of a model that no cache holds pass the caches by (`streamed`), where that pays.

    A pass reads each of them once; in the caches they would only take the place of what is read again
    soon, a drafter's weights above all. But some CPUs read far slower that way (half as fast
    as otherwise on an Intel server CPU where AMD's gained 10%), hence it is timed.

    Args:
        model: packed; its linear layers are changed in place.
    """
    linears = [module for module in model.modules() if isinstance(module, _KernelLinear)]
    large = sum(linear.nbytes for linear in linears) > STREAMED_FROM
    streamed = large and _streaming_pays(linears)
    for linear in linears:
        linear.streamed = streamed


@torch.inference_mode()
def _streaming_pays(linears: list[_KernelLinear]) -> bool:
    """Whether a pass over the first of the layers, more than caches hold, is as fast streamed."""
    sizes = list(accumulate(linear.nbytes for linear in linears))
    enough = linears[: 1 + bisect_left(sizes, STREAMED_TIMED)]
    inputs = [torch.zeros(1, linear.in_features) for linear in enough]
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(5):  # in turn, so that other work on the machine slows both
        for streamed in times:
            start = time.perf_counter()
            for linear, x in zip(enough, inputs, strict=True):
                linear.streamed = streamed
                linear(x)
            times[streamed].append(time.perf_counter() - start)
    return min(times[True]) <= STREAMED_SLACK * min(times[False])


def _blocks(x: Tensor) -> Tensor:
    """`[out, ...]` to `[out / 32, ..., 32]`: outputs of a block side by side."""
    return x.unflatten(0, (-1, _BLOCK)).movedim(1, -1).contiguous()


def require_quantizable(kind: str, device: torch.device | str, *, experts: bool) -> None:
    """Check that weights of this kind can be used, and get ready for it: build the kernel, find torchao.

    Args:
        kind: "int8" or "int4".
        device: of the model.
        experts: whether it is a mixture of experts, whose expert weights are no linear layers.

    Raises:
        MultirateError: a device or a model that it is not for, no compiler, no torchao.
    """
    device = torch.device(device)
    if experts or not (device.type == "cuda" or can_pack(device)):
        what = "a mixture of experts" if experts else f"on {device}"
        raise MultirateError(
            f"Quantisation {kind!r} is for models without experts on CUDA or an x86 CPU with AVX2; "
            f"this one is {what}. Leave it out: bfloat16 or float32 work everywhere."
        )
    if device.type == "cuda":
        _torchao()
    else:
        load_kernel()


# ---------------------------------------------------------------- CUDA: torchao


def _torchao() -> Any:
    try:
        return importlib.import_module("torchao.quantization")
    except ImportError:
        raise MultirateError(
            "Quantisation on CUDA needs torchao, which is not installed. Install it with: "
            "pip install 'multirate[quantize]'"
        ) from None


def quantize_with_torchao(model: nn.Module, head: nn.Module, kind: str) -> None:
    """Quantise all linear layers of a bfloat16 model in place.

    Args:
        model: on a CUDA device.
        head: its LM head, which gets int8 whatever the kind.
        kind: "int8" or "int4".

    Raises:
        MultirateError: torchao is not installed.
    """
    torchao = _torchao()
    int8 = torchao.Int8WeightOnlyConfig()
    layers = int8
    if kind == INT4:
        # The one layout of torchao whose kernel comes with torch itself.
        layers = torchao.Int4WeightOnlyConfig(
            group_size=GROUP, int4_packing_format="tile_packed_to_4d"
        )

    def is_layer(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and module is not head

    torchao.quantize_(model, layers, filter_fn=is_layer)
    torchao.quantize_(model, int8, filter_fn=lambda module, name: module is head)


# ---------------------------------------------------------------- CPU: building the kernel


@cache
def load_kernel() -> None:
    """Make `torch.ops.multirate.quantized_linear` exist, building it if no earlier run has.

    Raises:
        MultirateError: no compiler, it fails, or the cache cannot be written.
    """
    try:
        load_library(_SOURCE, "the kernel for quantised weights")
    except MultirateError as error:
        raise MultirateError(f"{error} Or use --dtype packed.") from None

    def shape(
        x: Tensor,
        weight: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        bits: int,
        outputs: int,
        streamed: bool,
    ) -> Tensor:
        return x.new_empty((*x.shape[:-1], outputs))

    def adapted_shape(
        x: Tensor,
        weight: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        bits: int,
        outputs: int,
        streamed: bool,
        a: Tensor | None,
        b: Tensor | None,
        starts: Tensor | None,
    ) -> Tensor:
        return x.new_empty((*x.shape[:-1], outputs))

    torch.library.register_fake("multirate::adapted_linear", adapted_shape)
    torch.library.register_fake("multirate::quantized_linear", shape)  # for torch.compile
