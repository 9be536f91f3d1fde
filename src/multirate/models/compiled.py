"""Decoder layers, compiled, over the KV arena.

Eager, a small model's step is mostly overhead: some fifty operators a layer that take microseconds each.
Compiled, a layer is its matrix products, one attention call and a few fused loops. Two modes:

- `layers` (regional): one layer is a graph and serves all layers like it, the accelerated stream's too.
- `model` (whole graph): the base model's whole stack is one graph. It takes longer to compile.

Nothing in a graph depends on the number of rows, the length of the block or of the text: slots are a
tensor, the attended length is a mask's, and sizes are symbols. So a handful of graphs serve everything:
sizes of one are a case of their own to the compiler.

On a CPU graphs are compiled ahead of time (`models.ahead`), elsewhere by `torch.compile` when they are
first needed; inductor keeps its compiled code in its own cache then (`TORCHINDUCTOR_CACHE_DIR`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch._dynamo
from torch import Tensor, nn

from multirate.config.errors import MultirateError
from multirate.models.ahead import AheadOfTime, KeysValues, Rotary
from multirate.models.arena import write_slots
from multirate.models.kernels import has_compiler

COMPILE_MODES = ("layers", "model")
RECOMPILE_LIMIT = 64


class _Slots:
    """The arena as a decoder layer sees it: written at slots `[B, n]`, attended to up to `visible`."""

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor, visible: int) -> None:
        self.keys, self.values, self.slots, self.visible = keys, values, slots, visible

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> KeysValues:
        write_slots(self.keys, self.slots, keys)
        write_slots(self.values, self.slots, values)
        return self.keys[:, :, : self.visible], self.values[:, :, : self.visible]


def run_stack(
    layers: Sequence[nn.Module],
    kinds: Sequence[str],
    h: Tensor,
    slots: Tensor,
    positions: Tensor,
    masks: Mapping[str, Tensor],
    rotary: Mapping[str, Rotary],
    memory: Sequence[KeysValues],
) -> list[Tensor]:
    """Decoder layers, one after the other, on a block.

    Args:
        layers: N of them.
        kinds: the attention type of each.
        h: `[B, n, D]`, the state that enters the first.
        slots: `[B, n]`, where keys and values are written.
        positions: `[B, n]`, of rotary embeddings.
        masks: of each attention type, `[B, 1, n, L]`; slots `[0, L)` are attended to.
        rotary: of each attention type, (cos, sin), `[B, n, head_dim]` each.
        memory: keys and values of each layer.

    Returns:
        The state behind each layer, N times `[B, n, D]`.
    """
    states = []
    for layer, kind, (keys, values) in zip(layers, kinds, memory, strict=True):
        h = cast(
            Tensor,
            layer(
                h,
                attention_mask=masks[kind],
                position_ids=positions,
                cache=_Slots(keys, values, slots, masks[kind].shape[-1]),
                position_embeddings=rotary[kind],
            ),
        )
        states.append(h)
    return states


def compile_mode(mode: str | None, device: torch.device | str) -> str | None:
    """What a compile option stands for: "layers", "model", or None.

    Args:
        mode: "auto" is "layers" on a CPU with a C++ compiler, and elsewhere nothing; "none" and None
            are nothing.
        device: where the model runs.

    Raises:
        MultirateError: an unknown mode.
    """
    require_compile_mode(mode)
    if mode == "auto":
        return "layers" if torch.device(device).type == "cpu" and has_compiler() else None
    return None if mode == "none" else mode


def require_compile_mode(mode: str | None) -> None:
    """Check a compile option.

    Raises:
        MultirateError: an unknown mode.
    """
    if mode not in (None, *COMPILE_MODES, "auto", "none"):
        raise MultirateError(
            f"Unknown compile mode {mode!r}. Use one of: auto, {', '.join(COMPILE_MODES)}, none."
        )


class CompiledStack:
    """The compiled form of `run_stack`; compiles what is needed when it is first called.

    Where compiling fails (no C++ compiler, an operator that it cannot follow) layers run eagerly from
    then on, and a warning says why.

    Args:
        mode: "layers" or "model", for its owner to go by.
        device: where it runs.
    """

    def __init__(self, mode: str, device: torch.device) -> None:
        self.mode = mode
        self._run: Callable[..., list[Tensor]] | None
        if device.type == "cpu":
            self._run = AheadOfTime(run_stack)
            return
        # Graphs of one function: sizes of one or more, kinds of layers, types of weights.
        dynamo = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILE_LIMIT)
        self._run = torch.compile(run_stack, dynamic=True, fullgraph=True)

    @property
    def failed(self) -> bool:
        return self._run is None

    def __call__(self, *arguments: Any) -> list[Tensor]:
        """As `run_stack`."""
        if self._run is not None:
            try:
                return self._run(*arguments)
            except Exception as error:  # compilers fail with anything
                self._run = None
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                reason = (lines or [type(error).__name__])[0]
                warnings.warn(f"Compiling failed, so layers run eagerly: {reason}", stacklevel=1)
        return run_stack(*arguments)
