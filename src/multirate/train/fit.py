"""Make an accelerator for a base model from text: closed-form start, then a short training.

One call from text rows to a saved folder. The folder is saved after the closed-form start and again
while training goes on, whole each time, so a stop at any moment leaves a working accelerator.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multirate.config.errors import MultirateError
from multirate.models.base import BaseModel
from multirate.streams.accelerator import Accelerator
from multirate.streams.fit import fit_closed_form
from multirate.streams.folder import require_free, require_writable, save_accelerator
from multirate.train.data import Row, batches
from multirate.train.distill import (
    TrainingBatch,
    TrainingOptions,
    mean_acceptance_length,
    measure_acceptance,
    train,
)

ACCEPTANCE_STEPS = 4  # draft positions whose held-out acceptance is measured


@dataclass(frozen=True)
class FitOptions:
    """How much text is used for what.

    Raises:
        MultirateError: a value outside its range.
    """

    epochs: float = field(default=1.0, metadata={"help": "passes over the text; 0 = no training"})
    batch_tokens: int = field(default=2048, metadata={"help": "positions in a training batch"})
    closed_form_tokens: int = field(
        default=60_000, metadata={"help": "positions that the closed-form start reads"}
    )
    heldout_rows: int = field(default=48, metadata={"help": "texts kept back for acceptance"})
    save_seconds: float = field(default=300, metadata={"help": "seconds between saves"})
    seed: int = field(default=0, metadata={"help": "order of the text and adapters' start"})

    def __post_init__(self) -> None:
        if not 0 <= self.epochs <= 1000:
            raise MultirateError(f"epochs={self.epochs} must be from 0 to 1000.")
        for name in ("batch_tokens", "closed_form_tokens"):
            if getattr(self, name) < 64:
                raise MultirateError(f"{name}={getattr(self, name)} must be at least 64.")
        if self.heldout_rows < 1:
            raise MultirateError(f"heldout_rows={self.heldout_rows} must be at least 1.")


def frequent_tokens(rows: Sequence[Row], *, size: int, vocab_size: int) -> Tensor:
    """The `size` most frequent token ids of a text, `[size]`; then the lowest unused ids.

    Answers only are counted, since drafts are tokens of answers.
    """
    counts = Counter(token for row in rows for token in row.ids[row.answer_start :])
    ids = [token for token, _ in counts.most_common(size)]
    used = set(ids)
    unused = (i for i in range(vocab_size) if i not in used)
    return torch.tensor(ids + list(islice(unused, size - len(ids))))


def split_rows(rows: Sequence[Row], *, heldout: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Shuffle and split into at least `heldout` rows and the rest.

    Answers to one prompt stay together: a held-out answer whose twin was trained on measures nothing.
    """
    groups: dict[tuple[int, ...], list[Row]] = {}
    for index, row in enumerate(rows):
        prompt = tuple(row.ids[: row.answer_start]) or (index,)
        groups.setdefault(prompt, []).append(row)
    order = list(groups.values())
    random.Random(seed).shuffle(order)
    kept: list[Row] = []
    while len(kept) < heldout and order:
        kept += order.pop()
    rest = [row for group in order for row in group]
    return kept, rest


def fit_accelerator(
    base: BaseModel,
    rows: Sequence[Row],
    output: Path,
    *,
    preset: str = "carry",
    name: str = "",
    revision: str | None = None,
    options: FitOptions | None = None,
    training: TrainingOptions | None = None,
    command: str | None = None,
    overwrite: bool = False,
    report: Callable[[str, dict[str, Any]], None] = lambda event, values: None,
    **overrides: Any,
) -> Accelerator:
    """Fit, train and save an accelerator.

    Args:
        base: the frozen model; rows should be text that it wrote itself.
        rows: texts.
        output: folder to save to.
        preset: see `config.accelerator.preset_config`.
        name: the base model's name, for the saved config.
        revision: its revision.
        options: how much text is used for what.
        training: rates and weights.
        command: the command line that made it, for the model card.
        overwrite: replace an accelerator that is there.
        report: called with an event and its values: "closed_form" and "heldout" (acceptance),
            "step" (step, steps, losses) and "saved".
        overrides: fields of `AcceleratorConfig` that replace the preset's.

    Raises:
        MultirateError: too little text, a setting that is not allowed, a folder that cannot be
            written, or a loss that is not finite.
    """
    options, training = options or FitOptions(), training or TrainingOptions()
    target = output.expanduser().resolve()
    require_free(target, overwrite=overwrite)
    require_writable(target)
    if len(rows) <= options.heldout_rows:
        raise MultirateError(
            f"The data hold {len(rows)} texts, but {options.heldout_rows} are kept back to measure "
            f"acceptance. Give more text, or keep fewer back with --heldout-rows."
        )
    torch.manual_seed(options.seed)
    kept_back, rows = split_rows(rows, heldout=options.heldout_rows, seed=options.seed)
    heldout = list(batches(kept_back, tokens=options.batch_tokens))
    accelerator = Accelerator.from_preset(
        preset, base, **{"base_model_name_or_path": name, "revision": revision, **overrides}
    )
    config = accelerator.config
    if config.draft_vocab_size is not None:
        accelerator.set_draft_ids(
            frequent_tokens(rows, size=config.draft_vocab_size, vocab_size=base.vocab_size)
        )

    def measure(event: str) -> None:
        acceptance = measure_acceptance(accelerator, heldout, ACCEPTANCE_STEPS)
        accelerator.config = replace(config, expected_acceptance=acceptance)
        report(
            event,
            {"acceptance": acceptance, "length": mean_acceptance_length(acceptance)},
        )

    def save(*, replacing: bool) -> None:
        save_accelerator(accelerator, output, command=command, overwrite=replacing)
        report("saved", {"path": str(output)})

    used = fit_closed_form(
        accelerator,
        (
            (ids, lengths)
            for ids, lengths, _ in _enough(rows, options.closed_form_tokens, options.batch_tokens)
        ),
    )
    report("fitted", {"positions": used})
    measure("closed_form")
    save(replacing=overwrite)
    schedule = _training_batches(rows, options)
    if schedule:
        last_save = time.monotonic()

        def on_step(step: int, parts: dict[str, float]) -> None:
            nonlocal last_save
            report("step", {"step": step, "steps": len(schedule), **parts})
            if time.monotonic() - last_save > options.save_seconds and step < len(schedule):
                measure("heldout")
                save(replacing=True)
                last_save = time.monotonic()

        train(accelerator, schedule, training, on_step=on_step)
        measure("heldout")
        save(replacing=True)
    return accelerator


def _enough(rows: Sequence[Row], tokens: int, batch_tokens: int) -> list[TrainingBatch]:
    """Batches of the first rows that hold about `tokens` positions."""
    chosen, count = [], 0
    for row in rows:
        if count >= tokens:
            break
        chosen.append(row)
        count += len(row.ids)
    return list(batches(chosen, tokens=batch_tokens))


def _training_batches(rows: Sequence[Row], options: FitOptions) -> list[TrainingBatch]:
    result: list[TrainingBatch] = []
    whole, part = divmod(options.epochs, 1)
    for epoch in range(int(whole) + (part > 0)):
        share = 1.0 if epoch < whole else part
        epoch_batches = list(batches(rows, tokens=options.batch_tokens, seed=options.seed + epoch))
        result += epoch_batches[: max(1, round(share * len(epoch_batches)))]
    return result
