"""`multirate demo`: plain and accelerated decoding of one prompt, side by side."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from multirate.cli.options import Compile, Dtype, Json, Quantize, import_library, write_json
from multirate.config.errors import MultirateError
from multirate.config.generation import GenerationOptions
from multirate.models.embedded import EMBEDDED_NAME
from multirate.streams.defaults import DEFAULT

if TYPE_CHECKING:
    from multirate.decode.compare import Comparison
    from multirate.decode.engine import Engine
    from multirate.decode.results import GenerationResult

PROMPT = "What are the benefits of regular exercise?"
RUNS = 3
WARM_UP_TOKENS = 8
SIDE_BY_SIDE = 100  # columns of a terminal that two panels need


@dataclass(frozen=True)
class Race:
    """Timed runs of both strategies on one prompt.

    Attributes:
        plain: results of plain decoding, one a run.
        accelerated: results of speculative decoding, one a run.
        comparison: of the two outputs.
        tolerance: largest log-probability gap of a near-tie.
    """

    plain: list[GenerationResult]
    accelerated: list[GenerationResult]
    comparison: Comparison
    tolerance: float

    @property
    def speedup(self) -> float:
        return _median_run(self.accelerated).tokens_per_second / (
            _median_run(self.plain).tokens_per_second
        )


def demo(
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="what to ask the model")] = PROMPT,
    max_new_tokens: Annotated[int, typer.Option(help="length of the answer, at most")] = 128,
    dtype: Dtype = None,
    quantize: Quantize = None,
    compile: Compile = "auto",
    as_json: Json = False,
) -> None:
    """Decode one prompt plain and accelerated, with the embedded model and its accelerator."""
    options = GenerationOptions(max_new_tokens=max_new_tokens)
    if not prompt.strip():
        raise MultirateError("The prompt is empty. Give at least one word.")
    progress = Console(stderr=True, highlight=False)
    # Drawn rarely: what the spinner computes, the timed runs do not.
    spinner = progress.status("Starting", refresh_per_second=2)
    with spinner if progress.is_terminal else nullcontext() as status:

        def report(text: str) -> None:
            if status is not None:
                status.update(text)

        report("Loading torch and transformers")
        import multirate

        import_library()
        report(f"Loading {EMBEDDED_NAME}; its first time takes a minute")
        engine = multirate.load(
            EMBEDDED_NAME, DEFAULT, dtype=dtype, quantize=quantize, compile=compile
        )
        race = run_race(engine, engine.encode(prompt), options, report=report)
    if as_json:
        write_json(_to_dict(race, prompt=prompt))
    else:
        _print(Console(highlight=False), race, prompt=prompt)
    if race.comparison.near_tie is False:
        raise typer.Exit(1)


def run_race(
    engine: Engine,
    prompt_ids: list[int],
    options: GenerationOptions,
    *,
    runs: int = RUNS,
    report: Callable[[str], None] = lambda text: None,
) -> Race:
    """Time both strategies on one prompt, run by run in turn, after a warm-up of both.

    The warm-up also measures the step costs that draft lengths are chosen from, so that no timed run
    does.

    Args:
        engine: with an accelerator.
        prompt_ids: the prompt's tokens.
        options: greedy ones; their strategy is replaced.
        runs: of each strategy.
        report: told what is being done.
    """
    from multirate.decode.compare import compare_outputs, near_tie_tolerance

    def run(strategy: str, tokens: int) -> GenerationResult:
        return engine.generate(prompt_ids, options, strategy=strategy, max_new_tokens=tokens)

    report("Warming up, measuring step costs; the first time takes a minute or two")
    for strategy in ("plain", "speculative"):
        run(strategy, min(WARM_UP_TOKENS, options.max_new_tokens))
    plain, accelerated = [], []
    for number in range(1, runs + 1):
        report(f"Run {number} of {runs}: plain")
        plain.append(run("plain", options.max_new_tokens))
        report(f"Run {number} of {runs}: accelerated")
        accelerated.append(run("speculative", options.max_new_tokens))
    report("Comparing the outputs")
    comparison = compare_outputs(
        engine.base, prompt_ids, plain[-1].token_ids, accelerated[-1].token_ids
    )
    return Race(plain, accelerated, comparison, near_tie_tolerance(engine.base.dtype))


def _median_run(results: list[GenerationResult]) -> GenerationResult:
    return sorted(results, key=lambda result: result.seconds)[len(results) // 2]


def _to_dict(race: Race, *, prompt: str) -> dict[str, Any]:
    """The object that `multirate demo --json` prints; each strategy by its median run."""
    comparison = race.comparison
    return {
        "model": EMBEDDED_NAME,
        "prompt": prompt,
        "runs": len(race.plain),
        "plain": _median_run(race.plain).to_dict(),
        "accelerated": _median_run(race.accelerated).to_dict(),
        "speedup": race.speedup,
        "identical": comparison.identical,
        "first_difference": comparison.first_difference,
        "gap": comparison.gap,
        "near_tie": comparison.near_tie,
        "tolerance": race.tolerance,
    }


def _print(console: Console, race: Race, *, prompt: str) -> None:
    plain, accelerated = _median_run(race.plain), _median_run(race.accelerated)
    console.print(Text.assemble(("Prompt: ", "bold"), prompt))
    console.print(
        f"{EMBEDDED_NAME}, {plain.dtype} on {plain.device}, greedy, {plain.new_tokens} new tokens"
    )
    panels = [
        _panel("plain", plain, _speed(race.plain), "cyan"),
        _panel("accelerated", accelerated, [*_speed(race.accelerated), *_drafts(accelerated)], "green"),
    ]  # fmt: skip
    if console.width >= SIDE_BY_SIDE:
        table = Table.grid(expand=True, padding=(0, 1, 0, 0))
        for _ in panels:
            table.add_column(ratio=1)
        table.add_row(*panels)
        console.print(table)
    else:
        console.print(*panels, sep="\n")
    console.print(f"Speed-up: [bold]{race.speedup:.2f}[/] (medians of {len(race.plain)} runs each)")
    console.print(Text.assemble("Outputs: ", _verdict(race)))
    speculation = accelerated.speculation
    if speculation is not None and speculation.note is not None:
        console.print(speculation.note)


def _panel(title: str, result: GenerationResult, facts: list[str], colour: str) -> Panel:
    body = Group(Text((result.text or "").strip()), Rule(style=colour), *map(Text, facts))
    return Panel(body, title=title, border_style=colour)


def _speed(results: list[GenerationResult]) -> list[str]:
    rates = [result.tokens_per_second for result in results]
    return [f"{median(rates):.1f} tokens/s ({min(rates):.1f} to {max(rates):.1f})"]


def _drafts(result: GenerationResult) -> list[str]:
    speculation = result.speculation
    assert speculation is not None
    return [
        f"mean acceptance length {speculation.mean_acceptance_length:.2f}",
        f"{speculation.num_accepted_tokens} of {speculation.num_draft_tokens} drafted tokens "
        f"accepted",
    ]


def _verdict(race: Race) -> Text:
    """Whether the outputs are the same, and if not, whether rounding explains it."""
    comparison, dtype = race.comparison, race.plain[0].dtype
    if comparison.identical:
        return Text(f"identical, all {race.plain[0].new_tokens} tokens", "bold green")
    assert comparison.first_difference is not None
    where = f"first difference at token {comparison.first_difference + 1}"
    if comparison.gap is None:
        return Text(f"{where}, where one of them ends: this should not happen", "bold red")
    gap = f"log-probabilities {comparison.gap:.3f} apart"
    if comparison.near_tie:
        return Text(
            f"{where}, a near-tie: {gap}, and {dtype} rounds by up to {race.tolerance:.3g}",
            "bold yellow",
        )
    return Text(
        f"{where}, no near-tie: {gap}, more than the {race.tolerance:.3g} by which {dtype} rounds. "
        f"This should not happen",
        "bold red",
    )
