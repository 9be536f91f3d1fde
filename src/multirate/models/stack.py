"""Decoder layers over the KV arena as a function of tensors, which can be compiled.

Nothing in it depends on the number of rows, the length of the block or of the text: slots are a tensor,
the attended length is a mask's, and sizes are symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from multirate.models.arena import write_slots
from multirate.models.block import Block, Rotary

# Keys and values of a layer, `[rows, kv_heads, max_len, head_dim]` each.
KeysValues = tuple[Tensor, Tensor]
Call = Callable[..., Any]  # a module, or one with its weights put in


@dataclass(frozen=True, eq=False)
class Stack:
    """What runs as one: decoder layers, one after the other, and what is done before and after them.

    Attributes:
        layers: N of them.
        kinds: the attention type of each.
        before: `before(*inputs)` is the state that enters the first layer, `[B, n, D]`; None: the one
            input is it.
        after: `after(entered, left, *inputs)`, of the states that entered the first and left the last
            layer, is a list of what is wanted; None: the state behind each layer.
        name: what it is called while it is compiled.
    """

    layers: tuple[Call, ...]
    kinds: tuple[str, ...]
    before: Call | None = None
    after: Call | None = None
    name: str = "a decoder layer"

    @property
    def modules(self) -> tuple[Call, ...]:
        """All that has weights."""
        ends = (self.before, self.after)
        return (*self.layers, *(end for end in ends if end is not None))

    def with_modules(self, modules: Sequence[Call]) -> Stack:
        """The same of other modules, in the order of `modules`."""
        n, rest = len(self.layers), iter(modules[len(self.layers) :])
        before, after = (None if end is None else next(rest) for end in (self.before, self.after))
        return Stack(tuple(modules[:n]), self.kinds, before, after, self.name)


def stack_of(layer: nn.Module, kind: str) -> Stack:
    """One layer as a stack; always the same one, so that what is known of it is found again."""
    known: Stack | None = layer.__dict__.get("_stack")
    if known is None:
        known = layer.__dict__["_stack"] = Stack((layer,), (kind,))
    return known


class _Slots:
    """The arena as a decoder layer sees it: written at slots `[B, n]`, attended to up to `visible`."""

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor, visible: int) -> None:
        self.keys, self.values, self.slots, self.visible = keys, values, slots, visible

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> KeysValues:
        write_slots(self.keys, self.slots, keys)
        write_slots(self.values, self.slots, values)
        return self.keys[:, :, : self.visible], self.values[:, :, : self.visible]


def run_decoder_layers(
    layers: Sequence[Call],
    kinds: Sequence[str],
    h: Tensor,
    slots: Tensor,
    positions: Tensor,
    masks: Mapping[str, Tensor],
    rotary: Mapping[str, Rotary],
    memory: Sequence[KeysValues],
) -> list[Tensor]:
    """The state behind each layer, N times `[B, n, D]`.

    Args:
        layers: N of them.
        kinds: the attention type of each.
        h: `[B, n, D]`, the state that enters the first.
        slots: as in `Block`, and so on.
        positions: of rotary embeddings.
        masks: slots `[0, L)` are attended to, L as long as they are.
        rotary: of each attention type.
        memory: keys and values of each layer.
    """
    states = []
    for layer, kind, (keys, values) in zip(layers, kinds, memory, strict=True):
        h = layer(
            h,
            attention_mask=masks[kind],
            position_ids=positions,
            cache=_Slots(keys, values, slots, masks[kind].shape[-1]),
            position_embeddings=rotary[kind],
        )
        states.append(h)
    return states


def run_stack(
    stack: Stack,
    inputs: Sequence[Tensor],
    block: Block,
    memory: Sequence[KeysValues],
    *,
    layers: Callable[..., list[Tensor]] = run_decoder_layers,
) -> list[Tensor]:
    """Run a stack on a block: what its `after` makes, or the state behind each layer.

    Args:
        stack: what runs.
        inputs: of its `before`, `[B, n, ...]` each; without one the state that enters.
        block: where the positions sit.
        memory: keys and values of each layer.
        layers: `run_decoder_layers`, or a compiled form of it.
    """
    h = inputs[0] if stack.before is None else stack.before(*inputs)
    states = layers(
        stack.layers,
        stack.kinds,
        h,
        block.slots,
        block.positions,
        block.masks,
        block.rotary,
        memory,
    )
    if stack.after is None:
        return states
    out: list[Tensor] = stack.after(h, states[-1], *inputs)
    return out
