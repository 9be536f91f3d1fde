"""Where what is made once on a machine is kept: converted models, packed weights, kernels, layers.

A file appears whole or not at all, and beside it, as `NAME.crc32`, its size and CRC-32. Both are checked
before it is used: half of a library is not refused by the loader but kills the process.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

T = TypeVar("T")

_CHUNK = 1 << 20

_DAY = 24 * 3600.0  # seconds
UNUSED_DAYS = (
    60  # after which a kernel or library is removed: every new version of ours leaves some
)


def cache_root() -> Path:
    """The cache's folder; `MULTIRATE_CACHE` moves it."""
    return Path(os.environ.get("MULTIRATE_CACHE") or "~/.cache/multirate").expanduser()


def build_once(name: str, build: Callable[[Path], None]) -> Path:
    """A file of the cache's `kernels` folder, built now unless it is there and whole.

    Of several processes that want it one builds it, the others wait. Whoever builds one removes those
    that nobody has used for long.

    Args:
        name: of the file; it must stand for everything that the file is made from.
        build: writes the file to the path that it is given.

    Raises:
        OSError: the folder cannot be written.
    """
    file = cache_root() / "kernels" / name
    if not is_whole(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_suffix(".lock")):
            if not is_whole(file):
                if file.exists():
                    note_damage(file)
                _tidy(file.parent)
                save_whole(file, build)
    with suppress(OSError):  # in use; a cache that is only read has no one who tidies it
        for path in (file, _sum_file(file)):
            os.utime(path)
    return file


def has_built(pattern: str) -> bool:
    """Whether the cache's `kernels` folder holds a file whose name fits a pattern."""
    return next((cache_root() / "kernels").glob(pattern), None) is not None


def _tidy(folder: Path) -> None:
    """Remove files that were not used for long, and folders of builds that were killed."""
    now = time.time()
    for path in list(folder.iterdir()):
        with suppress(OSError):  # another process was faster
            age = now - path.stat().st_mtime
            if path.is_dir() and age > _DAY:
                shutil.rmtree(path, ignore_errors=True)
            elif path.is_file() and path.suffix != ".lock" and age > UNUSED_DAYS * _DAY:
                path.unlink()


def load_once_built(name: str, build: Callable[[Path], None], load: Callable[[Path], T]) -> T:
    """What `load` makes of a file of the cache's `kernels` folder; see `build_once`.

    A file that is whole but does not load is built once more: what it was made for has changed.

    Raises:
        OSError: the folder cannot be written.
    """
    file = build_once(name, build)
    try:
        return load(file)
    except (OSError, RuntimeError):
        note_damage(file)
        file.unlink(missing_ok=True)
        return load(build_once(name, build))


def is_whole(file: Path) -> bool:
    """Whether a file is there and is what `save_whole` wrote."""
    try:
        return _sum_file(file).read_text(encoding="ascii") == _sum(file)
    except (OSError, ValueError):
        return False


def save_whole(file: Path, write: Callable[[Path], None]) -> None:
    """Have `write` make a file, and publish it with its sum. The folder must exist.

    Raises:
        OSError: the folder cannot be written.
    """
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        write(made)
        _sum_file(made).write_text(_sum(made), encoding="ascii")
        # The sum first: a file without its own sum is made again, so any order of events is safe.
        for own, target in ((_sum_file(made), _sum_file(file)), (made, file)):
            _sync(own)
            os.replace(own, target)


def _sum_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.crc32")


def _sum(file: Path) -> str:
    """A file's size and CRC-32: against damage, not against malice."""
    size, crc = 0, 0
    with file.open("rb") as handle:
        while chunk := handle.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return f"{size} {crc:08x}\n"


def note_damage(file: Path) -> None:
    """Tell the user that a file is made again, and why."""
    print(
        f"multirate: {file.name} in the cache is damaged or incomplete; making it again",
        file=sys.stderr,
        flush=True,
    )


def _sync(file: Path) -> None:
    """Have a file on the disk before its name is."""
    with file.open("rb+") as open_file:
        os.fsync(open_file.fileno())
