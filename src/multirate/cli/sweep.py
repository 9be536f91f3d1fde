"""`multirate bench sweep`: speed-ups over batch sizes, context lengths and temperatures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from multirate.cli.bench import progress_bar
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
from multirate.config.errors import MultirateError
from multirate.models.embedded import EMBEDDED_NAME

if TYPE_CHECKING:
    from multirate.bench.speculative import Progress
    from multirate.bench.sweep import Setting, SweepReport


def sweep(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = EMBEDDED_NAME,
    prompts: Annotated[
        str, typer.Option(metavar="FILE_OR_SET", help="as for speculative")
    ] = "mt_bench",
    limit: Annotated[int | None, typer.Option(help="only the first so many prompts")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="most new tokens of a prompt")] = 128,
    methods: Annotated[
        str, typer.Option(metavar="A,B,C", help="what to measure, plain among them")
    ] = "plain,multirate",
    batches: Annotated[str, typer.Option(metavar="N,...", help="prompts at a time")] = "1,4,16",
    contexts: Annotated[
        str, typer.Option(metavar="N,...", help="tokens that prompts are lengthened to")
    ] = "256,2048",
    temperatures: Annotated[str, typer.Option(metavar="T,...", help="0 for greedy")] = "0,1",
    least: Annotated[
        float | None,
        typer.Option(help="exit with status 1 where a speed-up over plain decoding is below this"),
    ] = None,
    accelerator: AcceleratorChoice = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    compile: Compile = "auto",
    device: Device = None,
    as_json: Json = False,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="also save the JSON to this file")
    ] = None,
) -> None:
    """Speed-ups over batch sizes, context lengths and temperatures, each on its own."""
    import_library()
    import multirate
    from multirate.bench.files import require_writable_file
    from multirate.bench.options import SpeculativeOptions
    from multirate.bench.prompts import read_prompts
    from multirate.bench.sweep import bench_sweep, settings, with_setting

    # Everything that can be refused is refused before anything slow starts.
    names = split_names(methods)
    options = SpeculativeOptions(names, max_new_tokens)
    options.require_plain("A sweep")
    options.require_weights(model)
    wanted = settings(
        [int(n) for n in _numbers("batches", batches)],
        [int(n) for n in _numbers("contexts", contexts)],
        _numbers("temperatures", temperatures),
    )
    if not wanted:
        raise MultirateError("No setting was named. Give --batches, --contexts or --temperatures.")
    chosen_options = [(setting, with_setting(options, setting)) for setting in wanted]
    prompt_set = read_prompts(prompts, limit=limit)
    if output is not None:
        require_writable_file(output)
    chosen = accelerator_for(model, accelerator) if options.needs_accelerator else None
    options.require_accelerator(chosen is not None)

    engine = multirate.load(
        model, chosen, dtype=dtype, quantize=quantize, compile=compile, device=device
    )
    report = bench_sweep(
        engine,
        prompt_set,
        chosen_options,
        accelerator=None if chosen is None else accelerator or "default",
        progress=_progress,
    )
    if output is not None:
        save_json(output, report.to_dict())
    if as_json:
        write_json(report.to_dict())
    else:
        _show(report)
    if least is not None and (slow := report.slow(least)):
        note(f"below {least:g}x plain decoding: {'; '.join(slow)}")
        raise typer.Exit(1)


def _numbers(option: str, text: str) -> list[float]:
    """Numbers with commas between them, none for an empty text; whole ones but for temperatures."""
    kind = float if option == "temperatures" else int
    try:
        return [kind(word) for word in text.split(",") if word.strip()]
    except ValueError:
        raise MultirateError(
            f"--{option} {text!r} is not allowed; give numbers with commas between them, such as "
            f"{'0,1' if kind is float else '1,4,16'}."
        ) from None


@contextmanager
def _progress(setting: Setting) -> Iterator[Progress]:
    note(str(setting))
    with progress_bar() as advance:
        yield advance


def _show(report: SweepReport) -> None:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("setting")
    table.add_column("method", no_wrap=True)
    for column in ("tokens/s", "vs plain", "95% interval", "accept.\nlength"):
        table.add_column(column, justify="right", no_wrap=True)
    for setting, own in report.reports:
        first = str(setting)
        for name, summary in own.methods.items():
            ratio, interval = summary.speedup_vs_plain, summary.speedup_vs_plain_ci
            drafts = summary.speculation
            table.add_row(
                first,
                name,
                f"{summary.tokens_per_second.median:.1f}",
                "-" if ratio is None else f"{ratio:.2f}x",
                "-" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}",
                "-" if drafts is None else f"{drafts.mean_acceptance_length:.2f}",
            )
            first = ""
        table.add_section()
    Console(highlight=False).print(table)
