"""A tiny training: model, text and options that take seconds. Shared by the tests of training."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tiny_models import VOCABULARY, tiny_model

from multirate.models.base import BaseModel
from multirate.streams.accelerator import Accelerator
from multirate.train.data import Row
from multirate.train.options import TrainingOptions
from multirate.train.trainer import train_accelerator

OPTIONS: dict[str, Any] = {
    "epochs": 2, "batch_tokens": 96, "closed_form_tokens": 300, "heldout_rows": 6,
    "learning_rate": 3e-3, "eval_steps": 5, "draft_steps": 3,
}  # fmt: skip
SHAPE: dict[str, Any] = {"rank": 4, "draft_vocab_size": 60}


def text_rows(seed: int = 0, count: int = 40, length: int = 24) -> list[Row]:
    """Random prompts and answers; a tenth of the rows are chats of two turns."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        n, start = rng.randint(length // 2, length), rng.randint(1, 5)
        spans = ((start, n),) if i % 10 else ((start, start + 3), (start + 5, n))
        ids = np.array([rng.randrange(3, VOCABULARY) for _ in range(n)], dtype=np.int32)
        rows.append(Row(ids, spans))
    return rows


def tiny_base(name: str = "llama", **changes: Any) -> BaseModel:
    model = tiny_model(name, **changes)
    model.requires_grad_(False)
    return BaseModel(model)


def tiny_training(
    output: Path,
    *,
    base: BaseModel | None = None,
    rows: list[Row] | None = None,
    report: Callable[[str, dict[str, Any]], None] = lambda event, values: None,
    resume: bool = False,
    preset: str = "carry",
    shape: dict[str, Any] = SHAPE,
    arguments: dict[str, Any] | None = None,
    **options: Any,
) -> Accelerator:
    return train_accelerator(
        base or tiny_base(),
        text_rows() if rows is None else rows,
        output,
        preset=preset,
        options=TrainingOptions(**{**OPTIONS, **options}),
        resume=resume,
        report=report,
        **shape,
        **(arguments or {}),
    )
