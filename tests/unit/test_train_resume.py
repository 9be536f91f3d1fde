"""Training that is killed and resumed ends where an uninterrupted one does, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli import save_model
from training import tiny_base, tiny_training

from multirate.config.errors import MultirateError
from multirate.streams.accelerator import Accelerator
from multirate.streams.folder import FILES
from multirate.train import checkpoint
from multirate.train.checkpoint import CHECKPOINT_FILE, LOG_FILE, training_folder


class Killed(BaseException):
    """Ends a run at a moment of the test's choice, as SIGKILL would."""


def killed_at(wanted: str, count: int) -> Any:
    """A report that ends the run at the count-th event of a kind."""
    seen: list[str] = []

    def report(event: str, values: dict[str, Any]) -> None:
        seen.append(event)
        if seen.count(wanted) == count and event == wanted:
            raise Killed

    return report


def log_of(output: Path) -> list[dict[str, Any]]:
    lines = (training_folder(output) / LOG_FILE).read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if k != "positions_per_second"} for line in lines
    ]


def same(one: Accelerator, other: Accelerator) -> bool:
    mine, yours = one.state_dict(), other.state_dict()
    return mine.keys() == yours.keys() and all(torch.equal(mine[k], yours[k]) for k in mine)


@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.9, "gradient_accumulation": 2}])
def test_resumed_equals_uninterrupted(tmp_path: Path, options: dict[str, Any]) -> None:
    """Interrupted in the closed form, between steps and at the first save; checkpoints at odd times."""
    whole = tiny_training(tmp_path / "whole", save_seconds=1e6, **options)
    output = tmp_path / "parts"
    for wanted, count in (("fitted", 1), ("evaluated", 1), ("step", 4), ("step", 9), ("saved", 1)):
        with pytest.raises(Killed):
            tiny_training(
                output, report=killed_at(wanted, count), resume=True, save_seconds=0, **options
            )
    parts = tiny_training(output, resume=True, save_seconds=0, **options)
    assert same(whole, parts)
    assert parts.config == whole.config
    assert log_of(output) == log_of(tmp_path / "whole")
    assert (output / FILES[1]).read_bytes() == (tmp_path / "whole" / FILES[1]).read_bytes()
    assert not (training_folder(output) / CHECKPOINT_FILE).exists()


def test_steps_since_the_last_checkpoint_are_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tiny_training(tmp_path / "whole")
    output = tmp_path / "parts"
    with pytest.raises(Killed):
        tiny_training(output, report=killed_at("step", 7), save_seconds=1e6)
    assert len(log_of(output)) > 7  # steps that only the log knows
    steps: list[int] = []
    parts = tiny_training(
        output,
        resume=True,
        report=lambda event, values: steps.append(values["step"]) if event == "step" else None,
    )
    assert steps[0] == 1  # the only checkpoint was the one after the closed form
    assert same(whole, parts)
    assert log_of(output) == log_of(tmp_path / "whole")


def test_a_crash_while_a_checkpoint_is_written_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tiny_training(tmp_path / "whole")
    output = tmp_path / "parts"
    original, calls = torch.save, []

    def crashing(state: Any, file: Any) -> None:
        calls.append(state["step"])
        original(state, file)
        if len(calls) == 4:
            file.truncate(1000)
            raise Killed

    monkeypatch.setattr(checkpoint.torch, "save", crashing)
    with pytest.raises(Killed):
        tiny_training(output, save_seconds=0)
    monkeypatch.undo()
    state = checkpoint.read_checkpoint(training_folder(output))
    assert state is not None and state["step"] == calls[-1] - 1
    assert same(whole, tiny_training(output, resume=True))


def test_a_kill_while_the_accelerator_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two renames nothing is at its place, and two folders lie beside it."""
    whole = tiny_training(tmp_path / "whole")
    output = tmp_path / "parts"
    with pytest.raises(Killed):
        tiny_training(output, report=killed_at("step", 3), save_seconds=0)
    original = Path.rename

    def rename(self: Path, target: Path) -> Path:
        original(self, target)
        # Nothing is tidied up any more.
        monkeypatch.setattr("shutil.rmtree", lambda *args, **more: None)
        monkeypatch.setattr(Path, "exists", lambda self: False)
        raise Killed

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(Killed):
        tiny_training(output, resume=True)
    monkeypatch.undo()
    assert not output.exists() and len(list(tmp_path.glob(".parts.*"))) == 2
    assert same(whole, tiny_training(output, resume=True))
    names = {"whole", "whole.train", "parts", "parts.train"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_an_unfinished_training_is_not_overwritten(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with pytest.raises(Killed):
        tiny_training(output, report=killed_at("step", 3), save_seconds=0)
    with pytest.raises(MultirateError, match=r"unfinished training .step 2.*--resume"):
        tiny_training(output)
    with pytest.raises(MultirateError, match=r"learning_rate \(then 0.003, now 0.001\)"):
        tiny_training(output, resume=True, learning_rate=1e-3)
    with pytest.raises(MultirateError, match=r"rank \(then 4, now 5\)"):
        tiny_training(output, resume=True, shape={"rank": 5, "draft_vocab_size": 60})
    with pytest.raises(MultirateError, match=r"base_fingerprint"):
        tiny_training(output, resume=True, base=tiny_base(rms_norm_eps=1e-3))
    tiny_training(output, resume=True, save_seconds=3, gradient_accumulation=2)


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with pytest.raises(Killed):
        tiny_training(output, report=killed_at("step", 3), save_seconds=0)
    path = training_folder(output) / CHECKPOINT_FILE
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 4  # a number of some tensor
    torch.save({"step": 3}, path)
    for content in (good[:-200], flipped, b"", b"hello", path.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(MultirateError, match=f"{CHECKPOINT_FILE} cannot be read"):
            tiny_training(output, resume=True)


def test_two_trainings_of_one_output(tmp_path: Path) -> None:
    """The second is refused, and the first goes on as if nothing had been."""
    output, refused = tmp_path / "out", []

    def report(event: str, values: dict[str, Any]) -> None:
        if event == "step" and values["step"] == 3:
            with pytest.raises(MultirateError, match=r"Another run is writing .*out "):
                tiny_training(output, resume=True)
            refused.append(event)

    trained = tiny_training(output, report=report, save_seconds=0)
    assert refused and same(trained, tiny_training(tmp_path / "alone"))
    assert [path.name for path in training_folder(output).iterdir()] == [LOG_FILE]


@pytest.mark.slow
def test_sigkill_three_times(tmp_path: Path) -> None:
    """The command itself, killed at random moments."""
    model = save_model(tmp_path / "model")
    rng = random.Random(0)
    rows = [
        {"prompt": "".join(rng.choices("abcd", k=4)), "completion": "".join(rng.choices("wxyz", k=20))}
        for _ in range(60)
    ]  # fmt: skip
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def start(output: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                sys.executable, "-m", "multirate.cli.main", "train", str(model), "--data", str(text),
                "--output", str(output), "--resume", "--save-seconds", "0", "--epochs", "4",
                "--batch-tokens", "96", "--closed-form-tokens", "300", "--heldout-rows", "6",
                "--rank", "4", "--dtype", "float32", "--device", "cpu",
            ],
            env=environment, stderr=subprocess.PIPE,
        )  # fmt: skip

    whole = start(tmp_path / "whole")
    _, errors = whole.communicate(timeout=300)
    assert whole.returncode == 0, errors.decode()
    output = tmp_path / "parts"
    log = training_folder(output) / LOG_FILE
    total = len(log_of(tmp_path / "whole"))
    for part in range(3):
        process = start(output)
        # Wait for a random number of new lines, then for no line in particular.
        lines = rng.randint(part * total // 4, (part + 1) * total // 4)
        while process.poll() is None:
            if log.exists() and len(log.read_bytes().splitlines()) >= lines:
                break
            time.sleep(0.002)
        time.sleep(rng.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    last = start(output)
    _, errors = last.communicate(timeout=300)
    assert last.returncode == 0, errors.decode()
    assert b"resumed at step" in errors
    assert log_of(output) == log_of(tmp_path / "whole")
    for name in FILES[:2]:
        assert (output / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
