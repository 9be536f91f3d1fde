"""Accelerators that ship with multirate, found by the name of their base model.

They are ordinary accelerator folders inside the package. `DEFAULT` in place of a folder or hub id
names the one of the base model that is loaded; a folder of that name is reached as `./default`.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from multirate.config.errors import MultirateError

DEFAULT = "default"


def shipped_accelerators() -> dict[str, Path]:
    """Base model's name to accelerator folder, for every accelerator that ships, by name."""
    folder = Path(str(files("multirate"))) / "accelerators"
    if not folder.is_dir():
        return {}
    # A name with a dot is a folder that is being written.
    found = (path for path in sorted(folder.iterdir()) if path.is_dir())
    return {path.name: path for path in found if not path.name.startswith((".", "_"))}


def default_accelerator(model: str) -> Path | None:
    """The folder of the accelerator that ships for a base model; None if none does."""
    return shipped_accelerators().get(model)


def require_default(model: str) -> Path:
    """The folder of the accelerator that ships for a base model.

    Raises:
        MultirateError: none ships for it; the message lists those that do.
    """
    folder = default_accelerator(model)
    if folder is None:
        names = ", ".join(shipped_accelerators()) or "none"
        raise MultirateError(
            f"No accelerator ships for {model or 'a model without a name'}. Models that one ships "
            f"for: {names}. Give an accelerator's folder or hub id, or make one with `multirate train`."
        )
    return folder
