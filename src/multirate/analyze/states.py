"""Slow states of a text, computed once and kept, and what an accelerated layer needs beside them.

An accelerated stream is run as it is when it drafts its first token: position t sees the slow keys and
values of positions before t, and in `tied` layers its own at t.

Shapes: B rows, n positions, T used positions of all rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache

from multirate.analyze.text import Text
from multirate.models.arena import KVArena
from multirate.models.base import SLIDING, BaseModel, Block
from multirate.streams.fit import FIRST_POSITION
from multirate.streams.layers import Prefix

_HEAD_POSITIONS = 512  # whose logits are held at once


class DraftArena(Cache):
    """The slow stream's keys and values, followed by those that an accelerated row writes itself."""

    def __init__(self, slow: KVArena) -> None:
        super().__init__(layers=list(slow.layers))

    def use(self, block: Block, start: int, stop: int) -> None:
        """Positions are in the masks; nothing to point at."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        layer, dtype = self.layers[layer_idx], key_states.dtype
        keys = torch.cat([cast(Tensor, layer.keys).to(dtype), key_states], dim=2)
        values = torch.cat([cast(Tensor, layer.values).to(dtype), value_states], dim=2)
        return keys, values


def draft_block(base: BaseModel, start: int, stop: int) -> tuple[Block, Prefix]:
    """Masks of a first draft step at positions `start .. stop-1`, for `tied` layers and `lean` ones."""
    t = torch.arange(start, stop, device=base.device)
    keys = torch.arange(stop, device=base.device)
    distance = t[:, None] - keys[None, :]
    own = torch.eye(len(t), dtype=torch.bool, device=base.device)
    masks, prefixes = {}, {}
    for kind in set(base.layer_types):
        window = base.config.sliding_window if kind == SLIDING else stop + 1
        before = (distance > 0) & (distance < window)
        prefixes[kind] = before[None]
        masks[kind] = base.mask(torch.cat([before, own], dim=1)[None, None])
    positions = t[None]
    block = Block(positions, positions, start, stop, masks, base.rotary(positions))
    return block, Prefix(stop, prefixes)


@dataclass
class Batch:
    """Some rows, right-padded, from the position before the first one that is used.

    Attributes:
        start: first position that is kept.
        stop: one past the last.
        used: `[B, n]` bool, positions that predict an answer's token; n = stop - start.
        states: slow layer to its state h_i `[B, n, D]`.
        arena: the slow keys and values of the layers that are needed, from position 0.
        choices: `[T]` the full model's next token at the used positions.
    """

    start: int
    stop: int
    used: Tensor
    states: dict[int, Tensor]
    arena: DraftArena
    choices: Tensor


@dataclass
class CachedText:
    """A text's slow states.

    Attributes:
        base: the model that they are of.
        batches: the rows.
    """

    base: BaseModel
    batches: list[Batch] = field(default_factory=list)
    _blocks: dict[tuple[int, int], tuple[Block, Prefix]] = field(default_factory=dict)
    _tokens: dict[int, Tensor] = field(default_factory=dict)

    @property
    def positions(self) -> int:
        """T."""
        return sum(len(batch.choices) for batch in self.batches)

    @property
    def choices(self) -> Tensor:
        """`[T]` the full model's next tokens."""
        return torch.cat([batch.choices for batch in self.batches])

    def block(self, batch: Batch) -> tuple[Block, Prefix]:
        """Where the rows of a batch sit, for accelerated layers."""
        place = batch.start, batch.stop
        if place not in self._blocks:
            self._blocks[place] = draft_block(self.base, *place)
        return self._blocks[place]

    def tokens(self, layer: int) -> Tensor:
        """`[T]` the next tokens that the LM head reads from h_layer."""
        if layer not in self._tokens:
            self._tokens[layer] = next_tokens(self.base, self.state(layer))
        return self._tokens[layer]

    def state(self, layer: int, *, shift: int = 0) -> Tensor:
        """h_layer at the used positions, or `shift` positions before them: `[T, D]` float32."""
        return self.gather(lambda batch: _earlier(batch.states[layer], shift))

    def gather(self, states: Callable[[Batch], Tensor]) -> Tensor:
        """States `[B, n, D]` of every batch at the used positions, `[T, D]` float32."""
        return torch.cat([states(batch)[batch.used].float() for batch in self.batches])


def _earlier(x: Tensor, shift: int) -> Tensor:
    return F.pad(x, (0, 0, shift, 0))[:, : x.shape[1]] if shift else x


def grouped(texts: Sequence[Text], *, tokens: int) -> Iterator[list[Text]]:
    """Texts of similar length in groups of at most about `tokens` padded positions."""
    group: list[Text] = []
    for text in sorted(texts, key=lambda text: len(text.ids)):
        if group and len(text.ids) * (len(group) + 1) > tokens:
            yield group
            group = []
        group.append(text)
    if group:
        yield group


@torch.no_grad()
def read_batch(
    base: BaseModel,
    texts: Sequence[Text],
    *,
    layers: Iterable[int],
    visit: Callable[[dict[int, Tensor]], None] | None = None,
) -> Batch:
    """Run the slow stream over some texts.

    Args:
        base: the model.
        texts: at least one.
        layers: states that are kept; keys and values are kept of the layers that produce them, which
            are those that an accelerated layer aiming at such a state reads.
        visit: called with all N + 1 states before the others are dropped.
    """
    rows, n = len(texts), max(len(text.ids) for text in texts)
    ids = torch.zeros((rows, n), dtype=torch.long)
    used = torch.zeros((rows, n), dtype=torch.bool)
    for row, text in enumerate(texts):
        ids[row, : len(text.ids)] = torch.tensor(text.ids)
        for start, stop in text.answers:
            used[row, start - 1 : stop - 1] = True
    used[:, :FIRST_POSITION] = False
    ids, used = ids.to(base.device), used.to(base.device)
    kept = set(layers) | {base.num_layers}
    states: dict[int, Tensor] = dict.fromkeys(
        range(base.num_layers + 1) if visit else kept, cast(Tensor, None)
    )
    arena = base.arena(rows=rows, max_len=n)
    block = base.block([0] * rows, n)
    base.run_layers(base.embed(ids), 0, base.num_layers, block, arena, states=states)
    if visit is not None:
        visit(states)
    for i, layer in enumerate(arena.layers):
        if i + 1 not in kept:
            layer.keys = layer.values = cast(Tensor, layer.keys)[:, :, :0].clone()
    start = max(0, int(used.any(0).float().argmax()) - 1)
    used = used[:, start:]
    states = {i: states[i][:, start:].clone() for i in kept}
    choices = next_tokens(base, states[base.num_layers][used])
    return Batch(start, n, used, states, DraftArena(arena), choices)


def head(base: BaseModel, states: Tensor) -> Tensor:
    """Logits `[T, V]` of states `[T, D]`."""
    return base.head(states.to(base.dtype))


@torch.no_grad()
def next_tokens(base: BaseModel, states: Tensor) -> Tensor:
    """The most likely next token `[T]` if the model ended at states `[T, D]`."""
    return torch.cat([head(base, some).argmax(-1) for some in states.split(_HEAD_POSITIONS)])


def cosine(x: Tensor, y: Tensor) -> float:
    """Mean cosine of states `[T, D]`."""
    return float(F.cosine_similarity(x.float(), y.float(), dim=-1).mean())


def share(same: Tensor) -> float:
    """Mean of a bool tensor."""
    return float(same.float().mean())


def mixed_precision(base: BaseModel) -> torch.autocast:
    """Float32 adapters beside a base of a smaller dtype: matmuls in bfloat16, sums in float32."""
    enabled = base.dtype != torch.float32
    return torch.autocast(base.device.type, dtype=torch.bfloat16, enabled=enabled)
