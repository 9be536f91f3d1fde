"""For all unit tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def not_compiled_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands' default, `--compile auto`, would compile every tiny model."""
    monkeypatch.setattr("multirate.models.compiled.can_compile", lambda: False)


@pytest.fixture
def failing_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A C++ compiler that fails, and an empty cache in `tmp_path`."""
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: too old' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("MULTIRATE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
