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
from multirate.decode.tree import caterpillar
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
        width: candidates wanted at each position, the draft included. A drafter may give fewer, or a
            tree of another shape of `count * width` entries at most.
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
    """Guesses for the tokens after the last one of each row: a chain, or a tree.

    Attributes:
        tokens: LongTensor `[R, n]`; n = 0 where nothing was guessed.
        parents: LongTensor `[n]` or `[R, n]`, which entry of `tokens` each one follows, always an
            earlier one; -1 = the last token of the text. None for a chain. Different children of
            one parent are different tokens, or the later ones are wasted.
        probs: float32 `[R, n, Vd]`, the distributions that the tokens were drawn from, each given its
            ancestors and the siblings before it (`accept_sampled`); None where they were not drawn
            at random.
        ids: LongTensor `[Vd]`, token ids of the columns of `probs`; None where Vd is the vocabulary.
        lengths: how many of the n are the row's drafts, the rest is padding; None for all. As for
            `accept_sampled`, it may not depend on the value of a draft that is left out.
    """

    tokens: Tensor
    parents: Tensor | None = None
    probs: Tensor | None = None
    ids: Tensor | None = None
    lengths: list[int] | None = None


@dataclass(frozen=True, eq=False)
class Observation:
    """What the model made of one block: a chunk of the prompts, or last tokens and their drafts.

    Attributes:
        starts: slot of each row's first entry.
        states: for each of the drafter's `carry_layers` the slow states `[R, n, D]`.
        scores: the model's scores at each entry `[R, n, V]`; None for a chunk of the prompts.
        paths: for each row the entries that stay, entry 0 first; they stand at slots `starts[row]`, + 1,
            and so on. None for a chunk of the prompts: all stay, and beyond a prompt's end is padding.
    """

    starts: Sequence[int]
    states: dict[int, Tensor]
    scores: Tensor | None = None
    paths: Sequence[Sequence[int]] | None = None


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

    @property
    def extra_entries(self) -> int:
        """Most entries beyond `Draft.lengths` that it has the model run for itself to `observe`."""
        return 0

    def start(self, *, rows: int, max_len: int) -> Drafter:
        """The drafter of one generation: itself, unless it keeps a state from step to step.

        Args:
            rows: prompts in the batch.
            max_len: most tokens of a row, drafts included.
        """
        return self

    def keep(self, rows: Sequence[int]) -> None:  # noqa: B027  (most drafters keep nothing)
        """Keep the state of these rows only, in this order; the others have ended."""

    def observe(self, seen: Observation) -> None:  # noqa: B027  (most need only what `draft` is given)
        """Look at what the model made of a block; called after every pass of it."""

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
    tokens: list[Tensor] = []  # each [R, w], the draft and its runners-up
    probs: list[Tensor] = []
    chance = torch.ones(len(token), device=token.device)
    for made in range(request.count):
        if made > 0 and not request.go_on(made, float(chance.mean())):
            break
        q = sampler.probabilities(sampler.warp_draft(step(made, token)))
        width = min(request.width, q.shape[-1])
        if sampler.greedy:
            columns = q.topk(width).indices
        else:
            columns, drawn_from = draw_different(q, width, sampler)
            probs.append(drawn_from)
        chance = chance * q.gather(-1, columns[:, :1])[:, 0]
        tokens.append(columns if ids is None else ids[columns])
        token = tokens[-1][:, 0]
    ranked = torch.stack(tokens, dim=1)  # [R, k, w]
    chain, parents = ranked[..., 0], None
    q_all = torch.stack(probs, dim=1) if probs else None  # [R, k, w, Vd]
    if ranked.shape[2] > 1:
        chain, parents = caterpillar(chain, ranked[..., 1:])
        if q_all is not None:
            q_all = torch.cat([q_all[:, :, 0], q_all[:, :, 1:].flatten(1, 2)], dim=1)
    elif q_all is not None:
        q_all = q_all[:, :, 0]
    return Draft(chain, parents, q_all, ids)


def draw_different(q: Tensor, count: int, sampler: Sampler) -> tuple[Tensor, Tensor]:
    """Draw several tokens without replacement.

    Args:
        q: `[R, Vd]`, a distribution a row.
        count: how many to draw.
        sampler: draws.

    Returns:
        LongTensor `[R, count]`, columns of q, and `[R, count, Vd]`, what each was drawn from: q without
        those before it, normalised.
    """
    columns: list[Tensor] = [sampler.draw(q)]
    drawn_from = [q]
    while len(columns) < count:
        left = drawn_from[-1].scatter(1, columns[-1][:, None], 0.0)
        mass = left.sum(1, keepdim=True)
        # Where q has no further token, any one serves; it is then proposed for certain.
        column = sampler.draw(torch.where(mass > 0, left, 1.0))
        certain = torch.zeros_like(q).scatter_(1, column[:, None], 1.0)
        columns.append(column)
        drawn_from.append(torch.where(mass > 0, left / mass, certain))
    return torch.stack(columns, dim=1), torch.stack(drawn_from, dim=1)


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

    def start(self, *, rows: int, max_len: int) -> Drafter:
        if not self.accelerator.config.own_kv:
            return self
        from multirate.decode.eagle import OwnKvRun  # which is a drafter itself

        return OwnKvRun(self.accelerator, rows=rows, max_len=max_len)

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
