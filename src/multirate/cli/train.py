"""`multirate train`: make an accelerator for a model from text."""

from __future__ import annotations

import dataclasses
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

from multirate.cli.options import Model
from multirate.config.accelerator import PRESETS
from multirate.train.options import TrainingOptions

DATA_HELP = (
    "text that the model wrote itself: a .jsonl, .jsonl.gz, .json, .parquet or text file, or a data "
    "set on the hub as name[:config][@split]; may be given several times"
)
_LINE_SECONDS = 10  # between lines where there is no terminal
_FIELDS = {field.name: field for field in dataclasses.fields(TrainingOptions)}


def _setting(name: str, *flags: str) -> Any:
    return typer.Option(*flags, help=_FIELDS[name].metadata["help"])


def _default(name: str) -> Any:
    return _FIELDS[name].default


def train(
    model: Model,
    data: Annotated[list[str], typer.Option(help=DATA_HELP)],
    output: Annotated[Path, typer.Option(help="folder to save the accelerator to")],
    preset: Annotated[str, typer.Option(help=f"one of {', '.join(PRESETS)}")] = "carry",
    start_from: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="an accelerator of this model to train further; it keeps its shape"
        ),
    ] = None,
    heldout_data: Annotated[
        str | None, typer.Option(help="text to measure acceptance on; default: some of the data")
    ] = None,
    loss_on: Annotated[
        str, typer.Option(help="answers: what the model wrote; all: every token")
    ] = "answers",
    max_length: Annotated[int, typer.Option(help="longest text, in tokens")] = 512,
    max_tokens: Annotated[
        int | None, typer.Option(help="most tokens that are read of each data source")
    ] = None,
    epochs: Annotated[float, _setting("epochs")] = _default("epochs"),
    batch_tokens: Annotated[int, _setting("batch_tokens")] = _default("batch_tokens"),
    gradient_accumulation: Annotated[int, _setting("gradient_accumulation")] = 1,
    learning_rate: Annotated[float, _setting("learning_rate")] = _default("learning_rate"),
    warmup_share: Annotated[float, _setting("warmup_share")] = _default("warmup_share"),
    weight_decay: Annotated[float, _setting("weight_decay")] = _default("weight_decay"),
    clip: Annotated[float, _setting("clip")] = _default("clip"),
    ema_decay: Annotated[float, _setting("ema_decay")] = _default("ema_decay"),
    draft_steps: Annotated[int, _setting("draft_steps")] = _default("draft_steps"),
    step_decay: Annotated[float, _setting("step_decay")] = _default("step_decay"),
    reach_weighting: Annotated[
        bool, _setting("reach_weighting", "--reach-weighting/--no-reach-weighting")
    ] = _default("reach_weighting"),
    prediction_weight: Annotated[float, _setting("prediction_weight")] = _default(
        "prediction_weight"
    ),
    distillation_weight: Annotated[float, _setting("distillation_weight")] = _default(
        "distillation_weight"
    ),
    distillation_loss: Annotated[str, _setting("distillation_loss")] = _default(
        "distillation_loss"
    ),
    closed_form: Annotated[bool, _setting("closed_form", "--closed-form/--no-closed-form")] = True,
    closed_form_tokens: Annotated[int, _setting("closed_form_tokens")] = _default(
        "closed_form_tokens"
    ),
    heldout_rows: Annotated[int, _setting("heldout_rows")] = _default("heldout_rows"),
    eval_steps: Annotated[int, _setting("eval_steps")] = _default("eval_steps"),
    patience: Annotated[int, _setting("patience")] = _default("patience"),
    draft_vocab_size: Annotated[
        int | None, typer.Option(help="tokens that drafts may propose; default: the preset's")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="adapter rank; default: the preset's")] = None,
    gates: Annotated[
        str | None, typer.Option(help="gates, separated by commas; default: the preset's")
    ] = None,
    carry_layers: Annotated[
        str | None,
        typer.Option(help="slow states that the carry entry fuses; default: the preset's"),
    ] = None,
    seed: Annotated[int, _setting("seed")] = _default("seed"),
    dtype: Annotated[
        str, typer.Option(help="of the frozen base model; auto: bfloat16 where it is fast")
    ] = "auto",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, ...; default: a GPU if there is one")
    ] = None,
    save_seconds: Annotated[float, _setting("save_seconds")] = _default("save_seconds"),
    resume: Annotated[
        bool, typer.Option("--resume", help="go on from the checkpoint beside OUTPUT, if any")
    ] = False,
    teacher_cache: Annotated[
        Path | None, typer.Option(help="folder that keeps the teacher's states for later epochs")
    ] = None,
    teacher_cache_gb: Annotated[float, typer.Option(help="most gigabytes kept there")] = 20.0,
    report_to: Annotated[
        str | None, typer.Option(help="trackers, separated by commas: tensorboard, wandb, ...")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace an accelerator at OUTPUT")
    ] = False,
) -> None:
    """Make an accelerator: closed-form start, then training; the best so far is saved at any time.

    Runs on several devices under `accelerate launch -m multirate.cli.main train ...`.
    """
    values = locals()
    # Everything that can be refused is refused before anything slow starts.
    options = TrainingOptions(**{name: values[name] for name in _FIELDS})
    overrides: dict[str, Any] = {
        "draft_vocab_size": draft_vocab_size,
        "rank": rank,
        "gates": _numbers("gates", gates),
        "carry_layers": _numbers("carry-layers", carry_layers),
    }
    overrides = {name: value for name, value in overrides.items() if value is not None}

    import accelerate

    from multirate.models.base import BaseModel
    from multirate.models.forms import batch_dtype
    from multirate.models.loading import load_pretrained
    from multirate.train.data import read_rows
    from multirate.train.trainer import open_output, require_start, train_accelerator

    require_start(start_from, output, model=model, preset=preset, overrides=overrides)
    open_output(output, resume=resume, overwrite=overwrite)
    process = accelerate.PartialState(cpu=device == "cpu")
    device = device or str(process.device)
    console = Console(stderr=True, highlight=False, quiet=not process.is_main_process)
    loaded = load_pretrained(
        model, dtype=batch_dtype(device) if dtype == "auto" else dtype, device=device
    )
    base = BaseModel(loaded.model)
    # No longer than the model's own context.
    reading: dict[str, Any] = {
        "max_length": min(max_length, base.context_length), "loss_on": loss_on
    }  # fmt: skip
    rows = [
        row
        for source in data
        for row in read_rows(source, loaded.tokenizer, max_tokens=max_tokens, **reading)
    ]
    heldout = None if heldout_data is None else read_rows(heldout_data, loaded.tokenizer, **reading)
    console.print(
        f"{len(rows):,} texts, {sum(len(row) for row in rows):,} tokens, of which "
        f"{sum(row.learned for row in rows):,} are learned"
    )
    report = _Report(console)
    try:
        train_accelerator(
            base,
            rows,
            output,
            heldout=heldout,
            preset=preset,
            start_from=start_from,
            name=loaded.source,
            revision=loaded.revision,
            options=options,
            resume=resume,
            teacher_cache=teacher_cache,
            teacher_cache_gb=teacher_cache_gb,
            report_to=report_to,
            command=shlex.join(["multirate", *sys.argv[1:]]),
            overwrite=overwrite,
            report=report,
            **overrides,
        )
    except KeyboardInterrupt:
        report.close()
        console.print(report.saved_state())
        raise
    finally:
        report.close()
    process.destroy_process_group()


def _numbers(name: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a list of whole numbers such as 10,20,30", param_hint=f"--{name}"
        ) from None


class _Report:
    """Prints what `train_accelerator` reports: a progress bar while training, lines for the rest."""

    def __init__(self, console: Console) -> None:
        self.console, self.started = console, time.monotonic()
        self.progress: Progress | None = None
        self.task: Any = None
        self.saved: str | None = None
        self.first_step: tuple[int, float] | None = None
        self.last_line = 0.0

    def __call__(self, event: str, values: dict[str, Any]) -> None:
        if event == "step":
            self._step(values)
        elif event == "fitted":
            self._line(f"closed form from {values['positions']:,} positions")
        elif event == "cache":
            self._line(
                f"teacher cache: all states take {values['wanted_bytes'] / 1e9:.2f} GB; "
                f"{values['bytes'] / 1e9:.2f} GB of them ({values['rows']:,} texts) are kept in "
                f"{values['folder']}"
            )
        elif event == "resumed":
            self._line(f"resumed at step {values['step']} of {values['steps']}")
        elif event == "evaluated":
            rates = ", ".join(f"{a:.3f}" for a in values["acceptance"])
            self._line(
                f"step {values['step']}: held-out acceptance given the drafts before: {rates}; mean "
                f"acceptance length {values['length']:.3f}{', the best so far' * values['best']}"
            )
        elif event == "saved":
            self.saved = values["path"]
            self._line(f"saved {values['path']}")
        elif event == "stopped":
            self._line(
                f"stopped at step {values['step']}: no evaluation since step "
                f"{values['best']['step']} was better"
            )
        elif event == "finished":
            self._finished(values)

    def _finished(self, values: dict[str, float]) -> None:
        self._line(
            f"{values['positions_per_second']:,.0f} positions/s, peak memory "
            f"{values['peak_memory_bytes'] / 2**30:.2f} GiB"
        )
        self._line(
            f"a batch: teacher's forward {values['teacher_seconds']:.3f} s; accelerator's forward "
            f"{values['draft_step_seconds']:.3f} s a draft step ({values['draft_step_share']:.0%} of "
            f"the teacher's), forward and backward {values['accelerator_seconds']:.3f} s in all "
            f"({values['accelerator_share']:.0%})"
        )

    def _step(self, values: dict[str, Any]) -> None:
        text = (
            f"loss {values['loss']:.3f}, cross-entropy {values['cross_entropy_1']:.3f}, "
            f"{values['positions_per_second']:,.0f} positions/s"
        )
        if self.console.is_terminal:
            self._bar(values, text)
            return
        now = time.monotonic()
        if self.first_step is None:
            self.first_step = (values["step"], now)
        if now - self.last_line >= _LINE_SECONDS:
            self.last_line = now
            since, then = self.first_step
            done = max(1, values["step"] - since)
            left = (now - then) / done * (values["steps"] - values["step"])
            self._line(
                f"step {values['step']} of {values['steps']}: {text}, about {left / 60:.0f} min left"
            )

    def _bar(self, values: dict[str, Any], text: str) -> None:
        if self.progress is None:
            columns = (
                TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[text]}"),
            )  # fmt: skip
            self.progress = Progress(*columns, console=self.console)
            self.task = self.progress.add_task("training", total=values["steps"], text="")
            self.progress.start()
        self.progress.update(self.task, completed=values["step"], text=text)

    def _line(self, text: str) -> None:
        seconds = int(time.monotonic() - self.started)
        self.console.print(
            f"[{seconds // 60:d}:{seconds % 60:02d}] {text}", markup=False, soft_wrap=True
        )

    def saved_state(self) -> str:
        if self.saved is None:
            return "Stopped before anything was saved."
        return (
            f"Stopped. {self.saved} holds the best accelerator so far; --resume goes on training."
        )

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()
