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

A third mode, `graphs`, is for CUDA: nothing is compiled, and verify passes and draft steps are captured
as CUDA graphs (`models.cuda_graphs`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from weakref import WeakSet

import torch
import torch._dynamo
from torch import Tensor

from multirate.config.errors import MultirateError
from multirate.models.ahead import AheadOfTime, can_compile
from multirate.models.block import Block
from multirate.models.cuda_graphs import GraphedStacks
from multirate.models.stack import KeysValues, Stack, run_decoder_layers, run_stack

COMPILE_MODES = ("layers", "model", "graphs")
GRAPHED_POSITIONS = 32  # longer blocks are parts of a prompt, hardly ever of the same length twice
RECOMPILE_LIMIT = 64


def compile_mode(mode: str | None, device: torch.device | str) -> str | None:
    """What a compile option stands for: "layers", "model", or None.

    Args:
        mode: "auto" is "layers" on a CPU with a C++ compiler or what one has compiled, and elsewhere
            nothing; "none" and None are nothing.
        device: where the model runs.

    Raises:
        MultirateError: an unknown mode, or "graphs" on a device that is not CUDA.
    """
    require_compile_mode(mode)
    if mode == "graphs" and torch.device(device).type != "cuda":
        raise MultirateError(
            f"Compile mode 'graphs' captures CUDA graphs, and this model is on {device}. Use one of: "
            f"auto, layers, model, none."
        )
    if mode == "auto":
        return "layers" if torch.device(device).type == "cpu" and can_compile() else None
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
        mode: "layers", "model" or "graphs", for its owner to go by.
        device: where it runs.
    """

    def __init__(self, mode: str, device: torch.device) -> None:
        self.mode, self.failed = mode, False
        self._unfit: WeakSet[Stack] = WeakSet()
        self._ahead: AheadOfTime | None = None
        self._graphs: GraphedStacks | None = None
        if mode == "graphs":
            self._graphs = GraphedStacks()
        elif device.type == "cpu":
            self._ahead = AheadOfTime()
        else:
            # Graphs of one function: sizes of one or more, kinds of layers, types of weights.
            dynamo = torch._dynamo.config
            dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILE_LIMIT)
            self._layers = torch.compile(run_decoder_layers, dynamic=True, fullgraph=True)

    def layers(
        self, stack: Stack, h: Tensor, block: Block, memory: Sequence[KeysValues]
    ) -> list[Tensor]:
        """Decoder layers alone, as `run_stack`; with "graphs" good until the next call (`lasting`)."""
        if not self.failed:
            try:
                if self._ahead is not None:
                    return self._ahead(stack, (h,), block, memory)
                if self._graphs is not None:
                    short = block.slots.shape[1] <= GRAPHED_POSITIONS
                    run = self._graphs if short and len(stack.layers) > 1 else run_stack
                    return run(stack, (h,), block, memory)
                return run_stack(stack, (h,), block, memory, layers=self._layers)
            except Exception as error:  # compilers fail with anything
                self.failed = True
                _warn("layers run eagerly", error)
        return run_stack(stack, (h,), block, memory)

    def whole(
        self, stack: Stack, inputs: Sequence[Tensor], block: Block, memory: Sequence[KeysValues]
    ) -> list[Tensor] | None:
        """As `run_stack`, as one graph; None where this cannot be."""
        run = self._ahead or self._graphs
        if run is None or self.failed or stack in self._unfit:
            return None
        if self._graphs is not None and block.slots.shape[1] > GRAPHED_POSITIONS:
            return None
        try:
            return [self.lasting(x) for x in run(stack, inputs, block, memory)]
        except Exception as error:  # compilers fail with anything
            self._unfit.add(stack)
            _warn(f"{stack.name} runs layer by layer", error)
            return None

    def lasting(self, x: Tensor) -> Tensor:
        """A result that no later call overwrites."""
        return x if self._graphs is None else x.clone()


def _warn(consequence: str, error: Exception) -> None:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = (lines or [type(error).__name__])[0]
    warnings.warn(f"Compiling failed, so {consequence}: {reason}", stacklevel=3)
