"""What became of drafts: which were right, how sure their drafter was, what their cycles took.

All of it fades, so that estimates follow the text and the machine.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

FADE = 0.98  # of what was seen, a cycle
PRIOR_WEIGHT = 8.0  # cycles or drafts that a first guess counts as

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
        """From the parents of the drafts (as in `Draft`), the entries that stay and a depth limit."""
        depths = [0]
        for parent in parents:
            depths.append(depths[parent + 1] + 1)
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


class Gain:
    """What a model's drafts add to a plain step, on average; a mean that starts from a first guess.

    Args:
        seconds: by the step costs, a first guess.
        tokens: a first guess.
    """

    def __init__(self, seconds: float, tokens: float) -> None:
        self.weight = PRIOR_WEIGHT
        self._seconds, self._tokens = PRIOR_WEIGHT * seconds, PRIOR_WEIGHT * tokens

    @property
    def seconds(self) -> float:
        return self._seconds / self.weight

    @property
    def tokens(self) -> float:
        return self._tokens / self.weight

    def learn(self, seconds: float, tokens: float) -> None:
        """Of one cycle."""
        self.weight = FADE * self.weight + 1
        self._seconds = FADE * self._seconds + seconds
        self._tokens = FADE * self._tokens + tokens

    def doubt(self, weight: float) -> None:
        """Let what is known count as so many cycles at most."""
        share = min(1.0, weight / self.weight)
        self.weight *= share
        self._seconds *= share
        self._tokens *= share


PLAIN_KEPT = 5  # plain cycles whose median is believed
PLAIN_EVERY = 48  # drafted cycles until a plain one is timed again, once several are known
FIRST_GUESS = 1.2  # plain steps of drafting that the step costs' own claim counts as
DEARNESS = (0.25, 4.0)  # bounds


class Pace:
    """How long cycles really take, for one number of rows.

    Measured step costs know neither the loop around the steps nor what else the machine does now. So
    cycles are timed, in units of plain cycles of the same time and place; only their ratio counts.

    Args:
        dearness: a first guess.
    """

    def __init__(self, dearness: float = 1.0) -> None:
        self.plain: deque[float] = deque(maxlen=PLAIN_KEPT)
        self.dearness = dearness  # seconds that drafts really add, for one second by the step costs
        self._expected = FIRST_GUESS
        self._taken = self._expected * dearness
        self._since = 0  # drafted cycles since a plain one

    @property
    def wants_plain(self) -> bool:
        """Whether a plain cycle should be timed: at first soon, later seldom."""
        known = len(self.plain)
        return known == 0 or self._since >= (PLAIN_EVERY if known == PLAIN_KEPT else 4 << known)

    def learn(self, seconds: float, extra: float) -> None:
        """Of one cycle.

        Args:
            seconds: that it took.
            extra: what drafts add by the step costs, in plain steps; 0 in a plain cycle.
        """
        if extra == 0:
            self.plain.append(seconds)
            self._since = 0
            return
        self._since += 1
        if not self.plain:
            return
        # A cycle that something else held up must not count for more than it may have cost.
        whole = 1 + self.dearness * extra
        taken = min(max(seconds / median(self.plain), whole / 1.5), 1.5 * whole) - 1
        self._expected = FADE * self._expected + extra
        self._taken = FADE * self._taken + taken
        low, high = DEARNESS
        self.dearness = min(max(self._taken / self._expected, low), high)
