"""C++ operators: whether they can be built here."""

from __future__ import annotations

import os
import shutil


def find_compiler() -> str | None:
    """The C++ compiler: what `CXX` names, else g++."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "g++"))), None)


def has_compiler() -> bool:
    return find_compiler() is not None
