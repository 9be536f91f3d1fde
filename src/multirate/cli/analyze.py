"""`multirate analyze`: figures of a model's residual stream, and their numbers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from multirate.cli.options import (
    AcceleratorChoice,
    Device,
    Json,
    Model,
    accelerator_for,
    import_library,
    note,
    write_json,
)

if TYPE_CHECKING:
    from multirate.analyze.run import Progress

_EVERY = 15  # seconds between lines, where stderr is no terminal


def analyze(
    model: Model,
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="folder for the figures and analysis.json")
    ],
    accelerator: AcceleratorChoice = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="text: .jsonl, .jsonl.gz or plain text; without it, the model answers MT-Bench "
            "questions",
        ),
    ] = None,
    figures: Annotated[
        str, typer.Option(metavar="A,B,C", help="some of velocity, rates, alignment, ranks, costs")
    ] = "velocity,rates,alignment,ranks,costs",
    tokens: Annotated[int, typer.Option(help="positions to fit and judge on")] = 8_000,
    rank: Annotated[int, typer.Option(help="adapter rank of lean and tied layers")] = 32,
    epochs: Annotated[int, typer.Option(help="passes over the text of each distillation")] = 6,
    max_length: Annotated[int, typer.Option(help="longest text of --data, in tokens")] = 320,
    seed: Annotated[int, typer.Option(help="of split, adapters and batch order")] = 0,
    dtype: Annotated[
        str | None,
        typer.Option(help="of the weights; default: float32 on a CPU, bfloat16 on a GPU"),
    ] = None,
    device: Device = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace the files of an analysis in DIR")
    ] = False,
    as_json: Json = False,
) -> None:
    """Figures (PNG, SVG) and numbers: how a model's states move, and what reaches the last one."""
    import_library()
    from multirate.analyze.run import (
        analyze as run,
    )
    from multirate.analyze.run import require_output, write_analysis
    from multirate.analyze.tasks import AnalysisOptions
    from multirate.bench.files import require_matplotlib
    from multirate.decode.engine import load

    # Everything that can be refused is refused before anything slow starts.
    options = AnalysisOptions(
        figures=tuple(name.strip() for name in figures.split(",") if name.strip()),
        tokens=tokens,
        rank=rank,
        epochs=epochs,
        max_length=max_length,
        seed=seed,
    )
    require_matplotlib()
    require_output(output, options.figures, overwrite=overwrite)
    if dtype is None:
        dtype = "float32" if _on_cpu(device) else "bfloat16"
    engine = load(model, accelerator_for(model, accelerator), dtype=dtype, device=device)
    with _progress() as progress:
        numbers = run(engine, options, data=data, progress=progress)
    names = write_analysis(numbers, output)
    note(f"saved {', '.join(names)} in {output}, after {numbers['provenance']['seconds']:.0f} s")
    if as_json:
        write_json(numbers)


def _on_cpu(device: str | None) -> bool:
    """Half-precision matmuls of many rows are slower than float32 on most CPUs."""
    import torch

    return device == "cpu" or (device is None and not torch.cuda.is_available())


@contextmanager
def _progress() -> Iterator[Progress]:
    """Shows what is being done, how much of the work is, and about how long the rest takes."""
    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )  # fmt: skip
    bar = Bar(*columns, console=console, transient=True)
    task = bar.add_task("loading", total=1.0, left="")
    started = shown = time.monotonic()

    def show(label: str, share: float) -> None:
        nonlocal shown
        now = time.monotonic()
        seconds = (now - started) / share * (1 - share) if share > 0.01 else None
        left = "" if seconds is None else f"about {_clock(seconds)} left"
        if console.is_terminal:
            bar.update(task, description=label, completed=share, left=left)
        elif now - shown > _EVERY:
            shown = now
            note(f"{share:.0%}, {label}{', ' if left else ''}{left}")

    if console.is_terminal:
        bar.start()
    try:
        yield show
    finally:
        bar.stop()


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
