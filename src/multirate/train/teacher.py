"""The teacher: what the frozen base model says about a batch, as far as training needs it.

It runs once a batch, up to h_N and without its LM head. What is kept: slow states over the trained
windows, and the keys and values of the layers that the stream reads.

Shapes: B rows, n positions, m window positions, D hidden size, G key-value heads, d head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from multirate.config.accelerator import AcceleratorConfig
from multirate.models.base import BaseModel
from multirate.train.batches import Batch


@dataclass(frozen=True, eq=False)
class Needs:
    """What training an accelerator asks of the teacher.

    Attributes:
        states: indices i of slow states h_i; the last one is h_N.
        layers: base layers whose keys and values the stream reads.
        whole: windows start at the start of each text (`batches.collate`).
    """

    states: tuple[int, ...]
    layers: tuple[int, ...]
    whole: bool = False

    @classmethod
    def of(cls, config: AcceleratorConfig) -> Needs:
        targets = {config.schedule.target_layer(i + 1) for i in config.schedule.layers}
        carried = config.carry_layers if config.entry == "carry" else ()
        states = {*targets, *carried, *config.gates[:-1], config.num_layers}
        layers = (
            set() if config.own_kv else {config.source_layer(i) for i in config.schedule.layers}
        )
        return cls(tuple(sorted(states)), tuple(sorted(layers)), whole=config.own_kv)


@dataclass(frozen=True, eq=False)
class TeacherStates:
    """What the teacher says about a batch.

    Attributes:
        states: for each needed i, h_i `[B, m + 1, D]`: one position before the window, then the window.
        keys: for each needed layer, rotated keys `[B, G, n, d]` of all positions.
        values: alike.
    """

    states: dict[int, Tensor]
    keys: dict[int, Tensor]
    values: dict[int, Tensor]

    def before(self, i: int) -> Tensor:
        """h_i one position before each window position, `[B, m, D]`."""
        return self.states[i][:, :-1]

    def at(self, i: int) -> Tensor:
        """h_i at the window's positions, `[B, m, D]`."""
        return self.states[i][:, 1:]


def window_positions(starts: Sequence[int], width: int, device: torch.device) -> Tensor:
    """Positions `[B, width]` from each row's start on."""
    first = torch.tensor(list(starts), device=device)
    return first[:, None] + torch.arange(width, device=device)


@torch.no_grad()
def run_teacher(base: BaseModel, batch: Batch, needs: Needs) -> TeacherStates:
    """Run the frozen base model over a batch on its device."""
    rows, n = batch.ids.shape
    states: dict[int, Tensor] = dict.fromkeys(needs.states, cast(Tensor, None))
    arena = base.arena(rows=rows, max_len=n)
    block = base.block([0] * rows, n)
    base.run_layers(base.embed(batch.ids), 0, base.num_layers, block, arena, states=states)
    starts = [start - 1 for start in batch.starts]
    at = window_positions(starts, batch.trained.shape[1] + 1, base.device)
    # A window may reach beyond its row, where nothing is trained and any state does.
    at = at.clamp(max=n - 1)[..., None].expand(-1, -1, base.hidden_size)
    return TeacherStates(
        {i: h.gather(1, at) for i, h in states.items()},
        {i: arena.layers[i].keys for i in needs.layers},
        {i: arena.layers[i].values for i in needs.layers},
    )
