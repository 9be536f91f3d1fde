"""Samples to numbers.

- tokens/s: new tokens of a batch over the wall clock of the whole call, prefill included; median over
  batches, and from the 10th to the 90th percentile
- speedup: median over batches of the ratio of tokens/s to plain decoding's on the same prompts, and
  the 95% bootstrap confidence interval of that median, for 3 batches or more
- acceptance: from the counts of all prompts together, in vLLM's terms
- identical, near-ties, differences: prompts, by comparison of the new tokens with plain decoding's
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from multirate.bench.registry import Output
from multirate.bench.statistics import Spread, median_interval
from multirate.decode.compare import Comparison
from multirate.decode.loop import SpeculationCounts
from multirate.decode.results import Speculation

FEWEST = 3  # timed calls that an interval is told of


@dataclass(frozen=True)
class Sample:
    """One timed run of a method on a batch: an output a prompt."""

    outputs: list[Output]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(len(output.token_ids) for output in self.outputs) / self.seconds


@dataclass(frozen=True)
class MethodSummary:
    """One method's numbers; None where there is nothing to tell.

    Attributes:
        tokens_per_second: of batches.
        speedup_vs_plain: None if `plain` was not measured.
        speedup_vs_plain_ci: low and high; None for fewer than `FEWEST` batches too.
        speedup_vs_transformers: the same way; not part of the JSON.
        speculation: of all prompts together; None for a method without drafts.
        identical: prompts whose new tokens are plain decoding's; None if `plain` was not measured, the
            tokens were drawn at random, or the method runs weights of its own.
        near_ties: prompts whose first different token was about as likely as plain decoding's.
        differences: all others.
        few: whether there are fewer than `FEWEST` batches, whose spread means nothing; not part of the
            JSON.
    """

    tokens_per_second: Spread
    speedup_vs_plain: float | None
    speedup_vs_plain_ci: tuple[float, float] | None
    speedup_vs_transformers: float | None
    speculation: Speculation | None
    identical: int | None
    near_ties: int | None
    differences: int | None
    few: bool

    def to_dict(self) -> dict[str, Any]:
        speculation = self.speculation
        return {
            "tokens_per_second": asdict(self.tokens_per_second),
            "speedup_vs_plain": self.speedup_vs_plain,
            "speedup_vs_plain_ci": self.speedup_vs_plain_ci and list(self.speedup_vs_plain_ci),
            "mean_acceptance_length": getattr(speculation, "mean_acceptance_length", None),
            "per_position_acceptance_rate": getattr(
                speculation, "per_position_acceptance_rate", None
            ),
            "identical": self.identical,
            "near_ties": self.near_ties,
            "differences": self.differences,
        }


@dataclass(frozen=True)
class CategorySummary:
    """One kind of prompts: how many, and each method's numbers on them."""

    prompts: int
    methods: dict[str, MethodSummary]

    def to_dict(self) -> dict[str, Any]:
        """Of the numbers, those that few prompts can bear."""
        keys = ("speedup_vs_plain", "speedup_vs_plain_ci", "mean_acceptance_length")
        methods = {name: summary.to_dict() for name, summary in self.methods.items()}
        return {
            "prompts": self.prompts,
            "methods": {name: {key: own[key] for key in keys} for name, own in methods.items()},
        }


def summarise(
    samples: Mapping[str, Sequence[Sample]], comparisons: Mapping[str, Sequence[Comparison]]
) -> dict[str, MethodSummary]:
    """Samples to numbers; see the module's text for what they mean."""
    summaries = {}
    for name, own in samples.items():
        found = comparisons.get(name)
        vs_plain = _ratios(own, samples.get("plain"))
        vs_transformers = _ratios(own, samples.get("transformers"))
        outputs = [output for sample in own for output in sample.outputs]
        speculations = [o.speculation for o in outputs if o.speculation is not None]
        summaries[name] = MethodSummary(
            tokens_per_second=Spread.of([sample.tokens_per_second for sample in own]),
            speedup_vs_plain=_median(vs_plain),
            speedup_vs_plain_ci=None if len(own) < FEWEST else median_interval(vs_plain),
            speedup_vs_transformers=_median(vs_transformers),
            speculation=Speculation.of([_counts(s) for s in speculations])
            if speculations
            else None,
            identical=_count(found, lambda c: c.identical),
            near_ties=_count(found, lambda c: bool(c.near_tie)),
            differences=_count(found, lambda c: not c.identical and not c.near_tie),
            few=len(own) < FEWEST,
        )
    return summaries


def summarise_categories(
    samples: Mapping[str, Sequence[Sample]], categories: Sequence[str]
) -> dict[str, CategorySummary]:
    """The same numbers for each kind of prompts on its own.

    Args:
        samples: a sample a batch for every method.
        categories: of each batch.
    """
    summaries = {}
    for category in dict.fromkeys(categories):
        own = {
            name: [
                sample for sample, kind in zip(all_, categories, strict=True) if kind == category
            ]
            for name, all_ in samples.items()
        }
        prompts = sum(len(sample.outputs) for sample in next(iter(own.values())))
        summaries[category] = CategorySummary(prompts, summarise(own, {}))
    return summaries


def _count(
    comparisons: Sequence[Comparison] | None, test: Callable[[Comparison], bool]
) -> int | None:
    return None if comparisons is None else sum(map(test, comparisons))


def _ratios(own: Sequence[Sample], other: Sequence[Sample] | None) -> list[float]:
    """A ratio of tokens/s a prompt; none without the other method."""
    pairs = [] if other is None else zip(own, other, strict=True)
    return [a.tokens_per_second / b.tokens_per_second for a, b in pairs]


def _median(ratios: Sequence[float]) -> float | None:
    return float(np.median(ratios)) if ratios else None


def _counts(speculation: Speculation) -> SpeculationCounts:
    """The counts behind one prompt's rates: whole numbers over drafts, so rounding gives them back."""
    return SpeculationCounts(
        num_drafts=speculation.num_drafts,
        num_draft_tokens=speculation.num_draft_tokens,
        num_accepted_tokens=speculation.num_accepted_tokens,
        accepted_per_position=[
            round(rate * speculation.num_drafts)
            for rate in speculation.per_position_acceptance_rate
        ],
        num_plain_steps=speculation.num_plain_steps,
    )
