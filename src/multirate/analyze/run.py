"""The whole analysis of one model: text, states, every figure's numbers, and the files they go to."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multirate.analyze.alignment import alignment_layers, alignment_tasks, parameter_counts
from multirate.analyze.costs import ModelShape
from multirate.analyze.rates import rank_layers, rank_tasks, rate_layers, rate_tasks
from multirate.analyze.states import CachedText, grouped, read_batch
from multirate.analyze.stream_costs import stream_costs
from multirate.analyze.tasks import FIGURES, AnalysisOptions, Study, Task
from multirate.analyze.text import (
    Corpus,
    Text,
    file_corpus,
    own_corpus,
    require_own_text,
    token_classes,
)
from multirate.analyze.velocity import PADDING, Velocity
from multirate.bench.provenance import provenance, without_folders
from multirate.config.errors import MultirateError
from multirate.config.files import require_writable
from multirate.decode.engine import Engine
from multirate.streams.fit import FIRST_POSITION

NUMBERS_FILE = "analysis.json"
SUFFIXES = (".png", ".svg")
_BATCH_TOKENS = 512  # small, since every batch is also a step of the distillations

Progress = Callable[[str, float], None]  # what is being done, share of all work that is done


def output_files(figures: tuple[str, ...] = FIGURES) -> tuple[str, ...]:
    """Names of the files that an analysis writes."""
    return (NUMBERS_FILE, *(f"{name}{suffix}" for name in figures for suffix in SUFFIXES))


def require_output(folder: Path, figures: tuple[str, ...], *, overwrite: bool) -> None:
    """Check that the folder can be written and that nothing in it would be lost.

    Raises:
        MultirateError: it is a file, cannot be written, or holds a file of a name that is written.
    """
    if folder.exists() and not folder.is_dir():
        raise MultirateError(f"{folder} is a file. Choose a folder for the figures.")
    require_writable(folder)
    there = [name for name in output_files(figures) if (folder / name).exists()]
    if there and not overwrite:
        raise MultirateError(
            f"{folder} holds {there[0]} already. Choose another folder, or replace it with "
            f"--overwrite."
        )


def analyze(
    engine: Engine,
    options: AnalysisOptions,
    *,
    data: str | None = None,
    progress: Progress = lambda label, share: None,
) -> dict[str, Any]:
    """All numbers of the asked figures, JSON-ready.

    Args:
        engine: a model, and the accelerator whose alignment is measured if it has one.
        options: what, and on how much text.
        data: file or data set; None = the model's own answers to the MT-Bench first turns.
        progress: called often.

    Raises:
        MultirateError: too little text, or a model that cannot answer prompts and no data.
    """
    started = time.monotonic()
    base, figures = engine.base, options.figures
    study = Study(base, ModelShape.of(base), options, CachedText(base), CachedText(base))
    result: dict[str, Any] = {"provenance": {}, "model": _shape(study.shape), "text": {}}
    accelerator = engine.accelerator if "alignment" in figures else None
    layers: set[int] = set()
    tasks: list[Task] = []
    numbers: dict[str, dict[str, Any]] = {name: {} for name in figures}
    if "rates" in figures:
        layers |= rate_layers(study)
        tasks += rate_tasks(study, numbers["rates"])
    if "alignment" in figures:
        layers |= alignment_layers(study, accelerator)
        tasks += alignment_tasks(study, accelerator, numbers["alignment"])
    if "ranks" in figures:
        layers |= rank_layers(study)
        tasks += rank_tasks(study, numbers["ranks"])
    needs_text = bool(tasks) or "velocity" in figures
    if needs_text:
        if data is None:
            require_own_text(engine.tokenizer)
        tasks = [*_text_tasks(engine, study, data, layers, numbers, result), *tasks]
    _work(tasks, progress)
    if "alignment" in figures:
        numbers["alignment"]["parameters"] = parameter_counts(study, numbers["alignment"])
    if "costs" in figures:
        numbers["costs"] = stream_costs(study)
    result["provenance"] = {
        **provenance(device=base.device, dtype=base.dtype),
        "model": without_folders(str(base.config.name_or_path)),
        "options": {
            name: getattr(options, name)
            for name in ("tokens", "rank", "epochs", "max_length", "seed")
        },
        "seconds": round(time.monotonic() - started, 1),
    }
    return {**result, **numbers}


def _shape(shape: ModelShape) -> dict[str, Any]:
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "parameters": shape.parameters,
    }


def _work(tasks: list[Task], progress: Progress) -> None:
    """Run the tasks in order, telling how much of the estimated work is done."""
    total, done = sum(task.work for task in tasks), 0.0
    for task in tasks:
        before = done

        def tick(part: float, task: Task = task) -> None:
            nonlocal done
            done += part * task.work
            progress(task.label, done / total)

        progress(task.label, before / total)
        task.run(tick)
        done = before + task.work
    progress("done", 1.0)


def _text_tasks(
    engine: Engine,
    study: Study,
    data: str | None,
    layers: set[int],
    numbers: dict[str, dict[str, Any]],
    result: dict[str, Any],
) -> list[Task]:
    """Get the text, then read its slow states, those of the velocity on the way."""
    base, options = study.base, study.options
    corpora: list[Corpus] = []
    velocity = Velocity(base.num_layers) if "velocity" in numbers else None

    def get(tick: Callable[[float], None]) -> None:
        if data is not None:
            corpus = file_corpus(
                data, engine.tokenizer, tokens=options.tokens, seed=options.seed,
                max_length=min(options.max_length, base.context_length),
            )  # fmt: skip
        else:
            corpus = own_corpus(engine, tokens=options.tokens, seed=options.seed, tick=tick)
        corpora.append(corpus)

    def read(tick: Callable[[float], None]) -> None:
        corpus = corpora[0]
        groups = [
            (cached, group)
            for cached, texts in ((study.train, corpus.train), (study.heldout, corpus.heldout))
            for group in grouped(texts, tokens=_BATCH_TOKENS)
        ]
        for cached, group in groups:
            visit = None
            if velocity is not None:
                assert engine.tokenizer is not None
                classes = _classes(group, engine, base.device)

                def visit(states: dict[int, Tensor], classes: Tensor = classes) -> None:
                    velocity.add(states, classes)

            batch = read_batch(base, group, layers=layers, visit=visit)
            if len(batch.choices):
                cached.batches.append(batch)
            tick(1 / len(groups))
        if velocity is not None:
            numbers["velocity"].update(velocity.numbers())
        result["text"] = {
            "source": corpus.source,
            "sha256": corpus.sha256,
            "fitted": _counts(corpus.train, study.train),
            "heldout": _counts(corpus.heldout, study.heldout),
            "split": "by prompt: no held-out text answers a prompt that was fitted on",
            "positions_used": "those whose next token is one of an answer's",
        }

    forward = 2.0 * options.tokens * sum(study.shape.layer_weights)
    writing = forward if data is None else 0.05 * forward
    return [
        Task("writing text" if data is None else "reading text", writing, get),
        Task("slow states", 1.5 * forward + 4 * study.judge_work(), read),
    ]


def _classes(texts: list[Text], engine: Engine, device: torch.device) -> Tensor:
    """Token classes `[B, n]`; padding and the first positions, which are outliers, are left out."""
    assert engine.tokenizer is not None
    width = max(len(text.ids) for text in texts)
    classes = torch.full((len(texts), width), PADDING)
    for row, text in enumerate(texts):
        classes[row, : len(text.ids)] = torch.tensor(token_classes(text, engine.tokenizer))
    classes[:, :FIRST_POSITION] = PADDING
    return classes.to(device)


def _counts(texts: list[Text], cached: CachedText) -> dict[str, int]:
    return {"texts": len(texts), "positions": cached.positions}


def write_analysis(numbers: dict[str, Any], folder: Path) -> list[str]:
    """Draw the figures of an analysis and write all files; whole ones only, the numbers last.

    Returns:
        The names of the files.

    Raises:
        MultirateError: the folder cannot be written.
    """
    from multirate.analyze.figures import draw

    figures = [name for name in FIGURES if name in numbers]
    names = [*(f"{name}{suffix}" for name in figures for suffix in SUFFIXES), NUMBERS_FILE]
    scratch: str | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.mkdtemp(prefix=".analysis-", dir=folder)
        for name in figures:
            for suffix, content in draw(name, numbers, SUFFIXES).items():
                Path(scratch, name + suffix).write_bytes(content)
        text = json.dumps(numbers, indent=2, ensure_ascii=False) + "\n"
        Path(scratch, NUMBERS_FILE).write_text(text, encoding="utf-8")
        for name in names:
            os.replace(Path(scratch, name), folder / name)
    except OSError as error:
        raise MultirateError(
            f"Cannot write to {folder}: {error.strerror or error}. Choose a folder that you may "
            f"write to."
        ) from error
    finally:  # also on Ctrl-C
        if scratch is not None:
            with contextlib.suppress(OSError):
                shutil.rmtree(scratch)
    return names
