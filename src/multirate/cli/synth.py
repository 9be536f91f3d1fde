"""`multirate synth`: the model writes its own training text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from multirate.cli.options import Device, Model, Template, note
from multirate.config.errors import MultirateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from multirate.train.synth import SynthProgress
    from multirate.train.writers import Writer

ENGINES = ("torch", "vllm")


def synth(
    model: Model,
    output: Annotated[
        Path, typer.Argument(metavar="OUT.jsonl", help="file to write or go on with")
    ],
    tokens: Annotated[int, typer.Option(help="answer tokens that the file shall hold")],
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="JSONL of user turns to answer (turns, messages, prompt or text), or a set that "
            "ships; without it the model invents them",
        ),
    ] = None,
    template: Template = None,
    answers: Annotated[
        int | None,
        typer.Option(
            help="answers to each prompt; default: 1 to given ones and to greedy ones, else 2"
        ),
    ] = None,
    greedy_share: Annotated[float, typer.Option(help="share of answers without sampling")] = 0.5,
    temperature: Annotated[float, typer.Option(help="of sampled answers and prompts")] = 0.8,
    batch_rows: Annotated[int, typer.Option(help="texts written side by side")] = 96,
    max_answer_tokens: Annotated[int, typer.Option(help="longest answer; cut there")] = 192,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(help="longest user turn; default: 64 for invented ones, 256 for given ones"),
    ] = None,
    seed: Annotated[int, typer.Option(help="of all draws")] = 0,
    engine: Annotated[str, typer.Option(help=f"one of {', '.join(ENGINES)}")] = "torch",
    dtype: Annotated[str, typer.Option(help="of the weights; auto = the fastest here")] = "auto",
    device: Device = None,
) -> None:
    """Let MODEL write training text to OUT.jsonl: answers to prompts, given or of its own invention.

    Killed or full, the file holds whole lines; run again to go on.
    """
    from multirate.bench.prompts import read_prompts
    from multirate.train.synth import SynthOptions, require_output, synthesize

    # Everything that can be refused is refused before anything slow starts.
    if engine not in ENGINES:
        raise MultirateError(f"engine={engine!r} is not known. Allowed: {', '.join(ENGINES)}.")
    if template is not None and prompts is None:
        raise MultirateError(
            "--template makes prompts of the lines of a file, which --prompts names. Give both."
        )
    options = SynthOptions(
        tokens=tokens,
        batch_rows=batch_rows,
        answers=answers
        if answers is not None
        else (2 if prompts is None and greedy_share < 1 else 1),
        greedy_share=greedy_share,
        temperature=temperature,
        max_prompt_tokens=max_prompt_tokens
        if max_prompt_tokens is not None
        else (64 if prompts is None else 256),
        max_answer_tokens=max_answer_tokens,
        seed=seed,
    )
    given = None
    if prompts is not None:
        rows = read_prompts(prompts, template=template).rows
        given = [_messages(row.content) for row in rows]
    require_output(output)
    tokenizer, writer = _writer(model, engine=engine, dtype=dtype, device=device, seed=seed)
    report = _Report(Console(stderr=True, highlight=False), output, options.tokens)
    try:
        for progress in synthesize(output, writer, tokenizer, options, prompts=given):
            report(progress)
    finally:
        report.close()


def _messages(content: str | list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}] if isinstance(content, str) else content


def _writer(
    model: str, *, engine: str, dtype: str, device: str | None, seed: int
) -> tuple[PreTrainedTokenizerBase, Writer]:
    import torch

    import multirate
    from multirate.models.base import BaseModel
    from multirate.models.forms import batch_dtype, choose_form
    from multirate.models.loading import (
        load_pretrained,
        load_tokenizer,
        read_config,
        read_end_token_ids,
    )
    from multirate.train.synth import require_chat
    from multirate.train.writers import TorchWriter, VllmWriter

    tokenizer, location = load_tokenizer(model)
    ends = read_end_token_ids(model)
    require_chat(tokenizer, ends)
    assert tokenizer is not None
    if engine == "vllm":
        length = int(read_config(model).max_position_embeddings)
        return tokenizer, VllmWriter(location, ends, context_length=length, dtype=dtype, seed=seed)
    if dtype == "auto" and choose_form(model, device=device).if_exact:
        # Mostly 4 bits that are the model's own: the numbers of float32, and several times as fast.
        return tokenizer, TorchWriter(
            multirate.load(model, device=device, compile="auto").base, ends
        )
    chosen = batch_dtype(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    loaded = load_pretrained(model, dtype=chosen if dtype == "auto" else dtype, device=device)
    return tokenizer, TorchWriter(BaseModel(loaded.model), ends)


class _Report:
    """A bar with an estimate on a terminal, a line a batch elsewhere."""

    def __init__(self, console: Console, output: Path, tokens: int) -> None:
        self.console, self.output, self.tokens = console, output, tokens
        self.started = time.monotonic()
        self.last: SynthProgress | None = None
        self.progress = Progress(
            TextColumn("writing"), BarColumn(), TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
            console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self.task: TaskID | None = None

    def __call__(self, now: SynthProgress) -> None:
        self.last = now
        if self.task is None:
            if now.tokens:
                note(f"{self.output} holds {now.tokens:,} answer tokens.")
            self.task = self.progress.add_task(
                "", total=self.tokens, completed=now.tokens, state=""
            )
            self.progress.start()
            return
        seconds = time.monotonic() - self.started
        rate = now.new_tokens / seconds
        state = f"{now.tokens:,} of {self.tokens:,} tokens, {rate:.0f} tokens/s"
        self.progress.update(self.task, completed=now.tokens, state=state)
        if now.new_tokens and not self.console.is_terminal:
            left = max(0, self.tokens - now.tokens) / max(rate, 1e-9)
            note(f"{state}, {left / 60:.0f} min left")

    def close(self) -> None:
        self.progress.stop()
        if self.last is None:
            return
        now = self.last
        note(
            f"{self.output}: {now.rows:,} answers, {now.tokens:,} tokens; {now.duplicates} duplicates "
            f"and {now.too_long} prompts that were too long left out."
        )
        if now.tokens < self.tokens:
            note(
                "Stopped before the tokens asked for. Run again to go on; if the prompts are used up, "
                "give more of them, or raise --answers or --max-prompt-tokens."
            )
