"""For all unit tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def not_compiled_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands' default, `--compile auto`, would compile every tiny model."""
    monkeypatch.setattr("multirate.models.compiled.has_compiler", lambda: False)
