"""What the generation loop and drafters say to each other: requests, drafts, observations.

A drafter never decides what is kept, and may write only arena slots beyond the verified lengths.

Shapes: R rows, k drafts, D hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from multirate.decode.sampling import Sampler
from multirate.models.arena import KVArena

RANKED = 16  # most candidates that a drafter with a distribution gives
MAX_BEAM = 4  # most nodes of a level that the stream continues in one step

MODEL, TEXT = 0, 1  # where a draft comes from: a model's distribution, or the text before

# Whether one more draft pays, given the number made so far and the drafter's own chance that all of
# them are right (None: it has no opinion). See `DraftLength.go_on`.
GoOn = Callable[[int, float | None], bool]


class Growth(Protocol):
    """Decides the shape of trees; implemented by `DraftLength`. Chances are estimated, 0 to 1."""

    def chance(self, claimed: float, kind: int = MODEL) -> float:
        """Of a draft whose parent is right, given what its drafter claims."""

    def pays(self, chance: float = 1.0) -> bool:
        """Whether a model should draft where nothing else guesses right with this chance."""

    def beam(self, depth: int, chances: Sequence[Sequence[float]], limit: int) -> int:
        """How many nodes of a level to continue, given each row's chances, falling; 0 to end."""


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
        growth: if given, the loop keeps of a draft what is worth verifying, by its `chances`. `count`
            is then its depth and `width` the children of a node; a drafter that can, grows a tree.
            None when sampling: what was drawn at random must be verified.
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
    growth: Growth | None = None


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
        chances: for each row n numbers, what the drafter itself thinks of each draft: the chance that
            it is right if its parent is. None where it has no opinion.
        kinds: for each row n times `MODEL` or `TEXT`; None: all of them `MODEL`.
        steps: of each draft step that was run, how many nodes a row it continued. None: one step of
            one node for each level.
        lists: tokens and parents of each row on the host, where they were made there.
    """

    tokens: Tensor
    parents: Tensor | None = None
    probs: Tensor | None = None
    ids: Tensor | None = None
    lengths: list[int] | None = None
    chances: Sequence[Sequence[float]] | None = None
    kinds: Sequence[Sequence[int]] | None = None
    steps: tuple[int, ...] | None = None
    lists: tuple[list[list[int]], list[list[int]]] | None = None

    @staticmethod
    def of_rows(
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        *,
        device: torch.device,
        **fields: Any,
    ) -> Draft:
        """From each row's tokens and parents on the host; rows may have different numbers of them.

        Args:
            tokens: of each row.
            parents: of each row.
            device: of the tensors.
            fields: other attributes, `chances` and `kinds` as long as the row's tokens.
        """
        lengths = [len(row) for row in tokens]
        n = max(lengths)
        chain = list(range(-1, n - 1))
        drafts = [[*row, *[0] * (n - len(row))] for row in tokens]
        up = [[*row, *[-1] * (n - len(row))] for row in parents]
        is_chain = all(row[:m] == chain[:m] for row, m in zip(up, lengths, strict=True))
        return Draft(
            tokens=as_tensor(drafts, n, device),
            parents=None if is_chain else as_tensor(up, n, device),
            lengths=lengths,
            lists=(drafts, [chain] * len(up) if is_chain else up),
            **fields,
        )

    def token_lists(self) -> list[list[int]]:
        """Tokens of each row's entries, padding included, on the host."""
        if self.lists is not None:
            return self.lists[0]
        found: list[list[int]] = self.tokens.tolist()
        return found

    def parent_lists(self) -> list[list[int]]:
        """Parents of each row's entries, on the host, for a chain too."""
        if self.lists is not None:
            return self.lists[1]
        rows, n = self.tokens.shape
        if self.parents is None:
            return [list(range(-1, n - 1))] * rows
        found: list[list[int]] = self.parents.expand(rows, n).tolist()
        return found

    def pruned(self, values: Sequence[Sequence[float]], count: int) -> Draft:
        """The `count` entries of greatest value in each row, the likeliest path first.

        Args:
            values: of each row's own entries, none above its parent's.
            count: how many stay; all of a row that has fewer.
        """
        tokens, parents, chances, kinds = [], [], [], []
        everything = zip(
            values,
            self.token_lists(),
            self.parent_lists(),
            self.chances or [[0.0] * len(row) for row in values],
            self.kinds or [[MODEL] * len(row) for row in values],
            strict=True,
        )
        for value, row, up, chance, kind in everything:
            # Among equals a parent comes first, because it stands before its children.
            best = sorted(range(len(value)), key=lambda i: (-value[i], i))[:count]
            order = _depth_first(best, up)
            place = {old: new for new, old in enumerate(order)} | {-1: -1}
            tokens.append([row[i] for i in order])
            parents.append([place[up[i]] for i in order])
            chances.append([chance[i] for i in order])
            kinds.append([kind[i] for i in order])
        return Draft.of_rows(
            tokens,
            parents,
            device=self.tokens.device,
            chances=None if self.chances is None else chances,
            kinds=None if self.kinds is None else kinds,
            steps=self.steps,
        )


def as_tensor(rows: Sequence[Sequence[int]], width: int, device: torch.device) -> Tensor:
    """Rows of `width` ids each as a LongTensor `[R, width]`."""
    return torch.tensor(rows, dtype=torch.long, device=device).view(len(rows), width)


def _depth_first(entries: Sequence[int], parents: Sequence[int]) -> list[int]:
    """A tree's entries, best first, so ordered that each one's descendants follow it at once."""
    children: dict[int, list[int]] = {}
    for entry in entries:
        children.setdefault(parents[entry], []).append(entry)
    order, stack = [], [-1]
    while stack:
        entry = stack.pop()
        order.append(entry)
        stack.extend(reversed(children.get(entry, [])))
    return order[1:]


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

    def warm_up(self, rows: int) -> None:  # noqa: B027  (most have nothing to compile)
        """Compile now what drafting for so many rows needs, if it is not yet."""

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

    @property
    def max_beam(self) -> int:
        """Most nodes of a level that one of its steps can continue."""
        return 1

    @property
    def grows(self) -> bool:
        """Whether it asks `DraftRequest.growth` itself if it should draft at all."""
        return False

    @abstractmethod
    def draft(self, request: DraftRequest) -> Draft:
        """Guess up to `request.count` tokens for each row."""
