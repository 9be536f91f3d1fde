"""Where a forward pass's positions sit in the arena, and what they see: slots, masks, rotary embeddings.

A small model's step takes a few milliseconds, so what is the same in all of them is looked up: positions
and rotary embeddings lie in tables, which double when a text outgrows them.

Shapes: B rows, n block positions, L attended slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from multirate.models.architectures import SLIDING

Rotary = tuple[Tensor, Tensor]

SHORTEST_TABLE = 1024  # positions


@dataclass(frozen=True, eq=False)
class Block:
    """Where one forward pass's positions sit and what they may see. Made by `BaseModel.block`.

    Attributes:
        positions: `[B, n]` rotary positions.
        slots: `[B, n]` arena slots that are written.
        start: first slot when all rows write the same contiguous run, else None.
        visible: arena slots `[0, visible)` enter attention.
        masks: per attention type, `[B, 1, n, visible]`; bool (True = seen) or additive.
        rotary: per attention type, the (cos, sin) pair.
    """

    positions: Tensor
    slots: Tensor
    start: int | None
    visible: int
    masks: dict[str, Tensor]
    rotary: dict[str, Rotary]
    _tensors: dict[tuple[str, ...], list[Tensor]] = field(default_factory=dict, repr=False)

    def tail(self, n: int) -> Block:
        """The last n positions alone; what the others wrote they see as before."""
        first = self.slots.shape[1] - n

        def part(x: Tensor) -> Tensor:
            return x[:, first:].contiguous()  # once, not in every compiled layer

        return Block(
            positions=part(self.positions),
            slots=part(self.slots),
            start=None if self.start is None else self.start + first,
            visible=self.visible,
            masks={kind: mask[:, :, first:].contiguous() for kind, mask in self.masks.items()},
            rotary={kind: (part(cos), part(sin)) for kind, (cos, sin) in self.rotary.items()},
        )

    def tensors(self, kinds: tuple[str, ...]) -> list[Tensor]:
        """Slots, positions, and for each of these attention types mask, cos and sin, contiguous."""
        known = self._tensors.get(kinds)
        if known is None:
            flat = [self.slots, self.positions]
            for kind in kinds:
                flat += (self.masks[kind], *self.rotary[kind])
            known = self._tensors[kinds] = [tensor.contiguous() for tensor in flat]
        return known

    @classmethod
    def of_tensors(cls, tensors: Sequence[Tensor], kinds: Sequence[str]) -> Block:
        """The block whose `tensors(kinds)` these are; its slots are read from the tensor alone."""
        slots, positions, *rest = tensors
        masks, rotary = {}, {}
        for i, kind in enumerate(kinds):
            masks[kind], cos, sin = rest[3 * i : 3 * i + 3]
            rotary[kind] = (cos, sin)
        return cls(positions, slots, None, masks[kinds[0]].shape[-1], masks, rotary)


@dataclass(frozen=True, eq=False)
class _Tables:
    """Of all positions up to a length.

    Attributes:
        slots: LongTensor `[1, length]`: 0, 1, 2, ...
        rotary: per attention type (cos, sin), each `[1, length, head_dim]`; None where frequencies
            depend on the text's length.
    """

    slots: Tensor
    rotary: dict[str, Rotary] | None


class Blocks:
    """Makes the blocks of one model.

    Args:
        rotary_emb: the model's own module.
        kinds: attention types of its layers.
        window: of sliding attention, in positions; None where there is none.
        rotary_per_type: the module takes the attention type as well.
        additive: attention adds masks to scores.
    """

    def __init__(
        self,
        rotary_emb: nn.Module,
        kinds: Sequence[str],
        *,
        window: int | None,
        rotary_per_type: bool,
        additive: bool,
    ) -> None:
        self.rotary_emb, self.kinds = rotary_emb, tuple(dict.fromkeys(kinds))
        self.window, self.rotary_per_type, self.additive = window, rotary_per_type, additive
        types = getattr(rotary_emb, "rope_type", "default")
        names = types.values() if isinstance(types, dict) else [types]
        self._fixed = not any("dynamic" in name or name == "longrope" for name in names)
        self._tables: dict[tuple[torch.device, torch.dtype], _Tables] = {}

    def make(
        self,
        starts: Sequence[int],
        n: int,
        *,
        depths: Tensor | None,
        block_mask: Tensor | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Block:
        """As `BaseModel.block`, for activations of a type on a device."""
        rows, first, visible = len(starts), starts[0], max(starts) + n
        even = starts.count(first) == rows
        tables = self._up_to(visible, device, dtype)
        keys = tables.slots[:, :visible]  # [1, L]
        # What is the same for all rows has one row until the end.
        start: int | Tensor = first
        if even:
            slots = tables.slots[:, first:visible]
        else:
            start = torch.tensor(starts, device=device)[:, None]
            slots = start + tables.slots[:, :n]
        positions = slots if depths is None else start + depths.view(-1, n)
        if block_mask is None:
            seen = keys <= slots[..., None]  # [1 or B, n, L]
        elif even:
            seen = F.pad(block_mask.view(-1, n, n), (first, 0), value=True)
        else:
            seen = (keys < slots[:, :1, None]).expand(-1, n, -1).clone()
            columns = slots[:, None, :].expand(-1, n, -1)
            seen.scatter_(2, columns, block_mask.expand(rows, n, n))
        masks: dict[str, Tensor] = {}
        for kind in self.kinds:
            allowed = seen
            # A text that is no longer than the window is seen whole.
            if kind == SLIDING and self.window is not None and visible > self.window:
                if depths is not None:  # a tree's slots are not its positions
                    count = len(positions)
                    keys = keys.expand(count, -1).scatter(1, slots.expand(count, -1), positions)
                distance = positions[..., None] - keys[:, None, :]
                allowed = seen & (distance < self.window)
            masks[kind] = self.mask(_of_all(rows, allowed[:, None]), dtype)
        if tables.rotary is None:
            rotary = self.rotary(_of_all(rows, positions), dtype)
        else:
            places = None if even and depths is None else positions
            rotary = {
                kind: (
                    _of_all(rows, _rows_of(cos, places, first, visible)),
                    _of_all(rows, _rows_of(sin, places, first, visible)),
                )
                for kind, (cos, sin) in tables.rotary.items()
            }
        return Block(
            positions=_of_all(rows, positions),
            slots=_of_all(rows, slots),
            start=first if even else None,
            visible=visible,
            masks=masks,
            rotary=rotary,
        )

    def mask(self, allowed: Tensor, dtype: torch.dtype) -> Tensor:
        """A bool mask (True = seen) in the form that attention reads."""
        if not self.additive:
            return allowed
        zero = torch.zeros((), dtype=dtype, device=allowed.device)
        return torch.where(allowed, zero, torch.finfo(dtype).min)

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> dict[str, Rotary]:
        """(cos, sin) for positions `[B, n]`, per attention type."""
        like = torch.empty(1, dtype=dtype, device=positions.device)
        if self.rotary_per_type:
            return {kind: self.rotary_emb(like, positions, kind) for kind in self.kinds}
        return dict.fromkeys(self.kinds, self.rotary_emb(like, positions))

    def _up_to(self, length: int, device: torch.device, dtype: torch.dtype) -> _Tables:
        known = self._tables.get((device, dtype))
        if known is None or known.slots.shape[1] < length:
            size = max(SHORTEST_TABLE, 1 << length.bit_length())
            # Outside inference mode, whose tensors could not be used in training later.
            with torch.inference_mode(False), torch.no_grad():
                slots = torch.arange(size, device=device)[None]
                known = _Tables(slots, self.rotary(slots, dtype) if self._fixed else None)
            self._tables[device, dtype] = known
        return known


def _rows_of(table: Tensor, places: Tensor | None, start: int, stop: int) -> Tensor:
    """Entries of a table `[1, length, d]` at places `[B, n]`, or at a run of them: `[B, n, d]`."""
    return table[:, start:stop] if places is None else F.embedding(places, table[0])


def _of_all(rows: int, x: Tensor) -> Tensor:
    """One row, or all of them, as all of them."""
    return x if len(x) == rows else x.expand(rows, *x.shape[1:]).contiguous()
