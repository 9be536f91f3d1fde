"""`multirate bench speculative`: how fast methods decode the same prompts, and whether they agree.

For every batch of prompts (of one, unless asked for) each method runs once, in an order that rotates
from batch to batch, so that a slow minute of the machine hits all alike. Nothing else runs in between;
outputs are compared afterwards.
What is made of the samples is in `summary`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from multirate.bench.cost_card import CostCard, measure_cost_card
from multirate.bench.llama_cpp import llama_cpp
from multirate.bench.methods import bind
from multirate.bench.options import SpeculativeOptions
from multirate.bench.prompts import PromptSet
from multirate.bench.provenance import provenance, without_folders
from multirate.bench.registry import Batch, Method
from multirate.bench.statistics import CONFIDENCE, HIGH, LOW, RESAMPLES, SEED
from multirate.bench.summary import (
    CategorySummary,
    MethodSummary,
    Sample,
    summarise,
    summarise_categories,
)
from multirate.config.errors import MultirateError
from multirate.decode.compare import Comparison, compare_outputs, near_tie_tolerance
from multirate.decode.costs import synchronizer
from multirate.decode.engine import Engine

WARM_UP_TOKENS = 8

# Called with the number of timed runs that are done, and of all: first with 0, after the warm-up.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class SpeculativeReport:
    """The whole measurement.

    Attributes:
        provenance: machine, software, code, command, and how the numbers are defined.
        prompts: how many.
        new_tokens: most new tokens a prompt, as asked for.
        methods: by name, in the order asked for.
        cost_card: of a plain step at the prompts' median length.
        categories: by name, in the prompts' order; None if they were not asked for.
    """

    provenance: dict[str, Any]
    prompts: int
    new_tokens: int
    methods: dict[str, MethodSummary]
    cost_card: CostCard
    categories: dict[str, CategorySummary] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The object that `--json` prints. Its keys stay; others may join them."""
        data: dict[str, Any] = {
            "provenance": self.provenance,
            "prompts": self.prompts,
            "new_tokens": self.new_tokens,
            "methods": {name: summary.to_dict() for name, summary in self.methods.items()},
            "cost_card": self.cost_card.to_dict(),
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
    prompts = prompts.with_turns(engine, options.turns, new=options.max_new_tokens)
    batches, categories = group(prompts, _encode(engine, prompts, options), options)
    methods = bind(engine, options)
    try:
        for method in methods.values():
            method.prepare(batches)
            method.run(batches[0], min(WARM_UP_TOKENS, options.max_new_tokens))
        samples = run_interleaved(
            methods,
            batches,
            max_new_tokens=options.max_new_tokens,
            synchronize=synchronizer(engine.base.device),
            progress=progress,
        )
    finally:
        for method in methods.values():
            method.close()
    comparisons = {} if options.temperature else compare(engine, batches, samples, methods)
    return SpeculativeReport(
        provenance=_provenance(engine, prompts, options, accelerator, methods),
        prompts=len(prompts.rows),
        new_tokens=options.max_new_tokens,
        methods=summarise(samples, comparisons),
        cost_card=measure_cost_card(
            engine,
            rows=options.batch,
            context=int(median(len(ids) for batch in batches for ids in batch)),
        ),
        categories=summarise_categories(samples, categories) if options.by_category else None,
    )


def _encode(engine: Engine, prompts: PromptSet, options: SpeculativeOptions) -> list[list[int]]:
    if options.context is None:
        return prompts.encode(engine)
    room = engine.base.context_length - options.max_new_tokens
    if options.context > room:
        raise MultirateError(
            f"context={options.context} leaves no room for {options.max_new_tokens} new tokens in this "
            f"model's context of {engine.base.context_length}. Give at most {room} (--context), or "
            f"fewer new tokens (--max-new-tokens)."
        )
    return prompts.encode(engine, context=options.context)


def group(
    prompts: PromptSet, ids: Sequence[list[int]], options: SpeculativeOptions
) -> tuple[list[Batch], list[str]]:
    """Prompts in batches, and a batch's category ("none" for rows without one).

    Where categories are told apart, a batch holds prompts of one; else they keep their order.
    """
    groups: dict[str, list[list[int]]] = {}
    for row, own in zip(prompts.rows, ids, strict=True):
        groups.setdefault(row.category or "none" if options.by_category else "", []).append(own)
    batches = [
        (group[i : i + options.batch], category)
        for category, group in groups.items()
        for i in range(0, len(group), options.batch)
    ]
    return [batch for batch, _ in batches], [category for _, category in batches]


def run_interleaved(
    methods: Mapping[str, Method],
    batches: Sequence[Batch],
    *,
    max_new_tokens: int,
    synchronize: Callable[[], None] = lambda: None,
    progress: Progress = lambda done, total: None,
) -> dict[str, list[Sample]]:
    """Run every method once on every batch; batch i starts with method i modulo their number.

    Returns:
        A sample a batch for every method.
    """
    names = list(methods)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    done, total = 0, len(names) * len(batches)
    progress(done, total)
    for i, batch in enumerate(batches):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            synchronize()
            start = time.perf_counter()
            outputs = methods[name].run(batch, max_new_tokens)
            synchronize()
            samples[name].append(Sample(outputs, time.perf_counter() - start))
            done += 1
            progress(done, total)
    return samples


def compare(
    engine: Engine,
    batches: Sequence[Batch],
    samples: Mapping[str, Sequence[Sample]],
    methods: Mapping[str, Method],
) -> dict[str, list[Comparison]]:
    """Outputs against plain decoding's, prompt by prompt, of every method that runs the same weights.

    Empty if plain decoding was not measured.
    """
    if "plain" not in samples:
        return {}
    prompts = [ids for batch in batches for ids in batch]
    plain = _token_ids(samples["plain"])
    return {
        name: [
            compare_outputs(engine.base, *texts, tolerance=_tolerance(engine, method))
            for texts in zip(prompts, plain, _token_ids(samples[name]), strict=True)
        ]
        for name, method in methods.items()
        if not method.own_weights
    }


def _token_ids(samples: Sequence[Sample]) -> list[list[int]]:
    return [output.token_ids for sample in samples for output in sample.outputs]


def _provenance(
    engine: Engine,
    prompts: PromptSet,
    options: SpeculativeOptions,
    accelerator: str | None,
    methods: Mapping[str, Method],
) -> dict[str, Any]:
    base = engine.base
    return {
        **provenance(device=base.device, dtype=base.dtype),
        "dtype": base.dtype_name,
        "compile": base.compile_mode,
        "model": without_folders(str(base.config.name_or_path)),
        "accelerator": accelerator and without_folders(accelerator),
        "prompt_set": {"name": prompts.name, "sha256": prompts.sha256, "first": len(prompts.rows)},
        "decoding": _decoding(options),
        "temperature": options.temperature,
        "batch": options.batch,
        "context": options.context,
        "turns": options.turns,
        **(_llama_cpp(options.gguf) if options.gguf else {}),
        "num_draft_tokens": options.num_draft_tokens or "from measured step costs",
        "timing": "wall clock of the whole call, prefill included; methods interleaved per batch",
        "spread": f"low and high are the {LOW}th and {HIGH}th percentile over batches",
        "speedup_definition": "median over batches of the ratio of tokens/s on the same prompts; "
        f"ci: {CONFIDENCE:.0%} bootstrap interval of that median, {RESAMPLES} resamples",
        "near_tie_tolerance": near_tie_tolerance(base.dtype),
        **_own_dtypes(methods),
        **{key: value for method in methods.values() for key, value in method.details.items()},
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


def _decoding(options: SpeculativeOptions) -> str:
    """All that two runs must have in common, in words."""
    parts = ["greedy"]
    if options.temperature:
        parts = [f"temperature {options.temperature:g}, seed {SEED}"]
    parts.append("one prompt at a time" if options.batch == 1 else f"batches of {options.batch}")
    if options.context is not None:
        parts.append(f"prompts of {options.context} tokens")
    if options.turns > 1:
        parts.append(f"{options.turns} turns")
    return ", ".join(parts)


def _llama_cpp(files: Sequence[Path]) -> dict[str, Any]:
    names = [path.name for path in files]
    return {
        "gguf": names[0] if len(names) == 1 else names,
        "llama_cpp_python": llama_cpp().__version__,
    }
