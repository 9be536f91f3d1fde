"""Drafters: where guesses come from. Ours runs the accelerated stream; others fit the same interface.

A drafter never decides what is kept, and may write only arena slots beyond the verified lengths.

Shapes: R rows, k drafts, D hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from multirate.decode.sampling import Sampler
from multirate.models.arena import KVArena
from multirate.streams.accelerator import Accelerator, Carried

RANKED = 16  # most candidates that a drafter with a distribution gives

# Whether one more draft pays, given the number made so far and the drafter's own chance that all of
# them are right (None: it has no opinion). See `DraftLength.go_on`.
GoOn = Callable[[int, float | None], bool]


@dataclass(frozen=True, eq=False)
class DraftRequest:
    """What the generation loop asks of a drafter in one cycle.

    Attributes:
        last: LongTensor `[R]`, each row's last token, not yet in the arena.
        lengths: verified slots of each row; `last` will sit at slot `lengths[row]`.
        states: for each of the drafter's `carry_layers` the slow state `[R, 1, D]` one position
            before `last`.
        arena: keys and values; slots from `lengths[row]` on are free to use.
        ids: prompt and output of each row, `last` included: `lengths[row] + 1` ids.
        count: most drafts, at least 1.
        sampler: greedy or sampling, as the target is.
        go_on: asked after each draft but the last, with the number of drafts made and the drafter's
            own chance that all of them are right (mean over rows); False ends the draft. What is
            already drafted stays in it, so acceptance remains exact.
        width: candidates wanted at each position, the draft included; above 1 when greedy only. A
            drafter may give fewer.
    """

    last: Tensor
    lengths: Sequence[int]
    states: dict[int, Tensor]
    arena: KVArena
    ids: Sequence[Sequence[int]]
    count: int
    sampler: Sampler
    go_on: GoOn
    width: int = 1


@dataclass(frozen=True, eq=False)
class Draft:
    """Guesses for the tokens after the last one of each row.

    Attributes:
        tokens: LongTensor `[R, k]`; k = 0 where nothing was guessed.
        probs: float32 `[R, k, Vd]`, the distributions the tokens were drawn from; None where they
            were not drawn at random.
        ids: LongTensor `[Vd]`, token ids of the columns of `probs`; None where Vd is the vocabulary.
        siblings: LongTensor `[R, k, w - 1]`, the runners-up of each draft; None for a bare chain.
        lengths: how many of the k are the row's drafts, the rest is padding; None for all. As for
            `accept_sampled`, it may not depend on the value of a draft that is left out.
    """

    tokens: Tensor
    probs: Tensor | None = None
    ids: Tensor | None = None
    lengths: list[int] | None = None
    siblings: Tensor | None = None


class Drafter(ABC):
    """What the generation loop asks of a drafter."""

    @property
    def carry_layers(self) -> Sequence[int]:
        """Slow states of the last verified position that `draft` wants."""
        return ()

    @property
    def expected_acceptance(self) -> Sequence[float]:
        """Expected acceptance of draft i given those before it; empty if nothing is known."""
        return ()

    def start(self, *, rows: int, max_len: int) -> Drafter:
        """The drafter of one generation: itself, unless it keeps a state from step to step.

        Args:
            rows: prompts in the batch.
            max_len: most tokens of a row, drafts included.
        """
        return self

    def keep(self, rows: Sequence[int]) -> None:  # noqa: B027  (most drafters keep nothing)
        """Keep the state of these rows only, in this order; the others have ended."""

    @property
    def max_width(self) -> int:
        """Most candidates a position that it can give: 1 = no runners-up."""
        return 1

    @abstractmethod
    def draft(self, request: DraftRequest) -> Draft:
        """Guess up to `request.count` tokens for each row."""


def draft_chain(
    step: Callable[[int, Tensor], Tensor], request: DraftRequest, ids: Tensor | None = None
) -> Draft:
    """Draft one token after another.

    Args:
        step: takes the number of drafts made so far and the token `[R]` to continue; returns
            logits `[R, Vd]`.
        request: what the loop wants.
        ids: as in `Draft`.
    """
    sampler, token = request.sampler, request.last
    tokens: list[Tensor] = []
    probs: list[Tensor] = []
    siblings: list[Tensor] = []
    chance = torch.ones(len(token), device=token.device)
    for made in range(request.count):
        if made > 0 and not request.go_on(made, float(chance.mean())):
            break
        q = sampler.probabilities(sampler.warp_draft(step(made, token)))
        if sampler.greedy:
            best = q.topk(min(request.width, q.shape[-1]))
            chosen, column = best.values[:, 0], best.indices[:, 0]
            others = best.indices[:, 1:]
            siblings.append(others if ids is None else ids[others])
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
        siblings=torch.stack(siblings, dim=1) if sampler.greedy and request.width > 1 else None,
    )


class AcceleratorDrafter(Drafter):
    """Drafts one token after another with the accelerated stream."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator.eval()
        accelerator.fold()

    @property
    def carry_layers(self) -> Sequence[int]:
        return self.accelerator.carry_layers

    @property
    def expected_acceptance(self) -> Sequence[float]:
        return self.accelerator.config.expected_acceptance

    @property
    def max_width(self) -> int:
        return RANKED

    def draft(self, request: DraftRequest) -> Draft:
        stream, base, lengths = self.accelerator, self.accelerator.base, request.lengths
        carried = Carried(tuple(request.states[i] for i in stream.carry_layers), own=False)

        def step(made: int, token: Tensor) -> Tensor:
            nonlocal carried
            block = base.block([length + made for length in lengths], 1)
            prefix = stream.prefix(lengths, block.positions)
            logits, carried = stream.step(token[:, None], carried, block, request.arena, prefix)
            return logits[:, 0]

        return draft_chain(step, request, stream.draft_ids)
