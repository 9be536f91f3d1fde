"""What steps cost on this device: measured seconds of draft and verify steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean, median

import torch


@dataclass(frozen=True)
class StepCosts:
    """Measured seconds of one step for a given number of rows.

    Attributes:
        verify: seconds of a pass over n positions a row, for n = 1, 2, ...
        draft: seconds of a draft step that continues m nodes a row, for m = 1, 2, ...
        start: seconds that the first draft step of a cycle takes longer than a later one: the pass
            before it has driven the drafter's weights out of the caches.
    """

    verify: tuple[float, ...]
    draft: tuple[float, ...]
    start: float = 0.0

    def extra(self, steps: Sequence[int], entries: int) -> float:
        """Seconds that draft steps and verifying so many drafts add to a plain step."""
        drafting = sum(self.draft[min(m, len(self.draft)) - 1] for m in steps)
        drafting += self.start if steps else 0.0
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
    budget: float = inf,
) -> StepCosts:
    """Time verify passes of 1 .. max_drafts + 1 positions and draft steps; medians.

    A draft step is timed behind a verify pass, and once more behind another draft step. Every second
    size is measured; those between are interpolated. Rounds are interleaved so that a slow moment of
    the machine hits all sizes alike.

    Args:
        verify: runs a pass over so many positions.
        draft: runs one draft step, and if its argument m is not 0 a second one that continues m nodes.
        max_drafts: most drafts that are verified.
        max_beam: most nodes that a draft step continues.
        synchronize: waits for the device.
        repeats: measured rounds.
        budget: seconds after which no further round starts; one is measured in any case.
    """
    sizes = sorted({1, *range(2, max_drafts + 2, 2), max_drafts + 1})
    beams = sorted({0, 1, *range(2, max_beam + 1, 2)})
    jobs: list[Callable[[], None]] = [lambda n=n: verify(n) for n in sizes]  # type: ignore[misc]
    jobs += [lambda m=m: draft(m) for m in beams]  # type: ignore[misc]
    seconds: list[list[float]] = [[] for _ in jobs]
    began = time.perf_counter()
    for round_ in range(repeats + 1):
        for place, (job, times) in enumerate(zip(jobs, seconds, strict=True)):
            if place > len(sizes):  # a cycle's drafts come behind a pass
                verify(1)
            synchronize()
            start = time.perf_counter()
            job()
            synchronize()
            if round_ > 0:  # the first round warms up
                times.append(time.perf_counter() - start)
        if round_ > 0 and time.perf_counter() - began > budget:
            break
    medians = [median(times) for times in seconds]
    passes, drafts = medians[: len(sizes)], medians[len(sizes) :]
    first, *both = drafts
    # A difference of two measurements that is next to nothing is noise.
    later = {m: max(x - first, first / 4) for m, x in zip(beams[1:], both, strict=True)}
    return StepCosts(
        _between(dict(zip(sizes, passes, strict=True)), max_drafts + 1),
        _between(later, max_beam),
        max(0.0, first - later[1]),
    )


def _between(known: dict[int, float], last: int) -> tuple[float, ...]:
    """Values at 1 .. last from those at some places, never falling."""
    known = dict(zip(known, _rising(list(known.values())), strict=True))
    values = []
    for n in range(1, last + 1):
        below = max(s for s in known if s <= n)
        above = min((s for s in known if s >= n), default=below)
        share = (n - below) / (above - below) if above > below else 0.0
        values.append(known[below] * (1 - share) + known[above] * share)
    return tuple(values)


def _rising(values: list[float]) -> list[float]:
    """The nearest values that never fall (isotonic regression by pooling adjacent violators).

    More rows cannot be cheaper. Where they were measured so, that was noise, and neither of the two is
    to be believed more.
    """
    pools: list[list[float]] = []
    for value in values:
        pools.append([value])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    return [fmean(pool) for pool in pools for _ in pool]


def synchronizer(device: torch.device) -> Callable[[], None]:
    """A call that waits for the device, so that a wall clock means something."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    if device.type == "mps":
        return torch.mps.synchronize
    return lambda: None
