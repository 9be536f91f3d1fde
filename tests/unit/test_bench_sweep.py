"""`multirate bench sweep`: each setting on its own, and what is too slow."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benching import make_engine, write

from multirate.bench.methods import METHODS
from multirate.bench.registry import Batch, Entry, Method, Output
from multirate.bench.sweep import Setting, settings
from multirate.cli.main import main
from multirate.decode.engine import Engine


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Run `multirate bench sweep tiny ...` on the tiny engine; the exit code."""
    engine = make_engine()
    monkeypatch.setattr("multirate.load", lambda *_, **__: engine)
    monkeypatch.setattr("multirate.bench.prompts.context_text", lambda: "abcdefgh" * 10)
    prompts = write(tmp_path, *({"prompt": text} for text in ("AB", "CDE", "FG")))

    def call(*arguments: str) -> int:
        command = ["multirate", "bench", "sweep", "tiny", "--prompts", str(prompts),
                   "--accelerator", "fast", "--max-new-tokens", "4", *arguments]  # fmt: skip
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0)

    return call


def test_each_value_is_a_setting_of_its_own() -> None:
    assert settings([1, 4], [256], [0.0, 1.0]) == [
        Setting(), Setting(batch=4), Setting(context=256), Setting(temperature=1.0),
    ]  # fmt: skip
    assert str(Setting(4, 256, 1.0)) == "batch 4, context 256, temperature 1"
    assert settings([], [], []) == []


def test_every_setting_is_measured(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "r.json"
    assert run("--batches", "1,2", "--contexts", "30", "--temperatures", "0, 1", "--json",
               "--output", str(output)) == 0  # fmt: skip
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert json.loads(output.read_text()) == data
    found = [(s["batch"], s["context"], s["temperature"]) for s in data["settings"]]
    assert found == [(1, None, 0.0), (2, None, 0.0), (1, 30, 0.0), (1, None, 1.0)]
    assert [s["report"]["provenance"]["decoding"] for s in data["settings"]] == [
        "greedy, one prompt at a time", "greedy, batches of 2",
        "greedy, one prompt at a time, prompts of 30 tokens",
        "temperature 1, seed 1, one prompt at a time",
    ]  # fmt: skip
    assert all(list(s["report"]["methods"]) == ["plain", "multirate"] for s in data["settings"])
    assert "batch 2, temperature 0" in err


def test_too_slow_is_an_exit_status(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(engine: Engine, settings: Any) -> Method:
        plain = METHODS["plain"].make(engine, settings)

        def run(batch: Batch, new: int) -> list[Output]:
            time.sleep(0 if settings.batch == 1 else 3)
            return plain.run(batch, new)

        return Method(run)

    monkeypatch.setitem(METHODS, "slow", Entry(slow))
    extra = ("--methods", "plain,slow", "--batches", "1,3", "--contexts", "", "--temperatures", "")
    assert run(*extra, "--least", "0.1") == 1
    err = capsys.readouterr().err
    (line,) = [line for line in err.splitlines() if line.startswith("below")]
    assert line.startswith("below 0.1x plain decoding: batch 3, temperature 0: slow 0.")
    assert run(*extra, "--least", "0.0001") == 0
    assert run(*extra) == 0


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--batches", "1,x"], "--batches '1,x' is not allowed; give numbers"),
        (["--contexts", "2.5"], "--contexts '2.5' is not allowed"),
        (["--batches", "0"], "batch=0 is not allowed"),
        (["--temperatures", "-1"], "temperature=-1.0 is not allowed"),
        (["--batches", "", "--contexts", "", "--temperatures", ""], "No setting was named"),
        (["--methods", "multirate"], "add 'plain' to --methods"),
        (["--methods", "plain,transformers-lookup"], "one prompt at a time"),
    ],
)
def test_mistakes_are_told_before_a_model_is_loaded(
    run: Callable[..., int],
    extra: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("multirate.load", lambda *_, **__: pytest.fail("a model was loaded"))
    assert run(*extra) == 2
    assert message in capsys.readouterr().err
