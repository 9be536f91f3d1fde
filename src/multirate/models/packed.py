"""Half the bytes, float32 arithmetic: linear layers whose float16 weights are packed once for the CPU.

torch's own CPU matmuls are poor at what decoding does, a few rows against large weights: float32 reads
twice the bytes and repacks all weights whenever there is more than one row; bfloat16 without
instructions for it costs as much again for every further row. FBGEMM, which torch ships for x86, packs
a float16 matrix once and multiplies it with float32 rows, accumulating in float32. A pass of several
rows then costs little more than a pass of one, which is what drafting needs.

float16 holds three more bits of a weight than bfloat16, and every bfloat16 weight of a size that matters
exactly; activations, keys and values stay float32. So the logits are closer to the float32 model's than
a bfloat16 model's are.

What is packed can no longer be trained, saved or moved to another device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from types import MappingProxyType
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from multirate.models.siblings import joint_linear, sibling_linears, siblings_of

PACKED = "packed"  # what users call this type of weights

# The operator itself: the wrapper around it searches its arguments for fakes, 8 microseconds a call, and
# a step of a small model makes 200 calls.
_LINEAR = torch.ops.quantized.linear_dynamic_fp16.default._op


# torch.compile cannot look at the opaque object, so compiled code names it by a handle.
_HANDLES = count()
_BY_HANDLE: WeakValueDictionary[int, PackedLinear] = WeakValueDictionary()


class PackedLinear(nn.Module):
    """A linear layer with packed float16 weights; `[..., in]` float32 to `[..., out]` float32.

    Args:
        weight: `[out, in]`, of any type; rounded to float16.
        bias: `[out]` or None.
    """

    handle: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # A 16-bit copy of the numbers in FBGEMM's own order, behind an opaque object.
        full = None if bias is None else bias.detach().float()
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.detach().float(), full)
        # A tensor, not a number: one compiled layer serves all layers, each with handles of its own.
        self.register_buffer("handle", torch.tensor(next(_HANDLES)), persistent=False)
        _BY_HANDLE[int(self.handle)] = self

    @classmethod
    def of(cls, linear: nn.Linear) -> PackedLinear:
        """The packed form of a linear layer, which itself stays as it is."""
        return cls(linear.weight, linear.bias)

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a pass reads."""
        return 2 * self.out_features * self.in_features

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.ops.multirate.packed_linear(x, self.handle, self.out_features)
        out: Tensor = _LINEAR(x, self._packed)
        return out


def _packed_linear(x: Tensor, handle: Tensor, outputs: int) -> Tensor:
    out: Tensor = _LINEAR(x, _BY_HANDLE[int(handle)]._packed)
    return out


_OPERATORS = torch.library.Library("multirate", "FRAGMENT")
_OPERATORS.define("packed_linear(Tensor x, Tensor handle, int outputs) -> Tensor")
_OPERATORS.impl("packed_linear", _packed_linear, "CPU")
torch.library.register_fake(
    "multirate::packed_linear",
    lambda x, handle, outputs: x.new_empty((*x.shape[:-1], outputs)),
    lib=_OPERATORS,
)


def can_pack(device: torch.device | str) -> bool:
    """Whether weights can be packed for this device: an x86 CPU that FBGEMM supports."""
    if torch.device(device).type != "cpu" or not torch.cpu._is_avx2_supported():
        return False
    return "fbgemm" in torch.backends.quantized.supported_engines


def pack_linears(
    module: nn.Module,
    pack: Callable[[nn.Linear], nn.Module],
    known: Mapping[str, nn.Module] = MappingProxyType({}),
) -> dict[str, nn.Module]:
    """Replace every linear layer below a module by what `pack` makes of it, one after the other.

    Layers that read the same input are packed as one (`models.siblings`).

    Args:
        module: changed in place.
        pack: gives the packed form of a layer.
        known: packed layers to use instead of packing, as an earlier call returned them.

    Returns:
        Packed layers by name, those of siblings by the first one's.
    """
    packed = {}
    alone = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear)}
    for names, linears in list(sibling_linears(module)):
        joint = packed[names[0]] = known.get(names[0]) or pack(joint_linear(linears))
        for name, sibling in zip(names, siblings_of(joint, linears), strict=True):
            module.set_submodule(name, sibling)
            del alone[name]
    for name, linear in alone.items():
        packed[name] = known.get(name) or pack(linear)
        module.set_submodule(name, packed[name])
    return packed
