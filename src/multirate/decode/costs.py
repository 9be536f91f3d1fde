"""What drafting costs and yields: measured step costs against acceptance seen so far.

A cycle of draft steps and a verify pass of 1 + n rows yields 1 token and those of its drafts that stay.
What is drafted and verified follows one rule: time has a price, the tokens a second that decoding makes
anyway, and a draft step or a verified row must yield more tokens than its time is worth. So nothing is
drafted where that does not pay. Chances come from the drafter's own confidence, corrected by what was
seen of it; costs are measured on this device.
"""

from __future__ import annotations

import time
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from statistics import median

import torch

from multirate.decode.drafter import MAX_BEAM, MODEL, Draft


@dataclass(frozen=True)
class StepCosts:
    """Measured seconds of one step for a given number of rows.

    Attributes:
        verify: seconds of a pass over n positions a row, for n = 1, 2, ...
        draft: seconds of a draft step that continues m nodes a row, for m = 1, 2, ...
    """

    verify: tuple[float, ...]
    draft: tuple[float, ...]

    def extra(self, steps: Sequence[int], entries: int) -> float:
        """Seconds that draft steps and verifying so many drafts add to a plain step."""
        drafting = sum(self.draft[min(m, len(self.draft)) - 1] for m in steps)
        return drafting + self.verify[min(entries, len(self.verify) - 1)] - self.verify[0]

    @property
    def row(self) -> float:
        """Seconds of one more row, by the average slope of verify."""
        return (self.verify[-1] - self.verify[0]) / (len(self.verify) - 1)


def measure_costs(
    verify: Callable[[int], None],
    draft: Callable[[int], None],
    *,
    max_drafts: int,
    max_beam: int = 1,
    synchronize: Callable[[], None],
    repeats: int = 5,
) -> StepCosts:
    """Time verify passes of 1 .. max_drafts + 1 positions and draft steps; medians.

    Every second size is measured; those between are interpolated. Rounds are interleaved so that a
    slow moment of the machine hits all sizes alike.

    Args:
        verify: runs a pass over so many positions.
        draft: runs one draft step, and if its argument m is not 0 a second one that continues m nodes.
        max_drafts: most drafts that are verified.
        max_beam: most nodes that a draft step continues.
        synchronize: waits for the device.
        repeats: measured rounds.
    """
    sizes = sorted({1, *range(2, max_drafts + 2, 2), max_drafts + 1})
    beams = sorted({0, *range(2, max_beam + 1, 2)})
    jobs: list[Callable[[], None]] = [lambda n=n: verify(n) for n in sizes]  # type: ignore[misc]
    jobs += [lambda m=m: draft(m) for m in beams]  # type: ignore[misc]
    seconds: list[list[float]] = [[] for _ in jobs]
    for round_ in range(repeats + 1):
        for job, times in zip(jobs, seconds, strict=True):
            synchronize()
            start = time.perf_counter()
            job()
            synchronize()
            if round_ > 0:  # the first round warms up
                times.append(time.perf_counter() - start)
    medians = [median(times) for times in seconds]
    passes, drafts = medians[: len(sizes)], medians[len(sizes) :]
    second = [(m, both - drafts[0]) for m, both in zip(beams[1:], drafts[1:], strict=True)]
    return StepCosts(
        _between(dict(zip(sizes, passes, strict=True)), max_drafts + 1),
        _between({1: drafts[0], **dict(second)}, max_beam),
    )


def _between(known: dict[int, float], last: int) -> tuple[float, ...]:
    """Values at 1 .. last from those at some places, never falling."""
    values = []
    for n in range(1, last + 1):
        below = max(s for s in known if s <= n)
        above = min((s for s in known if s >= n), default=below)
        share = (n - below) / (above - below) if above > below else 0.0
        values.append(known[below] * (1 - share) + known[above] * share)
    # More rows cannot be cheaper; where they were measured so, it was noise.
    return tuple(accumulate(values, max))


# What was seen fades with this factor a cycle, so estimates follow the text, and fall back to the
# prior while nothing is drafted: drafting that was stopped is tried again after a while.
FADE = 0.98
PRIOR_WEIGHT = 8.0  # cycles or drafts that the prior counts as
DEFAULT_PRIOR = 0.4
MAX_WIDTH = 4  # most children of a node that are looked at; more can be asked for
MAX_ENTRIES = 16  # most drafts that are verified

# The chance that the second draw of a position, the third, ..., is right where those before are not.
RUNNER_UP_PRIOR = (0.2, 0.1, 0.07)

# Confidence is corrected in bins of it.
BINS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)


@dataclass(frozen=True)
class Outcome:
    """What became of one row's drafts.

    Attributes:
        drafted: depth of its tree, the length of a chain.
        accepted: how many of its tokens stay.
        entries: tokens of the tree.
    """

    drafted: int
    accepted: int
    entries: int = 0

    @staticmethod
    def of(parents: Sequence[int], path: Sequence[int], limit: int) -> Outcome:
        """From the parents of the drafts (`Tree.parents`), the entries that stay and a depth limit."""
        depths = [0]
        for parent in parents:
            depths.append(depths[parent] + 1)
        return Outcome(
            drafted=min(max(depths), limit),
            accepted=min(len(path), limit),
            entries=sum(0 < depth <= limit for depth in depths),
        )


class Confidence:
    """How often drafts are right of which their drafter says so and so, given that their parent is."""

    def __init__(self) -> None:
        self.seen = [0.0] * (len(BINS) + 1)
        self.right = [0.0] * (len(BINS) + 1)

    def chance(self, claimed: float) -> float:
        """The claim, corrected by what was seen."""
        place = bisect(BINS, claimed)
        right = self.right[place] + PRIOR_WEIGHT * claimed
        return right / (self.seen[place] + PRIOR_WEIGHT)

    def fade(self) -> None:
        self.seen = [FADE * x for x in self.seen]
        self.right = [FADE * x for x in self.right]

    def learn(self, claimed: float, right: bool) -> None:
        place = bisect(BINS, claimed)
        self.seen[place] += 1
        self.right[place] += right


@dataclass(frozen=True)
class EvenGrowth:
    """Trees of a known shape, to measure their cost: so many nodes of each level are continued."""

    nodes: int

    def chance(self, claimed: float, kind: int = MODEL) -> float:
        return claimed

    def pays(self, chance: float = 1.0) -> bool:
        return True

    def beam(self, depth: int, chances: Sequence[Sequence[float]], limit: int) -> int:
        return 1 if depth == 0 else min(self.nodes, limit)


class DraftLength:
    """Decides what is drafted and verified in each cycle, and learns from the outcome.

    Args:
        costs: measured on this device; None with `fixed`.
        max_drafts: upper limit of the depth.
        prior: expected acceptance of draft i of a chain given those before it.
        fixed: always a chain of this many drafts, whatever they cost.
        width: always this many candidates a position, the draft included: a chain and its runners-up;
            None to grow trees of any shape.
        max_width: most children of a node.
        drawn: drafts are drawn at random. What was drawn must be verified, so there is no growing a
            tree and keeping its best; `width` None is then the width that pays.
    """

    def __init__(
        self,
        costs: StepCosts | None,
        *,
        max_drafts: int,
        prior: Sequence[float] = (),
        fixed: int | None = None,
        width: int | None = 1,
        max_width: int = MAX_WIDTH,
        drawn: bool = False,
    ) -> None:
        assert costs is not None or (fixed is not None and width is not None)
        self.costs, self.fixed, self.max_drafts = costs, fixed, max_drafts
        prior = tuple(prior) or (DEFAULT_PRIOR,)
        self.prior = [prior[min(i, len(prior) - 1)] for i in range(max_drafts)]
        if width is None and drawn:
            width = self._drawn_width(max_width)
        self.grows, self.width = width is None, width or max_width
        self.reached = [0.0] * max_drafts
        self.passed = [0.0] * max_drafts
        self.confidence: dict[int, Confidence] = {}
        # Of cycles in which a model drafted: how many, what they took and what they yielded.
        self.cycles, self.seconds, self.tokens = 0.0, 0.0, 0.0
        self._prior_gain = (0.0, 0.0) if costs is None else self._expected()

    @property
    def max_slots(self) -> int:
        """Most arena slots beyond the verified ones that a cycle writes."""
        if self.fixed is not None:
            return self.fixed * self.width
        return max(MAX_ENTRIES, self.max_drafts * max(MAX_BEAM, 1 if self.grows else self.width))

    # ---------------------------------------------------------------- estimates

    def acceptance(self) -> list[float]:
        """Estimated probability that draft i is accepted, given that those before it were."""
        return [
            (passed + PRIOR_WEIGHT * prior) / (reached + PRIOR_WEIGHT)
            for passed, reached, prior in zip(self.passed, self.reached, self.prior, strict=True)
        ]

    def _expected(self) -> tuple[float, float]:
        """Seconds and tokens that the best chain is expected to add to a plain step."""
        assert self.costs is not None
        plain, best = self.costs.verify[0], (0.0, 0.0, 0.0)
        tokens, chance = 0.0, 1.0
        for k, acceptance in enumerate(self.prior, 1):
            if k * self.rows >= len(self.costs.verify):
                break
            chance *= acceptance
            tokens += chance
            seconds = self.costs.extra([1] * k, k * self.rows)
            best = max(best, ((1 + tokens) / (plain + seconds), seconds, tokens))
        return best[1:]

    def _drawn_width(self, limit: int) -> int:
        """The width whose last runner-up is worth its row where the draft is wrong."""
        assert self.costs is not None
        price = (1 - self.prior[0]) * self.costs.verify[0]
        pays = [chance * price > self.costs.row for chance in RUNNER_UP_PRIOR]
        return min(limit, 1 + [*pays, False].index(False))

    @property
    def rows(self) -> int:
        """Drafts that a level adds at least."""
        return 1 if self.grows else self.width

    def gain(self) -> tuple[float, float]:
        """Seconds and tokens that a model's drafts add to a plain step, on average."""
        weight = self.cycles + PRIOR_WEIGHT
        seconds, tokens = self._prior_gain
        return (
            (self.seconds + PRIOR_WEIGHT * seconds) / weight,
            (self.tokens + PRIOR_WEIGHT * tokens) / weight,
        )

    def price(self) -> float:
        """Tokens a second that decoding makes, drafting or not: what time is worth."""
        assert self.costs is not None
        seconds, tokens = self.gain()
        plain = self.costs.verify[0]
        return max(1.0 / plain, (1 + tokens) / (plain + seconds))

    # ---------------------------------------------------------------- decisions

    def pays(self, chance: float = 1.0) -> bool:
        """Whether a model's drafts pay where nothing else guesses right with this chance."""
        if self.fixed is not None:
            return True
        assert self.costs is not None
        seconds, tokens = self.gain()
        return chance * tokens > seconds / self.costs.verify[0]

    def go_on(self, drafted: int, chance: float | None) -> bool:
        """Whether one more draft of a chain pays.

        Args:
            drafted: drafts made so far in this cycle, fewer than `max_drafts`.
            chance: that all of them are accepted, by the drafter's own confidence; None for what
                was seen so far.
        """
        if self.fixed is not None:
            return True
        assert self.costs is not None
        acceptance = self.acceptance()
        if chance is None:
            chance = prod(acceptance[:drafted])
        cost = self.costs.draft[0] + self.rows * self.costs.row
        return chance * acceptance[drafted] > self.price() * cost

    def chance(self, claimed: float, kind: int = MODEL) -> float:
        """Estimated chance of a draft whose parent is right and whose drafter claims this chance."""
        known = self.confidence.get(kind)
        return claimed if known is None else known.chance(claimed)

    def beam(self, depth: int, chances: Sequence[Sequence[float]], limit: int) -> int:
        """How many nodes of a level to continue, 0 to end.

        Args:
            depth: of the nodes; 0 = the last token, whose chance is that of nothing else being right.
            chances: of each row's nodes, falling.
            limit: most that can be continued.
        """
        if depth == 0:
            return int(self.pays(sum(row[0] for row in chances) / len(chances)))
        if depth >= self.max_drafts:
            return 0
        assert self.costs is not None
        acceptance, price = self.acceptance()[depth], self.price()
        best, most, total = 0, 0.0, 0.0
        for m, column in enumerate(zip(*(row[:limit] for row in chances), strict=True), 1):
            total += sum(column) / len(column)
            cost = self.costs.draft[min(m, len(self.costs.draft)) - 1] + m * self.costs.row
            if total * acceptance - price * cost > most:
                best, most = m, total * acceptance - price * cost
        return best

    def keep(self, draft: Draft) -> Draft:
        """The drafts that are worth verifying; the same number for each row that has as many."""
        if not self.grows or self.fixed is not None or draft.chances is None:
            return draft
        assert draft.probs is None, "what was drawn at random must be verified"
        values = self._values(draft)
        ranked = [sorted(row, reverse=True) for row in values]
        assert self.costs is not None
        costs = self.costs.verify
        price, best, most, total = self.price(), 0, 0.0, 0.0
        for n in range(1, min(draft.tokens.shape[1], len(costs) - 1) + 1):
            total += sum(row[n - 1] for row in ranked if n <= len(row)) / len(ranked)
            gain = total - price * (costs[n] - costs[0])
            if gain > most:
                best, most = n, gain
        return draft.pruned(values, best)

    def _values(self, draft: Draft) -> list[list[float]]:
        """Chance of each entry's whole path; only of a row's own entries."""
        assert draft.chances is not None
        rows, n = draft.tokens.shape
        kinds = [[MODEL] * n] * rows if draft.kinds is None else draft.kinds
        values = []
        for row, parents in enumerate(draft.parent_lists()):
            known: list[float] = []
            for i in range(draft.lengths[row] if draft.lengths else n):
                above = known[parents[i]] if parents[i] >= 0 else 1.0
                known.append(above * self.chance(draft.chances[row][i], kinds[row][i]))
            values.append(known)
        return values

    # ---------------------------------------------------------------- learning

    def update(
        self,
        outcomes: Sequence[Outcome],
        draft: Draft | None = None,
        paths: Sequence[Sequence[int]] = (),
    ) -> None:
        """Learn from one cycle.

        Args:
            outcomes: one a row.
            draft: what was verified; None: a chain of each row's length.
            paths: block entries that stay, one list a row.
        """
        self.reached = [FADE * x for x in self.reached]
        self.passed = [FADE * x for x in self.passed]
        for outcome in outcomes:
            for i in range(min(outcome.drafted, outcome.accepted + 1)):
                self.reached[i] += 1
                self.passed[i] += i < outcome.accepted
        for confidence in self.confidence.values():
            confidence.fade()
        self.cycles, self.seconds, self.tokens = (
            FADE * x for x in (self.cycles, self.seconds, self.tokens)
        )
        depth = max(outcome.drafted for outcome in outcomes)
        steps = (1,) * depth if draft is None or draft.steps is None else draft.steps
        entries = depth if draft is None else draft.tokens.shape[1]
        accepted = [float(outcome.accepted) for outcome in outcomes]
        if draft is not None and draft.chances is not None:
            accepted = self._learn_confidence(draft, paths)
        if steps and self.costs is not None:
            self.cycles += 1
            self.seconds += self.costs.extra(steps, entries)
            self.tokens += sum(accepted) / len(accepted)

    def _learn_confidence(self, draft: Draft, paths: Sequence[Sequence[int]]) -> list[float]:
        """Also gives how many of each row's accepted tokens a model drafted."""
        assert draft.chances is not None
        rows, n = draft.tokens.shape
        kinds = [[MODEL] * n] * rows if draft.kinds is None else draft.kinds
        by_model = []
        for row, (parents, path) in enumerate(zip(draft.parent_lists(), paths, strict=True)):
            right = {-1, *(entry - 1 for entry in path)}
            for i in range(draft.lengths[row] if draft.lengths else n):
                if parents[i] in right:
                    known = self.confidence.setdefault(kinds[row][i], Confidence())
                    known.learn(draft.chances[row][i], i in right)
            by_model.append(float(sum(kinds[row][entry - 1] == MODEL for entry in path)))
        return by_model


def synchronizer(device: torch.device) -> Callable[[], None]:
    """A call that waits for the device, so that a wall clock means something."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    if device.type == "mps":
        return torch.mps.synchronize
    return lambda: None
