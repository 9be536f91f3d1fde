"""What is built once: whole or not there at all, and built again when it was damaged."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from multirate.config.errors import MultirateError
from multirate.models.ahead import can_compile
from multirate.models.base import BaseModel
from multirate.models.cache import UNUSED_DAYS, is_whole, load_once_built, save_whole
from multirate.models.kernels import require_compiler

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="it names g++")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MULTIRATE_CACHE", str(tmp_path))
    return tmp_path / "kernels"


def whole(file: Path) -> str:
    text = file.read_text()
    if text != "whole":
        raise RuntimeError(f"damaged: {text!r}")
    return text


@pytest.mark.parametrize("damage", ["", "who", "hwole", "wholewhole"])
def test_a_damaged_file_is_built_again_and_never_loaded(
    folder: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    built = []

    def build(file: Path) -> None:
        built.append(file)
        file.write_text("whole")

    for _ in range(2):
        assert load_once_built("thing", build, whole) == "whole"
    assert len(built) == 1
    assert capsys.readouterr().err == ""
    (folder / "thing").write_text(damage)

    def crashes_on_damage(file: Path) -> str:  # as a loader of half a library does
        assert file.read_text() == "whole"
        return whole(file)

    assert load_once_built("thing", build, crashes_on_damage) == "whole"
    assert len(built) == 2
    assert capsys.readouterr().err == (
        "multirate: thing in the cache is damaged or incomplete; making it again\n"
    )


@pytest.mark.parametrize("text", [None, "", "5 00000000\n", "\xff"])
def test_a_file_without_its_own_sum_is_built_again(folder: Path, text: str | None) -> None:
    load_once_built("thing", whole_into, whole)
    sums = folder / "thing.crc32"
    assert sums.read_text() == "5 c459294f\n"
    sums.unlink()
    if text is not None:
        sums.write_text(text)
    assert not is_whole(folder / "thing")
    load_once_built("thing", whole_into, whole)
    assert is_whole(folder / "thing")


def test_whoever_builds_removes_what_nobody_uses(folder: Path) -> None:
    for name in ("used", "unused", "killed/half", "built/half"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("whole")
    for name in ("used", "unused"):
        save_whole(folder / name, whole_into)
    (folder / "old.lock").touch()
    long_ago = time.time() - (UNUSED_DAYS + 1) * 24 * 3600
    for path in folder.iterdir():
        if path.name != "built":
            os.utime(path, (long_ago, long_ago))
    load_once_built("used", whole_into, whole)  # which builds nothing
    assert (folder / "unused").exists()
    load_once_built("new", whole_into, whole)
    kept = {path.name for path in folder.iterdir() if path.suffix != ".lock"}
    assert kept == {"used", "used.crc32", "new", "new.crc32", "built"}
    assert (folder / "old.lock").exists()


def test_what_never_loads_is_built_twice_and_no_more() -> None:  # whole, and yet
    built = []

    def build(file: Path) -> None:
        built.append(file)
        file.write_text("no")

    with pytest.raises(RuntimeError, match="damaged: 'no'"):
        load_once_built("thing", build, whole)
    assert len(built) == 2


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_build_that_ends_early_leaves_nothing(folder: Path, error: type) -> None:
    def build(file: Path) -> None:
        file.write_text("who")
        raise error

    with pytest.raises(error):
        load_once_built("thing", build, whole)
    assert [file.name for file in folder.iterdir() if file.suffix != ".lock"] == []
    assert load_once_built("thing", whole_into, whole) == "whole"


def whole_into(file: Path) -> None:
    file.write_text("whole")


@needs_compiler
def test_half_of_a_library_is_built_again(folder: Path, tmp_path: Path) -> None:
    """In processes of their own: loading it ends the process."""
    source = tmp_path / "answer.cpp"
    source.write_text('char room[1 << 20] = {1}; extern "C" int answer() { return 42 * room[0]; }')
    command = (
        "import ctypes, sys; from pathlib import Path\n"
        "from multirate.models.kernels import load_library\n"
        "load_library(Path(sys.argv[1]), 'the answer')\n"
        "(library,) = Path(sys.argv[2]).glob('*.so')\n"
        "print(ctypes.CDLL(str(library)).answer())"
    )
    said = []
    for _ in range(2):
        arguments = [sys.executable, "-c", command, str(source), str(folder)]
        run = subprocess.run(arguments, capture_output=True, text=True)
        assert (run.returncode, run.stdout) == (0, "42\n")
        said.append(run.stderr)
        (library,) = folder.glob("*.so")
        with library.open("rb+") as file:
            file.truncate(library.stat().st_size // 2)
    assert "damaged" not in said[0] and said[1].count("damaged or incomplete") == 1


@needs_compiler
def test_a_compiler_is_tried_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert require_compiler("a test") == shutil.which("g++")
    refuses, no_program = tmp_path / "refuses", tmp_path / "no_program"
    refuses.write_text("#!/bin/sh\nexit 1\n")
    no_program.write_text("")
    for file, reason in ((refuses, "could not build a test: exit code 1"), (no_program, "run")):
        file.chmod(0o755)
        monkeypatch.setenv("CXX", str(file))
        with pytest.raises(MultirateError, match=rf"{file}.* {reason}.*Install g\+\+ 10.* CXX\."):
            require_compiler("a test")
    base = BaseModel(tiny_model("llama", num_hidden_layers=1))
    base.compile("layers")
    with pytest.warns(UserWarning, match=r"run eagerly: .*no_program cannot be run.*Install g\+\+"):
        base.warm_up(1)


@needs_compiler
def test_compiled_layers_that_do_not_load_are_compiled_again_by_the_compiler_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compilers = []

    def half(program: object, package_path: str, inductor_configs: dict[str, Any]) -> None:
        compilers.append(inductor_configs["cpp.cxx"])
        Path(package_path).write_bytes(b"PK half of a library")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", half)
    monkeypatch.setenv("CXX", "/nowhere/g++")
    base = BaseModel(tiny_model("llama", num_hidden_layers=1))
    base.compile("layers")
    with pytest.warns(UserWarning, match="layers run eagerly"):
        base.warm_up(1)
    assert compilers == [(None, shutil.which("g++"))] * 2


def test_what_was_compiled_is_used_where_there_is_no_compiler(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert not can_compile()
    load_once_built("layers-0.pt2", whole_into, whole)
    assert can_compile()
