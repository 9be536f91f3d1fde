"""Where what is made once on a machine is kept: converted models, kernels, compiled layers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


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
                    os.replace(Path(folder) / name, file)
    return file
