"""Decoder layers, compiled, over the KV arena.

Eager, a small model's step is mostly overhead: some fifty operators a layer that take microseconds each.
Compiled, a layer is its matrix products, one attention call and a few fused loops. Two modes:

- `layers` (regional): one layer is a graph and serves all layers like it, the accelerated stream's too.
- `model` (whole graph): the base model's whole stack is one graph. It takes longer to compile.

A handful of graphs serve every number of rows, positions and slots (`models.stack`): sizes of one are a
case of their own to the compiler.

On a CPU graphs are compiled ahead of time (`models.ahead`); a whole draft step is one in either mode.
Elsewhere `torch.compile` does it when they are first needed; inductor keeps its compiled code in its own
cache then (`TORCHINDUCTOR_CACHE_DIR`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from weakref import WeakSet

import torch
import torch._dynamo
from torch import Tensor

from multirate.config.errors import MultirateError
from multirate.models.ahead import AheadOfTime
from multirate.models.block import Block
from multirate.models.kernels import has_compiler
from multirate.models.stack import KeysValues, Stack, run_decoder_layers, run_stack

COMPILE_MODES = ("layers", "model")
RECOMPILE_LIMIT = 64


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


class Compiled:
    """Runs stacks compiled; compiles what is needed when it is first called.

    Where compiling fails (no C++ compiler, an operator that it cannot follow) a warning says why, and
    layers run eagerly from then on; where only a draft step cannot be compiled, it runs layer by layer.

    Args:
        mode: "layers" or "model", for its owner to go by.
        device: where it runs.
    """

    def __init__(self, mode: str, device: torch.device) -> None:
        self.mode, self.failed = mode, False
        self._ahead = AheadOfTime() if device.type == "cpu" else None
        self._unfit: WeakSet[Stack] = WeakSet()
        if self._ahead is None:
            # Graphs of one function: sizes of one or more, kinds of layers, types of weights.
            dynamo = torch._dynamo.config
            dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILE_LIMIT)
            self._layers = torch.compile(run_decoder_layers, dynamic=True, fullgraph=True)

    def layers(
        self, stack: Stack, h: Tensor, block: Block, memory: Sequence[KeysValues]
    ) -> list[Tensor]:
        """Decoder layers alone, as `run_stack`."""
        if not self.failed:
            try:
                if self._ahead is not None:
                    return self._ahead(stack, (h,), block, memory)
                return run_stack(stack, (h,), block, memory, layers=self._layers)
            except Exception as error:  # compilers fail with anything
                self.failed = True
                _warn("layers run eagerly", error)
        return run_stack(stack, (h,), block, memory)

    def whole(
        self, stack: Stack, inputs: Sequence[Tensor], block: Block, memory: Sequence[KeysValues]
    ) -> list[Tensor] | None:
        """As `run_stack`, as one graph; None where this cannot be."""
        if self._ahead is None or self.failed or stack in self._unfit:
            return None
        try:
            return self._ahead(stack, inputs, block, memory)
        except Exception as error:  # compilers fail with anything
            self._unfit.add(stack)
            _warn(f"{stack.name} runs layer by layer", error)
            return None


def _warn(consequence: str, error: Exception) -> None:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = (lines or [type(error).__name__])[0]
    warnings.warn(f"Compiling failed, so {consequence}: {reason}", stacklevel=3)
