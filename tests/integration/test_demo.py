"""The embedded model with the accelerator that ships: what a new user runs first."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

import multirate
from multirate.cli.main import main
from multirate.decode.engine import Engine
from multirate.models.embedded import EMBEDDED_NAME
from multirate.models.forms import choose_form
from multirate.streams.defaults import default_accelerator

pytestmark = pytest.mark.real

PROMPTS = (
    "Why is the sky blue?",
    "Write a Python function that reverses a list.",
    "List three differences between cats and dogs.",
    "Write a short story about a lighthouse keeper.",
)
NEW = 48


@pytest.fixture(scope="module")
def engine() -> Engine:
    return multirate.load(EMBEDDED_NAME, accelerator="default", dtype="float32", device="cpu")


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[str, str]:
    """Run the command in this process, which must succeed: stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["multirate", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    found = capsys.readouterr()
    assert not stop.value.code, found.err
    return found.out, found.err


def test_an_accelerator_ships_for_the_embedded_model(engine: Engine) -> None:
    folder = default_accelerator(EMBEDDED_NAME)
    assert folder is not None and engine.accelerator is not None
    config = engine.accelerator.config
    assert config.base_model_name_or_path == EMBEDDED_NAME
    assert config.expected_acceptance
    assert "multirate train" in (folder / "README.md").read_text()


def test_float32_outputs_are_those_of_plain_decoding(engine: Engine) -> None:
    options: dict[str, Any] = {"max_new_tokens": NEW}
    plain = engine.generate(list(PROMPTS), strategy="plain", **options)
    accepted, drafts = 0, 0
    for prompt, expected in zip(PROMPTS, plain, strict=True):
        for count in (1, 4):
            found = engine.generate(
                prompt, strategy="speculative", num_draft_tokens=count, **options
            )
            assert found.token_ids == expected.token_ids, (prompt, count)
        assert found.speculation is not None
        accepted += found.speculation.num_accepted_tokens
        drafts += found.speculation.num_drafts
    assert 1 + accepted / drafts > 1.5  # untrained it is 1.0


def test_generate_uses_it_by_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = run(
        monkeypatch, capsys, "generate", EMBEDDED_NAME, PROMPTS[0], "--max-new-tokens", str(NEW),
        "--num-draft-tokens", "3", "--json",
    )  # fmt: skip
    data = json.loads(out)
    # What is built once for a machine is told, nothing else.
    assert all(line.startswith("multirate: ") for line in err.splitlines())
    assert list(data) == [
        "text", "prompt_tokens", "new_tokens", "seconds", "tokens_per_second", "strategy", "dtype",
        "device", "finish_reason", "speculation",
    ]  # fmt: skip
    expected = choose_form(EMBEDDED_NAME, device="cpu").packing or "bfloat16"
    assert (data["strategy"], data["dtype"]) == ("speculative", expected)
    assert "sky" in data["text"]
    assert data["speculation"]["mean_acceptance_length"] > 1.2


def test_demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(monkeypatch, capsys, "demo", "--max-new-tokens", "24", "--json")
    data = json.loads(out)
    assert list(data) == [
        "model", "prompt", "runs", "plain", "accelerated", "speedup", "identical",
        "first_difference", "gap", "near_tie", "tolerance",
    ]  # fmt: skip
    assert (data["plain"]["strategy"], data["accelerated"]["strategy"]) == ("plain", "speculative")
    assert data["identical"] is (data["plain"]["text"] == data["accelerated"]["text"])
    assert data["identical"] or data["near_tie"]
    assert data["speedup"] == pytest.approx(
        data["accelerated"]["tokens_per_second"] / data["plain"]["tokens_per_second"]
    )
