"""`multirate bench`: measurements, as a table or as JSON with their provenance."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from multirate.cli.options import (
    MODEL_HELP,
    AcceleratorChoice,
    Compile,
    Device,
    Dtype,
    Json,
    Quantize,
    Template,
    accelerator_for,
    import_library,
    note,
    save_json,
    split_names,
    write_json,
)
from multirate.cli.tables import show, side_by_side
from multirate.models.embedded import EMBEDDED_NAME, embedded_gguf

if TYPE_CHECKING:
    from multirate.bench.speculative import Progress

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
    template: Template = None,
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
    options.require_weights(model)
    prompt_set = read_prompts(prompts, limit=limit, per_category=per_category, template=template)
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
    console.print(side_by_side(found, title=f"A: {a.name}, B: {b.name}"))
    console.print()
    for name, only in (("A", found.only_a), ("B", found.only_b)):
        if only:
            console.print(f"only in {name}: {', '.join(only)}", soft_wrap=True)
    console.print("medians over prompts; B/A above 1: B is faster", soft_wrap=True)


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


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
