"""Where a number came from: machine, software, code and command, to be kept beside it.

It names nobody: no host, no user, and no path but its last part.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch

_SECONDS = 10  # git on a slow disk


def provenance(
    *, device: torch.device, dtype: torch.dtype, command: Sequence[str] | None = None
) -> dict[str, Any]:
    """What must be known to repeat a measurement; JSON-ready.

    Args:
        device: where the model is.
        dtype: of its weights.
        command: the command line; by default this process's own, as `multirate ...`.
    """
    arguments = ["multirate", *sys.argv[1:]] if command is None else list(command)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(without_folders(argument) for argument in arguments),
        "machine": {
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "usable_cores": _usable_cores(),
            "memory_gib": _memory_gib(),
            "vector_instructions": torch.backends.cpu.get_cpu_capability(),
            "device": _device_name(device),
        },
        "os": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "multirate": version("multirate"),
        "git": git_state(Path(__file__).parents[1]),
        "torch_threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
    }


def without_folders(argument: str) -> str:
    """A command-line argument whose path, if it leads out of the current folder, is cut to its name."""
    option, equals, value = argument.rpartition("=")
    for flavour in (PurePosixPath, PureWindowsPath):
        path = flavour(value)
        if path.is_absolute() or ".." in path.parts or value.startswith("~"):
            return f"{option}{equals}{path.name or '.'}"
    return argument


def cpu_model() -> str:
    """The processor's name as the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    return value.strip()
    except OSError:
        pass  # not Linux
    name = _output(["sysctl", "-n", "machdep.cpu.brand_string"])
    return name or platform.processor() or platform.machine()


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the checkout that a package's folder belongs to, and whether its files differ from it.

    None where the folder is not part of a checkout, such as an installed package, even if its
    environment lies within somebody's repository.
    """
    git = ["git", "-C", str(folder)]
    if _output([*git, "ls-files", "--error-unmatch", "__init__.py"]) is None:
        return None
    commit = _output([*git, "rev-parse", "HEAD"])
    changes = _output([*git, "status", "--porcelain", "--", "."])
    if commit is None or changes is None:
        return None
    return {"commit": commit, "dirty": bool(changes)}


def _output(command: list[str]) -> str | None:
    """A command's output; None if it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _usable_cores() -> int | None:
    """Cores that this process may use, which in a container are fewer than the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _memory_gib() -> float | None:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return None
    return round(size / 2**30, 1)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
