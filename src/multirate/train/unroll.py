"""The stream over whole texts at once, several self-fed draft steps deep.

Draft step s at position t sees the teacher's keys and values up to t - s and the stream's own after
that, and is fed the stream's own state of step s - 1 at position t - 1. That is exactly what it sees
when it drafts (EAGLE-3's training-time test, arXiv 2503.01840, here over the teacher's own keys and
values). A stream with keys and values of its own (`own_kv`) sees, in the teacher's place, what its
own step 1 wrote.

Shapes: B rows, n positions, m window positions, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache

from multirate.models.arena import ArenaLayer, KVArena
from multirate.models.base import SLIDING, BaseModel, Block
from multirate.streams.accelerator import Accelerator, Carried
from multirate.streams.layers import Prefix
from multirate.train.batches import Batch
from multirate.train.teacher import TeacherStates, window_positions


class UnrolledArena(Cache):
    """The teacher's keys and values followed by the stream's own, one segment a draft step.

    Where the teacher has none for a layer, the stream's own are all there is.
    """

    def __init__(self, teacher: TeacherStates, num_layers: int) -> None:
        nothing = torch.empty(0)
        super().__init__(
            layers=[
                ArenaLayer(teacher.keys.get(i, nothing), teacher.values.get(i, nothing))
                for i in range(num_layers)
            ]
        )
        self.own: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def use(self, block: Block, start: int, stop: int) -> None:
        """Positions are in the masks; nothing to point at."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        own = self.own.setdefault(layer_idx, [])
        own.append((key_states, value_states))
        layer, dtype = self.layers[layer_idx], key_states.dtype
        before = (cast(Tensor, layer.keys), cast(Tensor, layer.values))
        parts = [before, *own] if before[0].numel() else own
        keys = torch.cat([k.to(dtype) for k, _ in parts], dim=2)
        values = torch.cat([v.to(dtype) for _, v in parts], dim=2)
        return keys, values


@dataclass(frozen=True, eq=False)
class Drafted:
    """The stream after one draft step over a batch's windows.

    Attributes:
        step: which step, from 1.
        exit: p where the interval ends, `[B, m, D]`.
        pairs: (state of the stream, slow state it aims at), each `[B, m, D]`.
    """

    step: int
    exit: Tensor
    pairs: list[tuple[Tensor, Tensor]]


def unrolled_block(
    base: BaseModel, batch: Batch, step: int, *, own_kv: bool = False
) -> tuple[Block, Prefix]:
    """Where the windows sit at draft step `step` (from 1), and what they see.

    Position t sees the teacher's slots j <= t - step and, of the stream's own step s <= step, slot
    t - step + s. With `own_kv`, step 1's slots j <= t - step + 1 stand in for the teacher's.
    """
    n, m = batch.ids.shape[1], batch.trained.shape[1]
    positions = window_positions(batch.starts, m, base.device)  # [B, m]
    distance = positions[..., None] - torch.arange(n, device=base.device)  # [B, m, n]
    within = torch.arange(m, device=base.device)
    ahead = within[:, None] - within  # [m, m]
    prefixes, masks = {}, {}
    for kind in set(base.layer_types):
        window = base.config.sliding_window if kind == SLIDING else n + m + 1
        teacher = (distance >= step) & (distance < window)
        own = [(ahead == step - s) & (ahead < window) for s in range(1, step + 1)]
        if own_kv:
            own[0] = (ahead >= step - 1) & (ahead < window)
        seen = torch.cat(own, dim=1).expand(len(teacher), -1, -1)
        if not own_kv:
            seen = torch.cat([teacher, seen], dim=2)
        prefixes[kind] = teacher
        masks[kind] = base.mask(seen[:, None])
    block = Block(positions, positions, None, n, masks, base.rotary(positions))
    return block, Prefix(n, prefixes)


def following(x: Tensor) -> Tensor:
    """Each window position gets its predecessor's value, `[B, m, ...]`; zeros at the first."""
    return F.pad(x, (0, 0) * (x.dim() - 2) + (1, 0))[:, :-1]


def unroll(
    accelerator: Accelerator, batch: Batch, teacher: TeacherStates, draft_steps: int
) -> Iterator[Drafted]:
    """Run interval 0 of the stream over a batch, draft step by draft step."""
    base, config = accelerator.base, accelerator.config
    gate = config.gates[0]
    embedding = base.embed(window_ids(batch)) if accelerator.entry is not None else None
    carried = Carried(tuple(teacher.before(i) for i in accelerator.carry_layers), own=False)
    arena = cast(KVArena, UnrolledArena(teacher, base.num_layers))
    for step in range(1, draft_steps + 1):
        block, prefix = unrolled_block(base, batch, step, own_kv=config.own_kv)
        if accelerator.entry is not None:
            start = accelerator.entry(embedding, carried.states, own=carried.own)
        else:
            start = teacher.at(gate)
        drafted = _interval(accelerator, 0, start, block, prefix, arena, teacher, step)
        if accelerator.entry is not None:
            drafted.pairs.append((start, teacher.at(gate)))
            carried = Carried((following(start), following(drafted.exit)), own=True)
        yield drafted


def unroll_interval(
    accelerator: Accelerator, interval: int, batch: Batch, teacher: TeacherStates
) -> Drafted:
    """Run a later interval, which starts from the slow state at its own gate, over a batch."""
    block, prefix = unrolled_block(accelerator.base, batch, 1)
    start = teacher.at(accelerator.config.gates[interval])
    arena = cast(KVArena, UnrolledArena(teacher, accelerator.base.num_layers))
    return _interval(accelerator, interval, start, block, prefix, arena, teacher, 1)


def _interval(
    accelerator: Accelerator,
    interval: int,
    start: Tensor,
    block: Block,
    prefix: Prefix,
    arena: KVArena,
    teacher: TeacherStates,
    step: int,
) -> Drafted:
    config = accelerator.config
    trace: list[Tensor] = []
    end = accelerator.advance(start, block, arena, prefix, interval=interval, trace=trace)
    layers = range(config.gates[interval], config.gates[interval + 1])
    targets = [config.schedule.target_layer(i + 1) for i in layers]
    pairs = [(p, teacher.at(i)) for p, i in zip(trace, targets, strict=True)]
    return Drafted(step, end, pairs)


def window_ids(batch: Batch, *, ahead: int = 0) -> Tensor:
    """Token ids at the windows' positions, or so many positions ahead of them, `[B, m]`."""
    at = window_positions(batch.starts, batch.trained.shape[1], batch.ids.device) + ahead
    return batch.ids.gather(1, at.clamp(max=batch.ids.shape[1] - 1))
