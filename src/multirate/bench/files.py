"""Result files: there whole or not at all, and refused before the measuring rather than after."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import uuid
from pathlib import Path

from multirate.config.errors import MultirateError
from multirate.config.files import require_writable

FIGURE_SUFFIXES = (".png", ".svg", ".pdf")

_FIX = "Choose a file in a folder that you may write to."


def require_writable_file(path: Path) -> None:
    """Check that a file can be written, without writing anything.

    Raises:
        MultirateError: the path is a folder, or its folder cannot be made or written to.
    """
    if path.is_dir():
        raise MultirateError(f"{path} is a folder, not a file. {_FIX}")
    require_writable(path.parent)


def require_matplotlib() -> None:
    """Refuse before anything slow if figures cannot be drawn.

    Raises:
        MultirateError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MultirateError(
            "Figures need matplotlib, which is not installed. Install it with: "
            "pip install 'multirate[plots]'"
        )


def require_figure(path: Path) -> None:
    """Check that a figure can be drawn into a file.

    Raises:
        MultirateError: no format that is drawn, no matplotlib, or a path that cannot be written.
    """
    if path.suffix not in FIGURE_SUFFIXES:
        raise MultirateError(
            f"{path} has no ending of a figure that can be drawn. Give one of "
            f"{', '.join(FIGURE_SUFFIXES)}."
        )
    require_matplotlib()
    require_writable_file(path)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, text as UTF-8, replacing one that is there; its folders are made.

    Raises:
        MultirateError: it cannot be written; what was there before is there still.
    """
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(new, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError as error:
        raise MultirateError(f"Cannot write {path}: {error.strerror or error}. {_FIX}") from error
    finally:  # also on Ctrl-C
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
