"""What a benchmark says of a sample of prompts: where the middle is, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LOW, HIGH = 10, 90  # percentiles
CONFIDENCE = 0.95
RESAMPLES = 2000
SEED = 1  # not 0, which llama.cpp takes for none


@dataclass(frozen=True)
class Spread:
    """Over prompts: the median, and the 10th and 90th percentile (interpolated)."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        low, median, high = np.percentile(values, [LOW, 50, HIGH]).tolist()
        return cls(median=median, low=low, high=high)


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95% percentile bootstrap interval of the median (Efron 1979), the same at every call.

    Args:
        values: independent ones, one a prompt.

    Returns:
        Low and high; None for fewer than two values, which tell nothing about their spread.
    """
    if len(values) < 2:
        return None
    sample = np.asarray(values)
    drawn = np.random.default_rng(SEED).integers(len(sample), size=(RESAMPLES, len(sample)))
    medians = np.median(sample[drawn], axis=1)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(medians, [tail, 100 - tail]).tolist()
    return low, high
