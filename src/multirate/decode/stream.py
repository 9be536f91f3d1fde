"""Our drafter: the accelerated stream guesses what the model will say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from multirate.decode.drafter import MAX_BEAM, RANKED, Draft, Drafter, DraftRequest
from multirate.decode.growth import Level, draft_levels
from multirate.models.arena import KVArena
from multirate.streams.accelerator import Accelerator, Carried, Guess
from multirate.streams.step import Ranking


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
        first: Callable[[], Guess],
        *,
        lengths: Sequence[int],
        arena: KVArena,
    ) -> Draft:
        """Draft from the last token on.

        Args:
            request: what the loop wants.
            first: takes the stream over the last token.
            lengths: the last token's slot in `arena`, one a row.
            arena: where the stream's layers read and write.
        """
        stream, base = self.accelerator, self.accelerator.base
        carried: Carried

        def step(level: Level) -> Tensor | Ranking:
            nonlocal carried
            if level.depth == 0:
                guess = first()
            elif level.tree is None:
                block = base.block([length + level.depth for length in lengths], 1)
                prefix = stream.prefix(lengths, block.positions)
                guess = stream.guess(level.tokens, carried, block, arena, prefix)
            else:
                row = torch.arange(len(lengths), device=level.tokens.device)[:, None]
                states = tuple(state[row, level.parents] for state in carried.states)
                depths, mask = level.tree.depths, level.tree.mask
                block = base.block(lengths, mask.shape[-1], depths=depths, block_mask=mask)
                block = block.tail(level.tokens.shape[1])
                prefix = stream.prefix(lengths, block.positions)
                guess = stream.guess(
                    level.tokens, Carried(states, carried.own), block, arena, prefix
                )
            carried = guess.carried
            if guess.ranking is not None and request.sampler.greedy:
                return guess.ranking
            return guess.logits

        return draft_levels(step, request, stream.draft_ids, max_beam=MAX_BEAM)


class AcceleratorDrafter(StreamDrafter):
    """Drafts with the accelerated stream over the base's own keys and values."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator.eval()
        accelerator.fold()

    def warm_up(self, rows: int) -> None:
        self.accelerator.warm_up(rows)

    def start(self, *, rows: int, max_len: int) -> Drafter:
        if not self.accelerator.config.own_kv:
            return self
        from multirate.decode.eagle import OwnKvRun  # which is a drafter with a stream itself

        return OwnKvRun(self.accelerator, rows=rows, max_len=max_len)

    def draft(self, request: DraftRequest) -> Draft:
        stream, lengths = self.accelerator, request.lengths

        def first() -> Guess:
            carried = Carried(tuple(request.states[i] for i in stream.carry_layers), own=False)
            block = stream.base.block(lengths, 1)
            prefix = stream.prefix(lengths, block.positions)
            return stream.guess(request.last[:, None], carried, block, request.arena, prefix)

        return self._draft(request, first, lengths=lengths, arena=request.arena)
