"""How many tokens to draft: measured step costs against acceptance seen so far.

Drafting k tokens and verifying them costs `k * draft + verify(k + 1)` seconds and yields
1 + a_1 + a_1 a_2 + ... tokens. The best k follows from the costs of this machine and the acceptance of
this text; k = 0 is plain decoding, so drafting stops by itself where it does not pay. Within a
draft the drafter's confidence decides: one more draft is made while its expected gain is worth its cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from statistics import median

import torch


@dataclass(frozen=True)
class StepCosts:
    """Measured seconds of one step for a given number of rows.

    Attributes:
        verify: seconds of a pass over n positions a row, for n = 1, 2, ...
        draft: seconds of one draft step.
    """

    verify: tuple[float, ...]
    draft: float

    def cycle(self, k: int, width: int = 1) -> float:
        """Seconds of drafting k tokens and verifying them; `cycle(0)` is a plain step."""
        return k * self.draft + self.verify[k * width]

    def one_more(self, width: int = 1) -> float:
        """Seconds that one more draft adds to a cycle, by the average slope of verify."""
        slope = (self.verify[-1] - self.verify[0]) / (len(self.verify) - 1)
        return self.draft + width * slope


def measure_costs(
    verify: Callable[[int], None],
    draft: Callable[[], None],
    *,
    max_drafts: int,
    synchronize: Callable[[], None],
    repeats: int = 5,
) -> StepCosts:
    """Time verify passes of 1 .. max_drafts + 1 positions and one draft step; medians.

    Every second size is measured; those between are interpolated. Rounds are interleaved so that a
    slow moment of the machine hits all sizes alike.
    """
    sizes = sorted({1, *range(2, max_drafts + 2, 2), max_drafts + 1})
    jobs: list[Callable[[], None]] = [lambda n=n: verify(n) for n in sizes]  # type: ignore[misc]
    jobs.append(draft)
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
    known = dict(zip(sizes, medians[:-1], strict=True))
    verify_costs = []
    for n in range(1, max_drafts + 2):
        below = max(s for s in sizes if s <= n)
        above = min(s for s in sizes if s >= n)
        share = (n - below) / (above - below) if above > below else 0.0
        verify_costs.append(known[below] * (1 - share) + known[above] * share)
    # More rows cannot be cheaper; where they were measured so, it was noise.
    return StepCosts(tuple(accumulate(verify_costs, max)), medians[-1])


# Seen drafts fade with this factor a cycle, so the estimate follows the text, and falls back to the
# prior while nothing is drafted: drafting that was stopped is tried again after a while.
FADE = 0.98
PRIOR_WEIGHT = 8.0  # drafts that the prior counts as
DEFAULT_PRIOR = 0.4
# The chance that a runner-up, the second choice, the third, ..., is right where the first is not.
SIBLING_PRIOR = (0.2, 0.1, 0.07)
MAX_WIDTH = 1 + len(SIBLING_PRIOR)  # of what is chosen; more can be asked for
MAX_ENTRIES = 12  # drafted tokens of a tree, runners-up included


@dataclass(frozen=True)
class Outcome:
    """What became of one row's drafts.

    Attributes:
        drafted: depth of its tree, the length of a chain.
        accepted: how many of its tokens stay.
        rank: which runner-up the last of them is, from 0; -1 if it is its parent's first child.
        entries: tokens of the tree.
    """

    drafted: int
    accepted: int
    rank: int = -1
    entries: int = 0

    @staticmethod
    def of(parents: Sequence[int], path: Sequence[int], limit: int) -> Outcome:
        """From the parents of the drafts (`Tree.parents`), the entries that stay and a depth limit."""
        depths = [0]
        for parent in parents:
            depths.append(depths[parent] + 1)
        rank = -1
        if path:
            elder = [i for i, p in enumerate(parents, 1) if p == parents[path[-1] - 1]]
            rank = elder.index(path[-1]) - 1
        return Outcome(
            drafted=min(max(depths), limit),
            accepted=min(len(path), limit),
            rank=rank if len(path) <= limit else -1,
            entries=sum(0 < depth <= limit for depth in depths),
        )


class DraftLength:
    """Chooses the number of drafts and of runners-up before each cycle and learns from the outcome.

    Args:
        costs: measured on this device; None with `fixed`.
        max_drafts: upper limit of the chain.
        prior: expected acceptance of draft i given those before it.
        fixed: always this many drafts, whatever they cost.
        width: always this many candidates a position, the draft included; None to choose.
        max_width: upper limit of what is chosen.
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
    ) -> None:
        assert costs is not None or (fixed is not None and width is not None)
        self.costs, self.fixed, self.max_drafts = costs, fixed, max_drafts
        self.widths = range(1, max_width + 1) if width is None else (width,)
        prior = tuple(prior) or (DEFAULT_PRIOR,)
        self.prior = [prior[min(i, len(prior) - 1)] for i in range(max_drafts)]
        self.reached = [0.0] * max_drafts
        self.passed = [0.0] * max_drafts
        self.missed = [0.0] * (max(self.widths) - 1)
        self.caught = [0.0] * (max(self.widths) - 1)
        self._best: tuple[int, int, float] | None = None  # until the next update

    @property
    def max_entries(self) -> int:
        """Most drafted tokens that a cycle verifies, runners-up included."""
        if self.fixed is not None:
            return self.fixed * max(self.widths)
        return max(self.max_drafts, MAX_ENTRIES)

    def acceptance(self) -> list[float]:
        """Estimated probability that draft i is accepted, given that those before it were."""
        return [
            (passed + PRIOR_WEIGHT * prior) / (reached + PRIOR_WEIGHT)
            for passed, reached, prior in zip(self.passed, self.reached, self.prior, strict=True)
        ]

    def rescue(self, width: int) -> float:
        """Estimated probability that a runner-up is right where the draft is not."""
        ranks = zip(self.caught, self.missed, range(width - 1), strict=False)
        return sum(
            (caught + PRIOR_WEIGHT * SIBLING_PRIOR[min(i, len(SIBLING_PRIOR) - 1)])
            / (missed + PRIOR_WEIGHT)
            for caught, missed, i in ranks
        )

    def best(self) -> tuple[int, int, float]:
        """The number of drafts and the width with the most expected tokens a second, and that rate."""
        if self._best is None:
            self._best = self._find_best()
        return self._best

    def _find_best(self) -> tuple[int, int, float]:
        assert self.costs is not None
        best, best_rate = (0, 1), 1.0 / self.costs.cycle(0)
        for width in self.widths:
            rescue = self.rescue(width)
            tokens, chance = 1.0, 1.0
            for k, acceptance in enumerate(self.acceptance(), 1):
                if k * width >= len(self.costs.verify):
                    break
                tokens += chance * (acceptance + (1 - acceptance) * rescue)
                chance *= acceptance
                rate = tokens / self.costs.cycle(k, width)
                if rate > best_rate:
                    best, best_rate = (k, width), rate
        return (*best, best_rate)

    def choose(self) -> tuple[int, int]:
        """The most tokens to draft now and the candidates a position; 0 drafts = plain decoding."""
        if self.fixed is not None:
            return self.fixed, self.widths[0]
        k, width, _ = self.best()
        if k == 0:
            return 0, 1
        return min(self.max_drafts, max(k, self.max_entries // width)), width

    def go_on(self, drafted: int, chance: float | None) -> bool:
        """Whether one more draft pays: its expected tokens against what its time yields otherwise.

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
        _, width, rate = self.best()
        tokens = acceptance[drafted] + (1 - acceptance[drafted]) * self.rescue(width)
        return chance * tokens > rate * self.costs.one_more(width)

    def update(self, outcomes: Sequence[Outcome], width: int = 1) -> None:
        """Learn from one cycle's rows, of trees of this width."""
        self._best = None
        for seen in (self.reached, self.passed, self.missed, self.caught):
            seen[:] = [FADE * x for x in seen]
        for outcome in outcomes:
            chain = outcome.accepted - (outcome.rank >= 0)
            for i in range(min(outcome.drafted, chain + 1)):
                self.reached[i] += 1
                self.passed[i] += i < chain
            if chain < outcome.drafted:
                for rank in range(width - 1):
                    self.missed[rank] += 1
                    self.caught[rank] += rank == outcome.rank


def synchronizer(device: torch.device) -> Callable[[], None]:
    """A call that waits for the device, so that a wall clock means something."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    if device.type == "mps":
        return torch.mps.synchronize
    return lambda: None
