"""`multirate bench`: measurements, as a table or as JSON with their provenance."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.table import Table

from multirate.cli.options import (
    MODEL_HELP,
    AcceleratorChoice,
    Compile,
    Device,
    Dtype,
    Json,
    Quantize,
    accelerator_for,
    import_library,
    note,
    save_json,
    split_names,
    write_json,
)
from multirate.models.embedded import EMBEDDED_NAME, embedded_gguf

if TYPE_CHECKING:
    from multirate.bench.cost_card import CostCard
    from multirate.bench.reports import ReportComparison
    from multirate.bench.speculative import Progress, SpeculativeReport
    from multirate.bench.summary import CategorySummary, MethodSummary

LINES = 10  # of progress, where stderr is no terminal

bench = typer.Typer(
    name="bench",
    help="Measure speed and agreement of decoding methods.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@bench.command()
def speculative(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = EMBEDDED_NAME,
    prompts: Annotated[
        str,
        typer.Option(
            metavar="FILE_OR_SET",
            help="mt_bench, gsm8k, humaneval, or a .jsonl file with turns, messages, prompt or text on "
            "each line",
        ),
    ] = "mt_bench",
    limit: Annotated[int | None, typer.Option(help="only the first so many prompts")] = None,
    per_category: Annotated[
        int | None, typer.Option(help="only the first so many prompts of each category")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="most new tokens of a prompt")] = 128,
    methods: Annotated[
        str, typer.Option(metavar="A,B,C", help="what to measure; '?' lists all")
    ] = "plain,transformers,multirate",
    accelerator: AcceleratorChoice = None,
    num_draft_tokens: Annotated[
        int | None, typer.Option(help="drafts a step; default: chosen from measured step costs")
    ] = None,
    gguf: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="the model for llama.cpp, several times for several quantisations; default: the "
            "embedded model's own file",
        ),
    ] = None,
    draft_model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="the smaller model that drafts for the method two-model"
        ),
    ] = None,
    vllm_python: Annotated[
        str | None,
        typer.Option(
            metavar="PYTHON", help="a Python that has vLLM, for the methods vllm, vllm-ngram"
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="prompts that are decoded together")] = 1,
    context: Annotated[
        int | None,
        typer.Option(help="lengthen prompts to so many tokens with prose in front of them"),
    ] = None,
    turns: Annotated[
        int,
        typer.Option(
            help="turns of a conversation that are prompts of their own, behind plain decoding's answers"
        ),
    ] = 1,
    temperature: Annotated[
        float, typer.Option(help="0 for greedy decoding; above, outputs are not compared")
    ] = 0.0,
    by_category: Annotated[
        bool,
        typer.Option("--by-category", help="also speed-up and acceptance by prompts' category"),
    ] = False,
    dtype: Dtype = None,
    quantize: Quantize = None,
    compile: Compile = "auto",
    device: Device = None,
    as_json: Json = False,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="also save the JSON to this file")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="also draw speed-up and acceptance length"),
    ] = None,
) -> None:
    """Decode the same prompts by several methods: speed, acceptance, agreement."""
    import_library()
    import multirate
    from multirate.bench.files import require_figure, require_writable_file, write_whole
    from multirate.bench.options import SpeculativeOptions, reads_gguf
    from multirate.bench.prompts import read_prompts
    from multirate.bench.speculative import bench_speculative

    # Everything that can be refused is refused before anything slow starts.
    names = split_names(methods)
    files = tuple(gguf or ())
    if not files and model == EMBEDDED_NAME and reads_gguf(names):
        files = (embedded_gguf(),)
    options = SpeculativeOptions(
        names,
        max_new_tokens,
        num_draft_tokens,
        files,
        temperature,
        by_category,
        batch=batch,
        context=context,
        turns=turns,
        vllm_python=vllm_python,
        draft_model=draft_model,
    )
    prompt_set = read_prompts(prompts, limit=limit, per_category=per_category)
    prompt_set.require_turns(turns)
    if by_category:
        prompt_set.require_categories()
    if output is not None:
        require_writable_file(output)
    if plot is not None:
        require_figure(plot)
        options.require_plain("--plot")
    chosen = None
    if options.needs_accelerator or accelerator is not None:
        chosen = accelerator_for(model, accelerator)
    options.require_accelerator(chosen is not None)

    engine = multirate.load(
        model, chosen, dtype=dtype, quantize=quantize, compile=compile, device=device
    )
    with progress_bar() as progress:
        report = bench_speculative(
            engine,
            prompt_set,
            options,
            accelerator=None if chosen is None else accelerator or "default",
            progress=progress,
        )
    if output is not None:
        save_json(output, report.to_dict())
    if plot is not None:
        from multirate.bench.figures import draw_speculative

        write_whole(plot, draw_speculative(report.to_dict(), plot.suffix))
        note(f"saved {plot}")
    if as_json:
        write_json(report.to_dict())
    else:
        show(report, Console(highlight=False))


@bench.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A.json", help="a saved report")],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="another")],
    as_json: Json = False,
) -> None:
    """Speeds of two reports of `bench speculative`, method by method."""
    from multirate.bench.reports import compare_reports, read_report

    found = compare_reports(read_report(a), read_report(b))
    for warning in found.warnings:
        note(f"warning: {warning}")
    if as_json:
        write_json(found.to_dict())
        return
    console = Console(highlight=False)
    console.print(_side_by_side(found, title=f"A: {a.name}, B: {b.name}"))
    console.print()
    for name, only in (("A", found.only_a), ("B", found.only_b)):
        if only:
            console.print(f"only in {name}: {', '.join(only)}", soft_wrap=True)
    console.print("medians over prompts; B/A above 1: B is faster", soft_wrap=True)


def _side_by_side(found: ReportComparison, *, title: str) -> Table:
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False
    )
    table.add_column("method", no_wrap=True)
    for column in ("tokens/s\nA", "\nB", "\nB/A", "vs plain\nA", "\nB", "\nB/A"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, pair in found.methods.items():
        speed, speedup = pair.tokens_per_second, pair.speedup_vs_plain
        table.add_row(
            name,
            f"{speed.a:.1f}", f"{speed.b:.1f}", _times(speed.ratio),
            _times(speedup.a), _times(speedup.b), _times(speedup.ratio),
        )  # fmt: skip
    return table


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Shows how many timed runs are done and about how long the rest takes, on stderr."""
    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    # Drawn between the timed runs only: a thread that draws would take part of a core from them.
    bar = Bar(*columns, console=console, auto_refresh=False, transient=True)
    task = bar.add_task("measuring", total=None)
    started = time.monotonic()

    def advance(done: int, total: int) -> None:
        nonlocal started
        if done == 0:  # after the warm-up, which does not count for the estimate
            started = time.monotonic()
            bar.reset(task, total=total)
        if console.is_terminal:
            bar.update(task, completed=done, total=total, refresh=True)
        elif done > 0 and (done % max(1, total // LINES) == 0 or done == total):
            left = (time.monotonic() - started) / done * (total - done)
            note(f"{done} of {total} runs, about {_clock(left)} left")

    note("warming up, and measuring step costs")
    if console.is_terminal:
        bar.start()
    try:
        yield advance
    finally:
        bar.stop()


def show(report: SpeculativeReport, console: Console) -> None:
    """Print a report as a table, with what its numbers mean."""
    source = report.provenance
    machine = source["machine"]
    calls = "prompts" if source["batch"] == 1 else "batches"
    table = Table(
        title=f"{source['model']}, {source['dtype']}, {_decoding(source)}, "
        f"{report.prompts} prompts x {report.new_tokens} new tokens",
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,  # all columns fit in 80 characters
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("method", no_wrap=True)
    for column in (
        "tokens/s", "vs plain", "vs trans-\nformers", "accept.\nlength",
        "identical/\nnear-ties/\ndifferent",
    ):  # fmt: skip
        table.add_column(column, justify="right", no_wrap=True)
    for name, summary in report.methods.items():
        table.add_row(name, *_cells(summary))
    console.print(table)
    console.print()
    if report.categories is not None:
        console.print(_by_category(report.categories))
        console.print()
    for name, summary in report.methods.items():
        for line in _drafting(name, summary):
            console.print(line, soft_wrap=True)
    console.print(
        f"tokens/s of whole calls, prefill included: median over {calls} (10th-90th percentile); "
        f"speedups: median of the ratios on single {calls} (95% confidence interval); "
        "acceptance length: tokens a draft step yields.",
        soft_wrap=True,
    )
    if any(summary.identical is not None for summary in report.methods.values()):
        console.print(
            f"Outputs are compared with plain's where the weights are the same; a near-tie is a first "
            f"difference with log-probabilities within {source['near_tie_tolerance']:.2g}.",
            soft_wrap=True,
        )
    for name, own in source.get("own_dtypes", {}).items():
        console.print(
            f"{name} runs in {own['dtype']}: near-ties within {own['near_tie_tolerance']:.2g}",
            soft_wrap=True,
        )
    console.print(_costs(report.cost_card), soft_wrap=True)
    console.print(
        f"{machine['cpu']}, {machine['usable_cores']} cores, {source['torch_threads']} threads, "
        f"device {machine['device']}",
        soft_wrap=True,
    )


def _costs(card: CostCard) -> str:
    """The cost card in two sentences."""
    return (
        f"plain step: {card.weight_bytes / 1e6:.0f} MB of weights, "
        f"{card.kv_bytes_per_token / 1e3:.1f} kB of keys and values a token; memory "
        f"{card.bandwidth / 1e9:.1f} GB/s, matmul {card.matmul_rate / 1e9:.0f} GFLOPS. Reading takes "
        f"{1e3 * card.floor_seconds:.1f} ms, multiplying {1e3 * card.matmul_seconds:.1f} ms, the step "
        f"{1e3 * card.step_seconds:.1f} ms ({card.rows} x {card.context} tokens): roofline fraction "
        f"{card.roofline_fraction:.2f}"
    )


def _decoding(source: Mapping[str, Any]) -> str:
    """In a few words; seeds and the usual, one prompt at a time, are not among them."""
    words = source["decoding"].split(", ")
    return ", ".join(w for w in words if not w.startswith("seed") and w != "one prompt at a time")


def _cells(summary: MethodSummary) -> list[str]:
    speed = summary.tokens_per_second
    counts = (summary.identical, summary.near_ties, summary.differences)
    return [
        f"{speed.median:.1f}\n({speed.low:.1f}-{speed.high:.1f})",
        _times(summary.speedup_vs_plain) + _interval(summary.speedup_vs_plain_ci, before="\n"),
        _times(summary.speedup_vs_transformers),
        _length(summary),
        "-" if summary.identical is None else " / ".join(map(str, counts)),
    ]


def _by_category(categories: Mapping[str, CategorySummary]) -> Table:
    """Speed-up and acceptance of every method but plain, a block of lines a category."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("category")
    table.add_column("prompts", justify="right")
    table.add_column("method", no_wrap=True)
    table.add_column("vs plain", justify="right", no_wrap=True)
    table.add_column("accept.\nlength", justify="right", no_wrap=True)
    for category, group in categories.items():
        first = (category, str(group.prompts))
        for name, summary in group.methods.items():
            if name == "plain":
                continue
            interval = _interval(summary.speedup_vs_plain_ci, before=" ")
            speedup = _times(summary.speedup_vs_plain) + interval
            table.add_row(*first, name, speedup, _length(summary))
            first = ("", "")
        table.add_section()
    return table


def _length(summary: MethodSummary) -> str:
    speculation = summary.speculation
    return "-" if speculation is None else f"{speculation.mean_acceptance_length:.2f}"


def _drafting(name: str, summary: MethodSummary) -> Iterator[str]:
    """What a table has no room for: acceptance by position, and how much was drafted."""
    speculation = summary.speculation
    if speculation is None:
        return
    if speculation.num_drafts > 0:
        rates = ", ".join(f"{rate:.2f}" for rate in speculation.per_position_acceptance_rate)
        drafted = speculation.num_draft_tokens / speculation.num_drafts
        yield (
            f"{name}: {drafted:.1f} tokens a draft; share of drafts accepted up to position 1, 2, "
            f"...: {rates}"
        )
    if speculation.note is not None:
        yield f"{name}: {speculation.note}"


def _interval(interval: tuple[float, float] | None, *, before: str) -> str:
    return "" if interval is None else f"{before}({interval[0]:.2f}-{interval[1]:.2f})"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
