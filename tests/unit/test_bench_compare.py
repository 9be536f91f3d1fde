"""`multirate bench compare`: ratios of two reports, and what must be alike for them to mean anything."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from multirate.bench.reports import compare_reports, read_report
from multirate.cli.main import main
from multirate.config.errors import MultirateError


def report(**methods: tuple[float, float | None]) -> dict[str, Any]:
    """As much of a report as is read: tokens/s and speed-up of each method."""
    return {
        "provenance": {
            "machine": {"cpu": "Abacus 9", "usable_cores": 2, "device": "cpu"},
            "torch_threads": 2,
            "dtype": "bfloat16",
            "model": "tiny",
            "decoding": "greedy",
            "prompt_set": {"name": "mt_bench", "sha256": "ab" * 32},
        },
        "prompts": 4,
        "new_tokens": 12,
        "methods": {
            name: {"tokens_per_second": {"median": speed}, "speedup_vs_plain": speedup}
            for name, (speed, speedup) in methods.items()
        },
    }


def test_ratios_are_the_second_over_the_first() -> None:
    a = report(plain=(20.0, 1.0), multirate=(30.0, 1.5), medusa=(1.0, 0.1))
    b = report(multirate=(75.0, None), plain=(25.0, 1.0), eagle=(1.0, 0.1))
    found = compare_reports(a, b).to_dict()
    assert list(found["methods"]) == ["plain", "multirate"]
    assert found["methods"]["plain"] == {
        "tokens_per_second": {"a": 20.0, "b": 25.0, "ratio": 1.25},
        "speedup_vs_plain": {"a": 1.0, "b": 1.0, "ratio": 1.0},
    }
    assert found["methods"]["multirate"] == {
        "tokens_per_second": {"a": 30.0, "b": 75.0, "ratio": 2.5},
        "speedup_vs_plain": {"a": 1.5, "b": None, "ratio": None},
    }
    assert (found["only_a"], found["only_b"]) == (["medusa"], ["eagle"])
    assert found["warnings"] == []


@pytest.mark.parametrize(
    ("place", "value", "warning"),
    [
        ("provenance.machine.cpu", "Soroban", "machine differs: Abacus 9, 2, cpu, 2 against Soroban,"),
        ("provenance.machine.usable_cores", 8, "machine differs: .* against Abacus 9, 8, cpu, 2"),
        ("provenance.torch_threads", 1, "machine differs: .* against Abacus 9, 2, cpu, 1"),
        ("provenance.dtype", "float32", "dtype differs: bfloat16 against float32"),
        ("provenance.model", "other", "model differs: tiny against other"),
        ("provenance.decoding", "temperature 1", "decoding differs: greedy against temperature 1"),
        ("provenance.prompt_set.sha256", "c" * 64,
         "prompt set differs: mt_bench, abababababab against mt_bench, cccccccccccc"),
        ("prompts", 5, "number of prompts differs: 4 against 5"),
        ("new_tokens", 9, "new tokens differs: 12 against 9"),
    ],
)  # fmt: skip
def test_what_differs_is_told(place: str, value: Any, warning: str) -> None:
    a = report(plain=(20.0, 1.0))
    b = copy.deepcopy(a)
    *path, last = place.split(".")
    part = b
    for key in path:
        part = part[key]
    part[last] = value
    (found,) = compare_reports(a, b).warnings
    assert re.match(warning, found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON file"),
        ("[]", "is no bench report: it has no 'provenance'"),
        ('{"provenance": {}}', "is no bench report: it has no 'methods'"),
        ('{"provenance": {}, "methods": {"plain": 3}}', "'plain' has no speeds"),
        ('{"provenance": {}, "methods": {"x": {"tokens_per_second": {"median": 1}, '
         '"speedup_vs_plain": "2x"}}}', "'x' has no speeds"),
    ],
)  # fmt: skip
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "r.json"
    file.write_text(text)
    with pytest.raises(MultirateError, match=message):
        read_report(file)
    with pytest.raises(MultirateError, match=r"Cannot read .*nosuch.json"):
        read_report(tmp_path / "nosuch.json")
    with pytest.raises(MultirateError, match=r"no method in common: a in the first, b in"):
        compare_reports(report(a=(1.0, None)), report(b=(1.0, None)))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run `multirate bench compare` on two reports; the exit code."""

    def call(a: dict[str, Any], b: dict[str, Any], *arguments: str) -> int:
        files = [tmp_path / "a.json", tmp_path / "b.json"]
        for file, data in zip(files, (a, b), strict=True):
            file.write_text(json.dumps(data))
        command = ["multirate", "bench", "compare", *map(str, files), *arguments]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0)

    return call


def test_the_command(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = report(plain=(20.0, 1.0), x=(9.0, 0.5)), report(plain=(25.0, 1.0))
    b["new_tokens"] = 9
    assert run(a, b) == 0
    out, err = capsys.readouterr()
    row = "plain 20.0 25.0 1.25x 1.00x 1.00x 1.00x"
    assert row in [" ".join(line.split()) for line in out.splitlines()]
    assert "A: a.json, B: b.json" in out and "only in A: x" in out
    assert err == "warning: new tokens differs: 12 against 9\n"
    assert run(a, b, "--json") == 0
    assert (
        json.loads(capsys.readouterr().out)["methods"]["plain"]["tokens_per_second"]["ratio"]
        == 1.25
    )
    assert run(a, {"methods": {}}) == 2
    out, err = capsys.readouterr()
    assert out == "" and "b.json is no bench report" in err and "Traceback" not in err
