"""How much is drafted and verified: what that costs against the acceptance seen so far.

A cycle of draft steps and a verify pass of 1 + n rows yields 1 token and those of its drafts that stay.
What is drafted and verified follows one rule: time has a price, the tokens a second that decoding makes
anyway, and a draft step or a verified row must yield more tokens than its time is worth. So nothing is
drafted where that does not pay. Chances come from the drafter's own confidence, corrected by what was
seen of it; costs are measured on this device, and corrected by how long cycles really take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from multirate.decode.costs import StepCosts
from multirate.decode.drafter import MAX_BEAM, MODEL, Draft
from multirate.decode.outcomes import FADE, PRIOR_WEIGHT, Confidence, Gain, Outcome, Pace

DEFAULT_PRIOR = 0.4
MAX_WIDTH = 4  # most children of a node that are looked at; more can be asked for
MAX_ENTRIES = 16  # most drafts that are verified

# The chance that the second draw of a position, the third, ..., is right where those before are not.
RUNNER_UP_PRIOR = (0.2, 0.1, 0.07)

# Of a plain step's token, what one that a row of a batch gains is worth: rows that accept more end
# earlier, but the batch ends with its last row.
BATCH_WORTH = 0.8

# Drafting that was stopped is tried again for a cycle, after twice as many cycles each time. A long rest
# saves little, and misses text that is easier to draft.
FIRST_REST, LAST_REST = 16, 64  # cycles
TRIAL_SHARE = 0.02  # most of the time that trials may cost
TRIAL_WEIGHT = 4.0  # cycles that what was seen before a trial counts as


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
        clock: seconds; cycles are timed by it, and the costs corrected. None where decisions may
            depend on the text only, as what is drawn with a seed must.
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
        clock: Callable[[], float] | None = None,
    ) -> None:
        assert costs is not None or (fixed is not None and width is not None)
        self.costs, self.fixed, self.max_drafts = costs, fixed, max_drafts
        self.clock = clock if fixed is None else None
        prior = tuple(prior) or (DEFAULT_PRIOR,)
        self.prior = [prior[min(i, len(prior) - 1)] for i in range(max_drafts)]
        if width is None and drawn:
            width = self._drawn_width(max_width)
        self.grows, self.width = width is None, width or max_width
        self.reached = [0.0] * max_drafts
        self.passed = [0.0] * max_drafts
        self.confidence: dict[int, Confidence] = {}
        self._pace = Pace()
        self._paces: dict[int, Pace] = {}  # by the number of rows, in powers of two
        self._gain = Gain(*((0.0, 0.0) if costs is None else self._expected()))
        self._started = 0.0
        self.idle = False  # nothing is drafted in this cycle, to time a plain one
        self._next_rest, self._rest, self._trial = FIRST_REST, 0, False
        self._trusted = 0  # cycles in which a model drafted since drafting was last stopped
        self._acceptance: list[float] | None = None  # of this cycle, once asked for
        self._price: float | None = None
        self._token_worth = 1.0

    @property
    def max_slots(self) -> int:
        """Most arena slots beyond the verified ones that a cycle writes."""
        if self.fixed is not None:
            return self.fixed * self.width
        return max(MAX_ENTRIES, self.max_drafts * max(MAX_BEAM, 1 if self.grows else self.width))

    # ---------------------------------------------------------------- estimates

    def acceptance(self) -> list[float]:
        """Estimated probability that draft i is accepted, given that those before it were."""
        if self._acceptance is None:
            self._acceptance = [
                (passed + PRIOR_WEIGHT * prior) / (reached + PRIOR_WEIGHT)
                for passed, reached, prior in zip(
                    self.passed, self.reached, self.prior, strict=True
                )
            ]
        return self._acceptance

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
        return self._gain.seconds * self._pace.dearness, self._gain.tokens

    def price(self) -> float:
        """Tokens that a second by the step costs must yield: what decoding makes in it anyway."""
        if self._price is None:
            assert self.costs is not None
            seconds, tokens = self.gain()
            plain = self.costs.verify[0]
            rate = max(1.0 / plain, (1 + tokens) / (plain + seconds))
            self._price = rate * self._pace.dearness / self._token_worth
        return self._price

    def _worth(self, chance: float = 1.0) -> bool:
        assert self.costs is not None
        seconds, tokens = self.gain()
        return chance * tokens * self._token_worth > seconds / self.costs.verify[0]

    # ---------------------------------------------------------------- decisions

    def begin(self, rows: int) -> None:
        """A cycle of so many rows starts."""
        if self.fixed is not None:
            return
        self._price = None
        self._token_worth = 1.0 if rows == 1 else BATCH_WORTH
        if self.clock is not None:
            power = rows.bit_length()
            if power not in self._paces:
                self._paces[power] = Pace(self._pace.dearness)
            self._pace = self._paces[power]
            self._started = self.clock()
        if self._rest > 0:
            self._rest -= 1
            if self._rest == 0:
                self._trial = True
                self._gain.doubt(TRIAL_WEIGHT)
        elif not self._trial and not self._worth():
            self._stop()
        # Cycles are plain anyway while drafting rests.
        may_draft = self._rest == 0 and not self._trial
        self.idle = self.clock is not None and may_draft and self._pace.wants_plain

    def pays(self, chance: float = 1.0) -> bool:
        """Whether a model's drafts pay where nothing else guesses right with this chance."""
        if self.fixed is not None:
            return True
        if self.idle or self._rest > 0:
            return False
        return self._trial or self._worth(chance)

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
        cost += self.costs.start if drafted == 0 else 0.0
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
        for n in range(1, min(max(map(len, ranked)), len(costs) - 1) + 1):
            total += sum(row[n - 1] for row in ranked if n <= len(row)) / len(ranked)
            gain = total - price * (costs[n] - costs[0])
            if gain > most:
                best, most = n, gain
        if best == 0:
            return Draft(draft.tokens[:, :0], steps=draft.steps)
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
        """Learn from one cycle, which is over now.

        Args:
            outcomes: one a row.
            draft: what was verified; None: a chain of each row's length.
            paths: block entries that stay, one list a row.
        """
        self._acceptance = self._price = None
        depth = max(outcome.drafted for outcome in outcomes)
        steps = (1,) * depth if draft is None or draft.steps is None else draft.steps
        entries = depth if draft is None else draft.tokens.shape[1]
        if depth > 0:
            self._learn_acceptance(outcomes)
        accepted = [float(outcome.accepted) for outcome in outcomes]
        if draft is not None and draft.chances is not None and entries > 0:
            accepted = self._learn_confidence(draft, paths)
        if self.costs is None:
            return
        seconds = self.costs.extra(steps, entries)
        if steps:
            own = self.costs.extra(steps, self._drafted_by_model(draft, entries))
            self._gain.learn(own, sum(accepted) / len(accepted))
            self._trial = False
            self._trusted += 1
            if self._trusted == FIRST_REST:
                self._next_rest = FIRST_REST
        # What lookups alone add is next to nothing by the step costs, so what they really add is no
        # measure of how dear a drafter's steps are.
        if self.clock is not None and (steps or entries == 0):
            extra = seconds / self.costs.verify[0]
            self._pace.learn(self.clock() - self._started, extra)

    @staticmethod
    def _drafted_by_model(draft: Draft | None, entries: int) -> int:
        """Of the entries of a cycle: lookups are verified whether a model drafts beside them or not."""
        if draft is None or draft.kinds is None:
            return entries
        return max(sum(kind == MODEL for kind in kinds[:entries]) for kinds in draft.kinds)

    def _stop(self) -> None:
        """Let drafting rest, longer each time unless it went on for long in between."""
        assert self.costs is not None
        share = self.gain()[0] / self.costs.verify[0]  # what a trial that yields nothing costs
        self._rest = max(self._next_rest, int(share / TRIAL_SHARE))
        self._next_rest = min(2 * self._next_rest, LAST_REST)
        self._trusted = 0

    def _learn_acceptance(self, outcomes: Sequence[Outcome]) -> None:
        self.reached = [FADE * x for x in self.reached]
        self.passed = [FADE * x for x in self.passed]
        for outcome in outcomes:
            for i in range(min(outcome.drafted, outcome.accepted + 1)):
                self.reached[i] += 1
                self.passed[i] += i < outcome.accepted

    def _learn_confidence(self, draft: Draft, paths: Sequence[Sequence[int]]) -> list[float]:
        """Also gives how many of each row's accepted tokens a model drafted."""
        assert draft.chances is not None
        for confidence in self.confidence.values():
            confidence.fade()
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
