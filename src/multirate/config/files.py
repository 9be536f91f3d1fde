"""Whether results can be written, found out before the work for them is done."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from multirate.config.errors import MultirateError


def require_writable(folder: Path, *, for_: Path | None = None) -> None:
    """Check that files can be made in a folder, or that the folder itself can be made.

    It is tried where something exists, and nothing is left there.

    Args:
        folder: where to write.
        for_: what is to be written there, for the message; None for the folder itself.

    Raises:
        MultirateError: nothing can be written there.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".multirate-", dir=there))
    except OSError as error:
        where = "" if there == folder else f" in {there}"
        raise MultirateError(
            f"Cannot write to {for_ or folder}: {error.strerror or error}{where}. Choose a folder that "
            f"you may write to."
        ) from None
