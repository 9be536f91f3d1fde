"""A draft step as one stack: token ids in, ranked guesses out (`models.stack`).

A step's own work is under a millisecond, and layer by layer a third of that again would go into what
stands between them. As one compiled graph the embedding, the entry, all layers, the head and the
ranking of its logits are one call.

Shapes: B rows, n positions, D hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from multirate.models.arena import KVArena
from multirate.models.base import BaseModel, Block, soft_cap
from multirate.models.stack import Stack
from multirate.streams.entry import CarryEntry, FusedInputs, fuse
from multirate.streams.layers import TiedLayer

if TYPE_CHECKING:
    from multirate.streams.accelerator import Accelerator

RANKED = 16  # most candidates of a node


class Ranking(NamedTuple):
    """What may follow each node, best first.

    Attributes:
        tokens: LongTensor `[B, n, w]`, ids of the base's vocabulary.
        chances: float32 `[B, n, w]`, what the drafter gives each.
    """

    tokens: Tensor
    chances: Tensor


class _Enter(nn.Module):
    """Token ids `[B, n]` and carried states to p at the gate."""

    scale: Tensor

    def __init__(self, base: BaseModel, fused: FusedInputs) -> None:
        super().__init__()
        self.embed_tokens, self.linear = base.embed_tokens, fused.packed or fused.linear
        self.register_buffer("scale", fused.scale)
        self.dtype = str(base.dtype).removeprefix("torch.")  # by its name it is in the signature

    def forward(self, ids: Tensor, *inputs: Tensor) -> Tensor:
        embedding = self.embed_tokens(ids).to(getattr(torch, self.dtype))
        return fuse((embedding, *inputs[: len(self.scale) - 1]), self.scale, self.linear)


class _Leave(nn.Module):
    """p at gate and exit to both, the logits, and their ranking.

    Args:
        accelerator: whose head it is.
        picks: the last input, `[B, 1]`, names the only position that is looked at.
    """

    draft_ids: Tensor | None

    def __init__(self, accelerator: Accelerator, *, picks: bool) -> None:
        super().__init__()
        base = accelerator.base
        self.norm, self.head = base.final_norm, accelerator.draft_head()
        self.register_buffer("draft_ids", accelerator.draft_ids)
        self.dtype, self.cap = str(base.dtype).removeprefix("torch."), base.logit_cap
        self.picks = picks

    def forward(self, entered: Tensor, left: Tensor, *inputs: Tensor) -> list[Tensor]:
        if self.picks:
            row = torch.arange(left.shape[0], device=left.device)[:, None]
            entered, left = entered[row, inputs[-1]], left[row, inputs[-1]]
        logits = soft_cap(self.head(self.norm(left.to(getattr(torch, self.dtype)))), self.cap)
        scores = logits.float()
        best = scores.topk(min(RANKED, scores.shape[-1]))
        chances = (best.values - scores.logsumexp(-1, keepdim=True)).exp()
        columns = best.indices
        tokens = columns if self.draft_ids is None else self.draft_ids[columns]
        return [entered, left, logits, tokens, chances]


class WholeSteps:
    """Runs an accelerator's draft steps as one compiled graph each.

    That takes the carry entry and tied layers, and a model that is compiled for a CPU.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.fits = accelerator.entry is not None and accelerator.config.layer_kind == "tied"
        self._known: dict[tuple[bool, bool], tuple[tuple[Any, ...], Stack]] = {}

    def run(
        self,
        ids: Tensor,
        states: Sequence[Tensor],
        block: Block,
        arena: KVArena,
        *,
        own: bool,
        last: Tensor | None = None,
    ) -> list[Tensor] | None:
        """p at entry and exit, logits, and the tokens and chances of `Ranking`; None: cannot be.

        Args:
            ids: `[B, n]`.
            states: that a position before each of them left, `[B, n, D]` each.
            block: where the positions sit.
            arena: keys and values of the stream's layers.
            own: as in `Carried`.
            last: `[B, 1]`, the only position of each row that is wanted; None for all of them.
        """
        base = self.accelerator.base
        if not self.fits or base.compile_mode is None:
            return None
        picked = () if last is None else (last,)
        stack = self._stack(own=own, picks=last is not None)
        indices = [layer.index for layer in self._layers]
        return base.run_whole(stack, (ids, *states, *picked), block, arena, indices)

    @property
    def _layers(self) -> list[TiedLayer]:
        return cast(list[TiedLayer], list(self.accelerator.layers))

    def _stack(self, *, own: bool, picks: bool) -> Stack:
        """The stack of one kind of step, made again when a part of it was folded or packed."""
        stream = self.accelerator
        entry = cast(CarryEntry, stream.entry)
        fused = entry.again if own else entry.first
        layers = [layer.folded or layer.tied for layer in self._layers]
        parts = (*layers, fused.packed, stream.draft_head(), stream.draft_ids)
        known = self._known.get((own, picks))
        if known is not None and all(map(is_, known[0], parts)):
            return known[1]
        stack = Stack(
            tuple(layers),
            tuple(stream.base.layer_types[layer.index] for layer in self._layers),
            _Enter(stream.base, fused),
            _Leave(stream, picks=picks),
            name="a draft step" if own else "a first draft step",
        )
        self._known[own, picks] = parts, stack
        return stack
