"""`multirate fit`: make an accelerator for a model from text."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from multirate.config.accelerator import PRESETS

DATA_HELP = "text that the model wrote itself: .jsonl, .jsonl.gz or plain text"


def fit(
    model: Annotated[str, typer.Argument(help="hub id, folder, .gguf file or smollm2-135m")],
    data: Annotated[Path, typer.Option(help=DATA_HELP)],
    output: Annotated[Path, typer.Option(help="folder to save the accelerator to")],
    preset: Annotated[str, typer.Option(help=f"one of {', '.join(PRESETS)}")] = "carry",
    epochs: Annotated[float, typer.Option(help="passes over the text; 0 = closed form only")] = 1.0,
    learning_rate: Annotated[float, typer.Option(help="peak of the cosine schedule")] = 1e-3,
    batch_tokens: Annotated[int, typer.Option(help="positions in a training batch")] = 2048,
    closed_form_tokens: Annotated[
        int, typer.Option(help="positions that the closed-form start reads")
    ] = 60_000,
    draft_steps: Annotated[int, typer.Option(help="self-fed draft steps to train")] = 3,
    draft_vocab_size: Annotated[
        int | None, typer.Option(help="tokens that drafts may propose; default: the preset's")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="adapter rank; default: the preset's")] = None,
    heldout_rows: Annotated[int, typer.Option(help="texts kept back to measure acceptance")] = 48,
    max_length: Annotated[int, typer.Option(help="longest text, in tokens")] = 512,
    seed: Annotated[int, typer.Option(help="order of the text and start of the adapters")] = 0,
    dtype: Annotated[str, typer.Option(help="of the frozen base model")] = "bfloat16",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, ...; default: a GPU if any")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace an accelerator at OUTPUT")
    ] = False,
) -> None:
    """Make an accelerator: closed-form start, then a short training; saved whole at any time."""
    from multirate.models.base import BaseModel
    from multirate.models.loading import load_pretrained
    from multirate.train.data import read_rows
    from multirate.train.distill import TrainingOptions
    from multirate.train.fit import FitOptions, fit_accelerator

    console = Console(stderr=True, highlight=False)
    # Everything that can be refused is refused before anything slow starts.
    options = FitOptions(
        epochs=epochs,
        batch_tokens=batch_tokens,
        closed_form_tokens=closed_form_tokens,
        heldout_rows=heldout_rows,
        seed=seed,
    )
    training = TrainingOptions(learning_rate=learning_rate, draft_steps=draft_steps)
    loaded = load_pretrained(model, dtype=dtype, device=device)
    rows = read_rows(data, loaded.tokenizer, max_length=max_length)
    console.print(
        f"{len(rows):,} texts, {sum(len(row.ids) for row in rows):,} tokens, of which "
        f"{sum(len(row.ids) - row.answer_start for row in rows):,} in answers"
    )
    overrides = {"draft_vocab_size": draft_vocab_size, "rank": rank}
    report = _Report(console)
    try:
        fit_accelerator(
            BaseModel(loaded.model),
            rows,
            output,
            preset=preset,
            name=loaded.source,
            revision=loaded.revision,
            options=options,
            training=training,
            command=shlex.join(["multirate", *sys.argv[1:]]),
            overwrite=overwrite,
            report=report,
            **{name: value for name, value in overrides.items() if value is not None},
        )
    except KeyboardInterrupt:
        report.close()
        console.print(report.saved_state())
        raise
    report.close()


class _Report:
    """Prints what `fit_accelerator` reports: a progress bar while training, lines for the rest."""

    def __init__(self, console: Console) -> None:
        self.console, self.started = console, time.monotonic()
        self.progress: Progress | None = None
        self.task: Any = None
        self.saved: str | None = None

    def __call__(self, event: str, values: dict[str, Any]) -> None:
        if event == "step":
            self._step(values)
        elif event == "fitted":
            self._line(f"closed form from {values['positions']:,} positions")
        elif event in ("closed_form", "heldout"):
            rates = ", ".join(f"{a:.3f}" for a in values["acceptance"])
            self._line(
                f"held-out acceptance given the drafts before: {rates}; mean acceptance length "
                f"{values['length']:.3f}"
            )
        elif event == "saved":
            self.saved = values["path"]
            self._line(f"saved {values['path']}")

    def _step(self, values: dict[str, Any]) -> None:
        if self.progress is None:
            columns = (
                TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[loss]}"),
            )  # fmt: skip
            self.progress = Progress(*columns, console=self.console)
            self.task = self.progress.add_task("training", total=values["steps"], loss="")
            self.progress.start()
        self.progress.update(
            self.task,
            completed=values["step"],
            loss=f"loss {values['loss']:.3f}, cross-entropy {values['cross_entropy_1']:.3f}",
        )
        if not self.console.is_terminal and values["step"] % 20 == 0:
            self._line(
                f"step {values['step']} of {values['steps']}: loss {values['loss']:.3f}, "
                f"cross-entropy at step 1 {values['cross_entropy_1']:.3f}"
            )

    def _line(self, text: str) -> None:
        seconds = time.monotonic() - self.started
        self.console.print(f"[{int(seconds) // 60:d}:{int(seconds) % 60:02d}] {text}", markup=False)

    def saved_state(self) -> str:
        if self.saved is None:
            return "Stopped before anything was saved; nothing was written."
        return f"Stopped. {self.saved} holds the accelerator as it was at the last save."

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()
