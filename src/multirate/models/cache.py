"""Where what is made once on a machine is kept: converted models, kernels, compiled layers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

T = TypeVar("T")


def cache_root() -> Path:
    """The cache's folder; `MULTIRATE_CACHE` moves it."""
    return Path(os.environ.get("MULTIRATE_CACHE") or "~/.cache/multirate").expanduser()


def build_once(name: str, build: Callable[[Path], None]) -> Path:
    """A file of the cache's `kernels` folder, built now unless it is there.

    It appears whole or not at all. Of several processes that want it one builds it, the others wait.

    Args:
        name: of the file; it must stand for everything that the file is made from.
        build: writes the file to the path that it is given.

    Raises:
        OSError: the folder cannot be written.
    """
    file = cache_root() / "kernels" / name
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_suffix(".lock")):
            if not file.is_file():
                with tempfile.TemporaryDirectory(dir=file.parent) as folder:
                    build(Path(folder) / name)
                    _save(Path(folder) / name)
                    os.replace(Path(folder) / name, file)
    return file


def load_once_built(name: str, build: Callable[[Path], None], load: Callable[[Path], T]) -> T:
    """What `load` makes of a file of the cache's `kernels` folder; see `build_once`.

    A file that does not load was damaged since: it is built once more.

    Raises:
        OSError: the folder cannot be written.
    """
    file = build_once(name, build)
    try:
        return load(file)
    except (OSError, RuntimeError):
        file.unlink(missing_ok=True)
        return load(build_once(name, build))


def _save(file: Path) -> None:
    """Have a file on the disk before its name is: half of a library is not refused but crashes."""
    with file.open("rb+") as open_file:
        os.fsync(open_file.fileno())
