"""Result files: there whole or not at all, and refused before the measuring rather than after."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

from multirate.config.errors import MultirateError

_FIX = "Choose a file in a folder that you may write to."


def require_writable(path: Path) -> None:
    """Check that a file can be written, without writing anything.

    Raises:
        MultirateError: the path is a folder, or its folder cannot be made or written to.
    """
    if path.is_dir():
        raise MultirateError(f"{path} is a folder, not a file. {_FIX}")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise MultirateError(f"{path} cannot be written: {folder} is no writable folder. {_FIX}")


def write_whole(path: Path, text: str) -> None:
    """Write a text file, replacing one that is there; its folders are made.

    Raises:
        MultirateError: it cannot be written; what was there before is there still.
    """
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(new, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError as error:
        raise MultirateError(f"Cannot write {path}: {error.strerror or error}. {_FIX}") from error
    finally:  # also on Ctrl-C
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
