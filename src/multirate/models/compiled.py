"""Decoder layers through `torch.compile`, over the KV arena.

Eager, a small model's step is mostly overhead: some fifty operators a layer that take microseconds each.
Compiled, a layer is its matrix products, one attention call and a few fused loops. Two modes:

- `layers` (regional): one layer is compiled and serves all layers of its shape, the accelerated stream's
  too. Seconds to compile.
- `model` (whole graph): the base model's whole stack is one graph, which saves what entering a graph
  costs for each layer. Minutes to compile the first time.

Nothing in a graph depends on the number of rows, the length of the block or of the text: slots are a
tensor, the attended length is a mask's, and sizes are symbols. So a handful of graphs serve a whole
session: sizes of one are a case of their own to the compiler. inductor keeps its compiled code in its
own cache between runs (`TORCHINDUCTOR_CACHE_DIR`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch._dynamo
from torch import Tensor, nn

from multirate.config.errors import MultirateError
from multirate.models.arena import write_slots

COMPILE_MODES = ("layers", "model")
RECOMPILE_LIMIT = 64

# Keys and values of a layer, `[rows, kv_heads, max_len, head_dim]` each.
KeysValues = tuple[Tensor, Tensor]
Rotary = tuple[Tensor, Tensor]


class _Slots:
    """The arena as a decoder layer sees it: written at slots `[B, n]`, attended to up to `visible`."""

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor, visible: int) -> None:
        self.keys, self.values, self.slots, self.visible = keys, values, slots, visible

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> KeysValues:
        write_slots(self.keys, self.slots, keys)
        write_slots(self.values, self.slots, values)
        return self.keys[:, :, : self.visible], self.values[:, :, : self.visible]


def _layer(
    layer: nn.Module,
    h: Tensor,
    slots: Tensor,
    positions: Tensor,
    mask: Tensor,
    rotary: Rotary,
    memory: KeysValues,
) -> Tensor:
    """One decoder layer on a block: h_i `[B, n, D]` to h_{i+1}."""
    return cast(
        Tensor,
        layer(
            h,
            attention_mask=mask,
            position_ids=positions,
            cache=_Slots(*memory, slots, mask.shape[-1]),
            position_embeddings=rotary,
        ),
    )


def _stack(
    layers: nn.ModuleList,
    kinds: Sequence[str],
    h: Tensor,
    slots: Tensor,
    positions: Tensor,
    masks: Mapping[str, Tensor],
    rotary: Mapping[str, Rotary],
    memory: Sequence[KeysValues],
) -> list[Tensor]:
    """All layers on a block: the states h_0 .. h_N, `[B, n, D]` each."""
    states = [h]
    for layer, kind, own in zip(layers, kinds, memory, strict=True):
        h = _layer(layer, h, slots, positions, masks[kind], rotary[kind], own)
        states.append(h)
    return states


def require_compile_mode(mode: str) -> None:
    """Check a compile mode.

    Raises:
        MultirateError: an unknown one.
    """
    if mode not in COMPILE_MODES:
        raise MultirateError(
            f"Unknown compile mode {mode!r}. Use one of: {', '.join(COMPILE_MODES)}."
        )


class CompiledLayers:
    """The compiled forms of `_layer` and `_stack`; nothing is compiled before the first call.

    Args:
        mode: "layers" or "model".

    Raises:
        MultirateError: an unknown mode.
    """

    def __init__(self, mode: str) -> None:
        require_compile_mode(mode)
        self.mode = mode
        # Graphs of one function: sizes of one or more, kinds of layers, types of weights.
        dynamo = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILE_LIMIT)
        # A step's own loops are so short that starting a second thread costs more than it saves; the
        # matrix products and attention between them start theirs.
        options: dict[str, Any] = {"options": {"cpp.threads": 1}}
        self.layer = torch.compile(_layer, dynamic=True, fullgraph=True, **options)
        self.stack = torch.compile(_stack, dynamic=True, fullgraph=True, **options)
