"""The README's three commands on the embedded model: text, training, benchmark."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from multirate.cli.main import main
from multirate.models.embedded import EMBEDDED_NAME

pytestmark = pytest.mark.real


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    """Run the command in this process, which must succeed."""
    monkeypatch.setattr(sys, "argv", ["multirate", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code


def test_three_commands_make_an_accelerator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, accelerator = tmp_path / "text.jsonl", tmp_path / "accelerator"
    run(
        monkeypatch, "synth", EMBEDDED_NAME, text, "--prompts", "mt_bench", "--tokens", 150,
        "--max-answer-tokens", 20, "--max-prompt-tokens", 40, "--batch-rows", 8,
        "--dtype", "float32", "--device", "cpu",
    )  # fmt: skip
    rows = [json.loads(line) for line in text.read_text(encoding="utf-8").splitlines()]
    assert sum(row["tokens"] for row in rows) >= 150
    assert all(row["messages"][-1]["content"].strip() for row in rows)

    run(
        monkeypatch, "train", EMBEDDED_NAME, "--data", text, "--output", accelerator,
        "--gates", "29,30", "--carry-layers", "30", "--draft-vocab-size", 512, "--rank", 4,
        "--heldout-rows", 1, "--batch-tokens", 256, "--closed-form-tokens", 200,
        "--draft-steps", 2, "--dtype", "float32", "--device", "cpu",
    )  # fmt: skip
    capsys.readouterr()

    run(
        monkeypatch, "bench", "speculative", EMBEDDED_NAME, "--accelerator", accelerator,
        "--prompts", "mt_bench", "--limit", 1, "--max-new-tokens", 12,
        "--methods", "plain,multirate", "--num-draft-tokens", 2,
        "--dtype", "float32", "--device", "cpu", "--json",
    )  # fmt: skip
    found = json.loads(capsys.readouterr().out)["methods"]
    assert found["multirate"]["identical"] == 1
    assert found["multirate"]["mean_acceptance_length"] >= 1
