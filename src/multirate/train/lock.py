"""One run at a time for what it writes to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from multirate.config.errors import MultirateError


@contextmanager
def exclusive(path: Path, *, output: Path) -> Iterator[None]:
    """Hold a lock file, which is there for so long, against a second run with the same output.

    The system frees it when the process ends, however that ends.

    Args:
        path: the lock file; its folder is made.
        output: what is guarded, for the message.

    Raises:
        MultirateError: another run holds it, or it cannot be made.
    """
    lock = FileLock(path, timeout=0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise MultirateError(
            f"Another run is writing {output} (it holds {path}). Wait for its end, or choose another "
            f"output."
        ) from None
    except OSError as error:
        raise MultirateError(
            f"Cannot make {path}, which guards {output}: {error.strerror or error}. Choose another "
            f"output."
        ) from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()
