"""The state of an unfinished training, in one file that is there whole or not at all.

It lies beside the accelerator, in `OUTPUT.train/checkpoint.pt`, so the accelerator's folder holds
nothing but the accelerator. A finished training removes it; its log stays.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch

from multirate.config.errors import MultirateError

CHECKPOINT_FILE = "checkpoint.pt"
LOG_FILE = "train.jsonl"
LOCK_FILE = "lock"
# What `TrainingRun` puts into every checkpoint.
_KEYS = {"settings", "step", "bad", "best", "best_weights", "weights", "optimizer", "log_bytes"}


def training_folder(output: Path) -> Path:
    """Where the training of the accelerator at `output` keeps its checkpoint and log."""
    return output.parent / f"{output.name}.train"


def write_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint in `folder`; a crash leaves the old one or the new one.

    Args:
        folder: made if it is not there.
        state: tensors, numbers, texts and containers of them.

    Raises:
        MultirateError: the disk is full or not writable. The old checkpoint is there still.
    """
    new = folder / f"{CHECKPOINT_FILE}.new"  # one that a crash left is overwritten
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(new, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, folder / CHECKPOINT_FILE)
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)  # the rename itself
        finally:
            os.close(handle)
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError on a full disk
        new.unlink(missing_ok=True)
        raise MultirateError(
            f"Could not write a checkpoint in {folder}: {error}. Make room there; the last one is "
            f"kept, and --resume continues from it."
        ) from error


def read_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The checkpoint in `folder`, tensors on the CPU, or None if there is none.

    Raises:
        MultirateError: it cannot be read.
    """
    path = folder / CHECKPOINT_FILE
    if not path.is_file():
        return None
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not look at the checksums
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"{damaged} is damaged")
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or not state.keys() >= _KEYS:
            raise ValueError("it is no checkpoint of this version")
    except Exception as error:  # a damaged pickle may raise anything
        raise MultirateError(
            f"The checkpoint {path} cannot be read: {error}. Remove it to start from the beginning."
        ) from None
    return state


def remove_checkpoint(folder: Path) -> None:
    """Training is finished: its result is in the accelerator's folder."""
    for name in (CHECKPOINT_FILE, f"{CHECKPOINT_FILE}.new"):
        (folder / name).unlink(missing_ok=True)


def require_same(saved: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Check that a run continues what its checkpoint began.

    Raises:
        MultirateError: a setting differs; each is named with both values.
    """
    changed = [
        f"{name} (then {saved.get(name)}, now {now.get(name)})"
        for name in sorted(saved.keys() | now.keys())
        if saved.get(name) != now.get(name)
    ]
    if changed:
        raise MultirateError(
            f"The checkpoint in {folder} belongs to another training: {', '.join(changed)}. Resume with "
            f"the settings of then, or remove {folder / CHECKPOINT_FILE} to start from the beginning."
        )
