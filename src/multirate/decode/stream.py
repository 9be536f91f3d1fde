"""Our drafter: the accelerated stream guesses what the model will say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from multirate.decode.drafter import MAX_BEAM, RANKED, Draft, Drafter, DraftRequest
from multirate.decode.growth import Level, draft_chain, grow_tree
from multirate.models.arena import KVArena
from multirate.models.base import Block
from multirate.streams.accelerator import Accelerator, Carried


class StreamDrafter(Drafter):
    """What all drafters with an accelerated stream share: a chain, or a tree of which a step continues
    several nodes.

    A tree's nodes write their provisional keys and values to slots of their own behind the verified
    ones, and see their ancestors' only.
    """

    accelerator: Accelerator

    @property
    def carry_layers(self) -> Sequence[int]:
        return self.accelerator.carry_layers

    @property
    def expected_acceptance(self) -> Sequence[float]:
        return self.accelerator.config.expected_acceptance

    @property
    def max_width(self) -> int:
        return RANKED

    @property
    def max_beam(self) -> int:
        return MAX_BEAM

    @property
    def grows(self) -> bool:
        return True

    def _draft(
        self,
        request: DraftRequest,
        first: Callable[[], tuple[Tensor, Carried]],
        *,
        lengths: Sequence[int],
        arena: KVArena,
    ) -> Draft:
        """Draft from the last token on.

        Args:
            request: what the loop wants.
            first: takes the stream over the last token: draft logits `[R, 1, Vd]` and what it leaves.
            lengths: the last token's slot in `arena`, one a row.
            arena: where the stream's layers read and write.
        """
        stream, base = self.accelerator, self.accelerator.base
        carried: Carried

        def run(tokens: Tensor, block: Block) -> Tensor:
            nonlocal carried
            prefix = stream.prefix(lengths, block.positions)
            logits, carried = stream.step(tokens, carried, block, arena, prefix)
            return logits

        def step(made: int, token: Tensor) -> Tensor:
            nonlocal carried
            if made == 0:
                logits, carried = first()
                return logits[:, 0]
            return run(token[:, None], base.block([n + made for n in lengths], 1))[:, 0]

        def step_level(level: Level) -> Tensor:
            nonlocal carried
            if level.tree is None:
                return step(level.depth, level.tokens[:, 0])[:, None]
            row = torch.arange(len(lengths), device=level.tokens.device)[:, None]
            carried = Carried(tuple(s[row, level.parents] for s in carried.states), carried.own)
            depths, mask = level.tree.depths, level.tree.mask
            block = base.block(lengths, mask.shape[-1], depths=depths, block_mask=mask)
            return run(level.tokens, block.tail(level.tokens.shape[1]))

        if request.growth is not None:
            return grow_tree(step_level, request, stream.draft_ids, max_beam=MAX_BEAM)
        return draft_chain(step, request, stream.draft_ids)


class AcceleratorDrafter(StreamDrafter):
    """Drafts with the accelerated stream over the base's own keys and values."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator.eval()
        accelerator.fold()

    def start(self, *, rows: int, max_len: int) -> Drafter:
        if not self.accelerator.config.own_kv:
            return self
        from multirate.decode.eagle import OwnKvRun  # which is a drafter with a stream itself

        return OwnKvRun(self.accelerator, rows=rows, max_len=max_len)

    def draft(self, request: DraftRequest) -> Draft:
        stream, lengths = self.accelerator, request.lengths

        def first() -> tuple[Tensor, Carried]:
            carried = Carried(tuple(request.states[i] for i in stream.carry_layers), own=False)
            block = stream.base.block(lengths, 1)
            prefix = stream.prefix(lengths, block.positions)
            return stream.step(request.last[:, None], carried, block, request.arena, prefix)

        return self._draft(request, first, lengths=lengths, arena=request.arena)
