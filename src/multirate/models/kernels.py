"""C++ operators: whether they can be built here; building and loading them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from multirate.config.errors import MultirateError
from multirate.models.cache import load_once_built

_FIX = "Install g++ 10 or newer, or name a C++ compiler that works in the variable CXX."
_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-shared", "-fopenmp")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_VNNI = (*_AVX512, "-mavx512vnni")


def find_compiler() -> str | None:
    """The C++ compiler: what `CXX` names, else g++."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "g++"))), None)


def has_compiler() -> bool:
    return find_compiler() is not None


def has_kernel(load: Callable[[], None], otherwise: str) -> bool:
    """Whether operators of ours can be used on this machine; builds and loads them if so.

    Args:
        load: loads them, from the cache even without a compiler; raises a MultirateError where they
            cannot be built. A warning tells why, unless there is just no compiler.
        otherwise: what happens then, for the warning.
    """
    if not torch.cpu._is_avx2_supported():
        return False
    try:
        load()
    except MultirateError as error:
        if has_compiler():
            warnings.warn(f"{otherwise}: {error}", stacklevel=3)
        return False
    return True


def require_compiler(what: str) -> str:
    """A C++ compiler that works, to build something: "the kernel for ...".

    Raises:
        MultirateError: there is none.
    """
    compiler = find_compiler()
    if compiler is None:
        raise MultirateError(
            f"A C++ compiler is needed once, to build {what}, and there is no g++. Install it (Debian: "
            f"apt install g++), or name one in CXX."
        )
    with tempfile.TemporaryDirectory() as folder:
        empty, output = Path(folder) / "empty.cpp", Path(folder) / "empty.so"
        empty.touch()
        _compile(compiler, (*_FLAGS, str(empty), "-o", str(output)), what)
    return compiler


def load_library(source: Path, what: str) -> None:
    """Load the operators of a C++ source on an x86 CPU with AVX2, building them if no earlier run has.

    They are built for AVX-512 where torch uses that itself, with VNNI where the CPU has it, else for
    AVX2 (ATEN_CPU_CAPABILITY=avx2 asks for that). The library's name stands for the source, the headers
    beside it, the flags and torch's version.

    Args:
        source: the C++ file.
        what: what it is, for messages: "the kernel for ...".

    Raises:
        MultirateError: no compiler, it fails, or the cache cannot be written.
    """
    flags = (*_FLAGS, *vector_flags())
    key = hashlib.sha256(source.read_bytes())
    for header in sorted(source.parent.glob("*.h")):
        key.update(header.read_bytes())
    key.update(repr((flags, torch.__version__, sys.platform)).encode())
    try:
        load_once_built(
            f"{source.stem}-{key.hexdigest()[:16]}.so",
            lambda path: _build(source, what, flags, path),
            torch.ops.load_library,
        )
    except OSError as error:
        raise MultirateError(
            f"Could not build or load {what}: {error}. Point MULTIRATE_CACHE to a writable folder."
        ) from None


def vector_flags() -> tuple[str, ...]:
    """Compiler flags for the vectors of this CPU."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return _AVX2
    return _VNNI if torch.cpu._is_vnni_supported() else _AVX512


def _build(source: Path, what: str, flags: tuple[str, ...], path: Path) -> None:
    compiler = require_compiler(what)
    print(f"multirate: building {what} (once; under a minute)", file=sys.stderr, flush=True)
    folder = Path(torch.__file__).parent
    arguments = (
        *flags, f"-isystem{folder / 'include'}", str(source),
        "-o", str(path), f"-L{folder / 'lib'}", "-lc10", "-ltorch_cpu",
    )  # fmt: skip
    _compile(compiler, arguments, what)


def _compile(compiler: str, arguments: Sequence[str], what: str) -> None:
    """Run the compiler.

    Raises:
        MultirateError: it fails, or cannot be run.
    """
    try:
        run = subprocess.run([compiler, *arguments], capture_output=True, text=True)
    except OSError as error:  # no program at all
        raise MultirateError(f"{compiler} cannot be run: {error.strerror}. {_FIX}") from None
    if run.returncode != 0:
        said = [line.strip() for line in run.stderr.splitlines() if line.strip()]
        errors = (
            [line for line in said if "error" in line] or said or [f"exit code {run.returncode}"]
        )
        raise MultirateError(f"{compiler} could not build {what}: {errors[0].rstrip('.')}. {_FIX}")
