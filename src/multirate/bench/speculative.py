"""`multirate bench speculative`: how fast methods decode the same prompts, and whether they agree.

For every prompt each method runs once, in an order that rotates from prompt to prompt, so that a slow
minute of the machine hits all alike. Nothing else runs in between; outputs are compared afterwards.

- tokens/s: new tokens over the wall clock of the whole call, prefill included; median over prompts,
  and from the 10th to the 90th percentile
- speedup: median over prompts of the ratio of tokens/s to plain decoding's on the same prompt, and
  the 95% bootstrap confidence interval of that median
- acceptance: from the counts of all prompts together, in vLLM's terms
- identical, near-ties, differences: prompts, by comparison of the new tokens with plain decoding's
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from multirate.bench.methods import METHODS
from multirate.bench.options import SpeculativeOptions
from multirate.bench.outside import llama_cpp
from multirate.bench.prompts import PromptSet
from multirate.bench.provenance import provenance, without_folders
from multirate.bench.registry import Method, Output
from multirate.bench.statistics import (
    CONFIDENCE,
    HIGH,
    LOW,
    RESAMPLES,
    SEED,
    Spread,
    median_interval,
)
from multirate.decode.compare import Comparison, compare_outputs, near_tie_tolerance
from multirate.decode.costs import synchronizer
from multirate.decode.engine import Engine
from multirate.decode.loop import SpeculationCounts
from multirate.decode.results import Speculation

WARM_UP_TOKENS = 8

# Called with the number of timed runs that are done, and of all: first with 0, after the warm-up.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Sample:
    """One timed run of a method on a prompt."""

    output: Output
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return len(self.output.token_ids) / self.seconds


@dataclass(frozen=True)
class MethodSummary:
    """One method's numbers; None where there is nothing to tell.

    Attributes:
        tokens_per_second: of single prompts.
        speedup_vs_plain: None if `plain` was not measured.
        speedup_vs_plain_ci: low and high; None for a single prompt too.
        speedup_vs_transformers: the same way; not part of the JSON.
        speculation: of all prompts together; None for a method without drafts.
        identical: prompts whose new tokens are plain decoding's; None if `plain` was not measured, the
            tokens were drawn at random, or the method runs weights of its own.
        near_ties: prompts whose first different token was about as likely as plain decoding's.
        differences: all others.
    """

    tokens_per_second: Spread
    speedup_vs_plain: float | None
    speedup_vs_plain_ci: tuple[float, float] | None
    speedup_vs_transformers: float | None
    speculation: Speculation | None
    identical: int | None
    near_ties: int | None
    differences: int | None

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


@dataclass(frozen=True)
class SpeculativeReport:
    """The whole measurement.

    Attributes:
        provenance: machine, software, code, command, and how the numbers are defined.
        prompts: how many.
        new_tokens: most new tokens a prompt, as asked for.
        methods: by name, in the order asked for.
        categories: by name, in the prompts' order; None if they were not asked for.
    """

    provenance: dict[str, Any]
    prompts: int
    new_tokens: int
    methods: dict[str, MethodSummary]
    categories: dict[str, CategorySummary] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The object that `--json` prints. Its keys stay; others may join them."""
        data: dict[str, Any] = {
            "provenance": self.provenance,
            "prompts": self.prompts,
            "new_tokens": self.new_tokens,
            "methods": {name: summary.to_dict() for name, summary in self.methods.items()},
        }
        if self.categories is not None:
            data["categories"] = {name: own.to_dict() for name, own in self.categories.items()}
        return data


def bench_speculative(
    engine: Engine,
    prompts: PromptSet,
    options: SpeculativeOptions,
    *,
    accelerator: str | None = None,
    progress: Progress = lambda done, total: None,
) -> SpeculativeReport:
    """Measure.

    Args:
        engine: with an accelerator where a method needs one.
        prompts: all of them are decoded.
        options: methods and lengths.
        accelerator: what the engine's accelerator is called, for the provenance.
        progress: called between timed runs.

    Raises:
        MultirateError: a method needs an accelerator and there is none, or a prompt that the model
            cannot take, or categories that were asked for and are not there.
    """
    options.require_accelerator(engine.accelerator is not None)
    if options.by_category:
        prompts.require_categories()
    ids = prompts.encode(engine)
    methods = {name: METHODS[name].make(engine, options) for name in options.methods}
    tolerances = {name: _tolerance(engine, method) for name, method in methods.items()}
    for method in methods.values():
        method.prepare(ids)
        method.run(ids[0], min(WARM_UP_TOKENS, options.max_new_tokens))
    samples = run_interleaved(
        methods,
        ids,
        max_new_tokens=options.max_new_tokens,
        synchronize=synchronizer(engine.base.device),
        progress=progress,
    )
    comparisons = {} if options.temperature else compare(engine, ids, samples, tolerances)
    return SpeculativeReport(
        provenance=_provenance(engine, prompts, options, accelerator) | _own_dtypes(methods),
        prompts=len(ids),
        new_tokens=options.max_new_tokens,
        methods=summarise(samples, comparisons),
        categories=summarise_categories(samples, prompts) if options.by_category else None,
    )


def run_interleaved(
    methods: Mapping[str, Method],
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    synchronize: Callable[[], None] = lambda: None,
    progress: Progress = lambda done, total: None,
) -> dict[str, list[Sample]]:
    """Run every method once on every prompt; prompt i starts with method i modulo their number.

    Returns:
        A sample a prompt for every method.
    """
    names = list(methods)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    done, total = 0, len(names) * len(prompts)
    progress(done, total)
    for i, ids in enumerate(prompts):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            synchronize()
            start = time.perf_counter()
            output = methods[name].run(ids, max_new_tokens)
            synchronize()
            samples[name].append(Sample(output, time.perf_counter() - start))
            done += 1
            progress(done, total)
    return samples


def compare(
    engine: Engine,
    prompts: Sequence[list[int]],
    samples: Mapping[str, Sequence[Sample]],
    tolerances: Mapping[str, float],
) -> dict[str, list[Comparison]]:
    """Outputs against plain decoding's, of every method that runs the same weights.

    `tolerances` says for each method how large a gap in log-probability its rounding explains.
    Empty if plain decoding was not measured.
    """
    if "plain" not in samples:
        return {}
    plain = [sample.output.token_ids for sample in samples["plain"]]
    return {
        name: [
            compare_outputs(
                engine.base, ids, expected, sample.output.token_ids, tolerance=tolerances[name]
            )
            for ids, expected, sample in zip(prompts, plain, own, strict=True)
        ]
        for name, own in samples.items()
        if not METHODS[name].reads_gguf
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
        speculations = [s.output.speculation for s in own if s.output.speculation is not None]
        summaries[name] = MethodSummary(
            tokens_per_second=Spread.of([sample.tokens_per_second for sample in own]),
            speedup_vs_plain=_median(vs_plain),
            speedup_vs_plain_ci=median_interval(vs_plain),
            speedup_vs_transformers=_median(vs_transformers),
            speculation=Speculation.of([_counts(s) for s in speculations])
            if speculations
            else None,
            identical=_count(found, lambda c: c.identical),
            near_ties=_count(found, lambda c: bool(c.near_tie)),
            differences=_count(found, lambda c: not c.identical and not c.near_tie),
        )
    return summaries


def summarise_categories(
    samples: Mapping[str, Sequence[Sample]], prompts: PromptSet
) -> dict[str, CategorySummary]:
    """The same numbers for each kind of prompts on its own; "none" holds the rows without one."""
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(prompts.rows):
        groups.setdefault(row.category or "none", []).append(i)
    return {
        category: CategorySummary(
            len(group),
            summarise({name: [own[i] for i in group] for name, own in samples.items()}, {}),
        )
        for category, group in groups.items()
    }


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


def _provenance(
    engine: Engine, prompts: PromptSet, options: SpeculativeOptions, accelerator: str | None
) -> dict[str, Any]:
    base = engine.base
    return {
        **provenance(device=base.device, dtype=base.dtype),
        "dtype": base.dtype_name,
        "model": without_folders(str(base.config.name_or_path)),
        "accelerator": accelerator and without_folders(accelerator),
        "prompt_set": {"name": prompts.name, "sha256": prompts.sha256, "first": len(prompts.rows)},
        "decoding": f"{_choice(options)}, one prompt at a time",
        "temperature": options.temperature,
        **({} if options.gguf is None else _llama_cpp(options.gguf)),
        "num_draft_tokens": options.num_draft_tokens or "from measured step costs",
        "timing": "wall clock of the whole call, prefill included; methods interleaved per prompt",
        "spread": f"low and high are the {LOW}th and {HIGH}th percentile over prompts",
        "speedup_definition": "median over prompts of the ratio of tokens/s on the same prompt; "
        f"ci: {CONFIDENCE:.0%} bootstrap interval of that median, {RESAMPLES} resamples",
        "near_tie_tolerance": near_tie_tolerance(base.dtype),
    }


def _tolerance(engine: Engine, method: Method) -> float:
    """Of the coarser of the two types: the method's and the engine's."""
    types = [engine.base.dtype, *([] if method.dtype is None else [method.dtype])]
    return max(map(near_tie_tolerance, types))


def _own_dtypes(methods: Mapping[str, Method]) -> dict[str, Any]:
    """Methods that run in another type than the engine, and what a near-tie is to them."""
    own = {
        name: {
            "dtype": str(method.dtype).removeprefix("torch."),
            "near_tie_tolerance": near_tie_tolerance(method.dtype),
        }
        for name, method in methods.items()
        if method.dtype is not None
    }
    return {"own_dtypes": own} if own else {}


def _choice(options: SpeculativeOptions) -> str:
    if not options.temperature:
        return "greedy"
    return f"temperature {options.temperature:g}, seed {SEED}"


def _llama_cpp(gguf: Path) -> dict[str, Any]:
    return {"gguf": gguf.name, "llama_cpp_python": llama_cpp().__version__}
