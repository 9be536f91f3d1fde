"""The training log: one JSON object a line, without gaps or repeats across interruptions."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class TrainingLog:
    """Appends records to a file.

    Args:
        path: the file; its folder is made.
        keep: bytes of an existing file that stay; what follows was written after the checkpoint that
            a run resumes from, and will be written again.
    """

    def __init__(self, path: Path, keep: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab")  # noqa: SIM115, open as long as the training
        self._file.truncate(keep)

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()

    def sync(self) -> int:
        """Make everything written so far survive a crash; bytes of the file."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()
