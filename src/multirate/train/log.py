"""The training log: one JSON object a line, without gaps or repeats across interruptions."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from multirate.config.errors import MultirateError


class TrainingLog:
    """Appends records to a file.

    Args:
        path: the file; its folder is made.
        keep: bytes of an existing file that stay; what follows was written after the checkpoint that
            a run resumes from, and will be written again.

    Raises:
        MultirateError: it cannot be written, now or later.
    """

    def __init__(self, path: Path, keep: int = 0) -> None:
        self.path = path
        with self._writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "ab")  # noqa: SIM115, open as long as the training
            self._file.truncate(keep)

    def write(self, record: dict[str, Any]) -> None:
        with self._writing():
            self._file.write(json.dumps(record).encode() + b"\n")
            self._file.flush()

    def sync(self) -> int:
        """Make everything written so far survive a crash; bytes of the file."""
        with self._writing():
            self._file.flush()
            os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        with suppress(OSError):  # what a full disk kept back was an error before
            self._file.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise MultirateError(
                f"Cannot write the log {self.path}: {error.strerror or error}. Make room there; the "
                f"last checkpoint is kept, and --resume continues from it."
            ) from None
