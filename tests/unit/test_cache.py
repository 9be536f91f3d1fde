"""What is built once: whole or not there at all, and built again when it was damaged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from multirate.models.base import BaseModel
from multirate.models.cache import load_once_built

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


@pytest.mark.parametrize("damage", ["", "who"])
def test_a_damaged_file_is_built_again(folder: Path, damage: str) -> None:
    built = []

    def build(file: Path) -> None:
        built.append(file)
        file.write_text("whole")

    for _ in range(2):
        assert load_once_built("thing", build, whole) == "whole"
    assert len(built) == 1
    (folder / "thing").write_text(damage)
    assert load_once_built("thing", build, whole) == "whole"
    assert len(built) == 2


def test_what_never_loads_is_built_twice_and_no_more() -> None:
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
