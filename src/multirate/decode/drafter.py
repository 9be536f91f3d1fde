"""Drafters: where guesses come from. Ours runs the accelerated stream; others fit the same interface.

A drafter never decides what is kept, and may write only arena slots beyond the verified lengths.

Shapes: R rows, k drafts, D hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from multirate.decode.sampling import Sampler
from multirate.models.arena import KVArena
from multirate.streams.accelerator import Accelerator, Carried


@dataclass(frozen=True, eq=False)
class Draft:
    """Guesses for the tokens after the last one of each row.

    Attributes:
        tokens: LongTensor `[R, k]`.
        probs: float32 `[R, k, Vd]`, the distributions the tokens were drawn from; None where they
            were not drawn at random.
        ids: LongTensor `[Vd]`, token ids of the columns of `probs`; None where Vd is the vocabulary.
    """

    tokens: Tensor
    probs: Tensor | None = None
    ids: Tensor | None = None


class Drafter(Protocol):
    """What the generation loop asks of a drafter."""

    @property
    def carry_layers(self) -> Sequence[int]:
        """Slow states of the last verified position that `draft` wants."""

    def draft(
        self,
        last: Tensor,
        lengths: Sequence[int],
        states: dict[int, Tensor],
        arena: KVArena,
        *,
        count: int,
        sampler: Sampler,
        go_on: Callable[[int, float], bool],
    ) -> Draft:
        """Guess up to `count` tokens for each row.

        Args:
            last: LongTensor `[R]`, each row's last token, not yet in the arena.
            lengths: verified slots of each row; `last` will sit at slot `lengths[row]`.
            states: for each of `carry_layers` the slow state `[R, 1, D]` one position before `last`.
            arena: keys and values; slots from `lengths[row]` on are free to use.
            count: most drafts, at least 1.
            sampler: greedy or sampling, as the target is.
            go_on: asked after each draft but the last, with the number of drafts made and the
                drafter's own chance that all of them are right (mean over rows); False ends the
                draft. What is already drafted stays in it, so acceptance remains exact.
        """


class AcceleratorDrafter:
    """Drafts one token after another with the accelerated stream."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator.eval()
        accelerator.fold()

    @property
    def carry_layers(self) -> Sequence[int]:
        return self.accelerator.carry_layers

    def draft(
        self,
        last: Tensor,
        lengths: Sequence[int],
        states: dict[int, Tensor],
        arena: KVArena,
        *,
        count: int,
        sampler: Sampler,
        go_on: Callable[[int, float], bool],
    ) -> Draft:
        stream, base = self.accelerator, self.accelerator.base
        carried = Carried(tuple(states[i] for i in stream.carry_layers), own=False)
        ids, token = stream.draft_ids, last
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        chance = torch.ones(len(lengths), device=base.device)
        for step in range(count):
            if step > 0 and not go_on(step, float(chance.mean())):
                break
            block = base.block([length + step for length in lengths], 1)
            prefix = stream.prefix(lengths, block.positions)
            logits, carried = stream.step(token[:, None], carried, block, arena, prefix)
            q = sampler.probabilities(sampler.warp_draft(logits[:, 0]))
            if sampler.greedy:
                chosen, column = q.max(-1)
            else:
                column = sampler.draw(q)
                chosen = q.gather(-1, column[:, None])[:, 0]
                probs.append(q)
            chance = chance * chosen
            token = column if ids is None else ids[column]
            tokens.append(token)
        return Draft(
            tokens=torch.stack(tokens, dim=1),
            probs=torch.stack(probs, dim=1) if probs else None,
            ids=ids,
        )
