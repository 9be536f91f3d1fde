"""Stacks as CUDA graphs: captured once for each shape, then started with one call.

A small model's step is hundreds of kernels that run for microseconds each, and starting them one by one
takes longer than they do. A CUDA graph starts all of them at once, at fixed addresses and sizes. So

- what changes from step to step (the state that enters, slots, positions, masks, rotary embeddings) is
  copied into the graph's own tensors before it runs;
- the attended length is rounded up to a multiple of `STRIDE`, so that one graph serves that many steps;
  slots that were added are masked, and hold zeros or what was written to them before;
- keys and values must lie where they lay at capture: arenas borrow their memory from an `ArenaPool`,
  which lends the same memory to the next text.

(CUDA programming guide, "CUDA Graphs"; PyTorch's `torch.cuda.graph`.)
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from multirate.models.block import Block
from multirate.models.stack import KeysValues, Stack, run_stack

STRIDE = 256  # slots; as many steps share a graph
MAX_GRAPHS = 64  # the one used longest ago makes room for a new one
_WARM_UPS = 2  # runs before the capture: libraries set themselves up and choose kernels

Run = Callable[[], list[Tensor]]
# Takes a function without arguments; gives what runs it again, and the tensors it then writes.
Capture = Callable[[Run], tuple[Callable[[], None], list[Tensor]]]


class CudaCapture:
    """Captures on the current device; the graphs of one such object share memory for what they compute.

    That memory is why the results of one graph are only good until another one runs.
    """

    def __init__(self) -> None:
        self._memory: Any = None

    def __call__(self, run: Run) -> tuple[Callable[[], None], list[Tensor]]:
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                run()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            out = run()
        self._memory = graph.pool()
        return graph.replay, out


@dataclass(frozen=True, eq=False)
class _Captured:
    """One graph.

    Attributes:
        stack: kept, so that its weights stay where they are.
        changing: the graph's own tensors that steps are copied to.
        replay: runs it.
        out: what it writes.
    """

    stack: Stack
    changing: list[Tensor]
    replay: Callable[[], None]
    out: list[Tensor]


class GraphedStacks:
    """Runs stacks as `models.stack.run_stack` does, as graphs.

    Args:
        capture: `CudaCapture`, or what stands in for it where there is no such device.
    """

    def __init__(self, capture: Capture | None = None) -> None:
        self._capture = capture or CudaCapture()
        self._graphs: OrderedDict[tuple[Any, ...], _Captured] = OrderedDict()

    def __call__(
        self,
        stack: Stack,
        inputs: Sequence[Tensor],
        block: Block,
        memory: Sequence[KeysValues],
    ) -> list[Tensor]:
        """As `run_stack`. The results are overwritten by the next call: copy what is to stay."""
        kinds = tuple(dict.fromkeys(stack.kinds))
        block = stretched(block, min(_rounded_up(block.visible), memory[0][0].shape[2]))
        changing = [*inputs, *block.tensors(kinds)]
        key = (
            id(stack),
            block.visible,
            *((x.shape, x.dtype) for x in changing),
            *((x.data_ptr(), x.shape) for x in memory[0]),
        )
        known = self._graphs.get(key)
        if known is None:
            known = self._graphs[key] = self._captured(stack, changing, len(inputs), kinds, memory)
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        for target, source in zip(known.changing, changing, strict=True):
            target.copy_(source, non_blocking=True)
        known.replay()
        return known.out

    def _captured(
        self,
        stack: Stack,
        changing: Sequence[Tensor],
        num_inputs: int,
        kinds: Sequence[str],
        memory: Sequence[KeysValues],
    ) -> _Captured:
        own = [x.clone() for x in changing]
        inputs, block = own[:num_inputs], Block.of_tensors(own[num_inputs:], kinds)
        replay, out = self._capture(lambda: run_stack(stack, inputs, block, memory))
        return _Captured(stack, own, replay, out)


def stretched(block: Block, visible: int) -> Block:
    """The same block, of which `visible` slots enter attention: those added are masked.

    Args:
        block: how much it sees now is the least that is allowed.
        visible: slots.
    """
    more = visible - block.visible
    if more == 0:
        return block

    def longer(mask: Tensor) -> Tensor:
        unseen = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        return F.pad(mask, (0, more), value=unseen)

    masks = {kind: longer(mask) for kind, mask in block.masks.items()}
    return Block(block.positions, block.slots, block.start, visible, masks, block.rotary)


def _rounded_up(slots: int) -> int:
    return -(-slots // STRIDE) * STRIDE


class ArenaPool:
    """Memory of arenas, which the next arena of the same shape gets when one is no longer used.

    Graphs know keys and values by their address; new memory for every text would need new graphs.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[Any, ...], list[Tensor]] = {}

    def borrow(
        self, shape: Sequence[int], *, slots: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A tensor of zeros of a shape whose dimension `slots` may be longer, by less than `STRIDE`."""
        size = list(shape)
        size[slots] = _rounded_up(size[slots])
        free = self._free.get((tuple(size), dtype, device))
        if free:
            return free.pop().zero_()
        return torch.zeros(size, dtype=dtype, device=device)

    def give_back_with(self, owner: object, memory: Tensor) -> None:
        """Lend memory again once `owner` is gone."""
        key = (tuple(memory.shape), memory.dtype, memory.device)
        weakref.finalize(owner, self._free.setdefault(key, []).append, memory)
