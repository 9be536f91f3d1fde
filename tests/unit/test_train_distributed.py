"""Two processes train as one does: DDP and FSDP2 over gloo, on the same global batches."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from training import tiny_training

from multirate.streams.accelerator import Accelerator
from multirate.streams.folder import FILES
from multirate.train.checkpoint import CHECKPOINT_FILE, LOG_FILE, training_folder
from multirate.train.loop import TrainingRun

# An uneven number of rows in most steps, an average of the weights, and more parts than rows at times.
CHANGES: dict[str, Any] = {"ema_decay": 0.8, "gradient_accumulation": 2, "epochs": 1}


class Killed(BaseException):
    pass


def interrupted_training(output: Path) -> None:
    """All processes stop in the seventh step; the last checkpoint is of the sixth."""
    original = TrainingRun.train_step

    def step(self: Any) -> None:
        if self.step == 6:
            raise Killed
        original(self)

    TrainingRun.train_step = step  # type: ignore[method-assign]
    try:
        tiny_training(output, save_seconds=0, **CHANGES)
    except Killed:
        pass
    finally:
        TrainingRun.train_step = original  # type: ignore[method-assign]


def one_process(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    weights = {"ddp": tiny_training(folder / "ddp", **CHANGES)}
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    os.environ["FSDP_VERSION"] = "2"
    interrupted_training(folder / "fsdp2")
    assert (training_folder(folder / "fsdp2") / CHECKPOINT_FILE).exists()
    weights["fsdp2"] = tiny_training(folder / "fsdp2", resume=True, save_seconds=0, **CHANGES)
    torch.save(
        {kind: trained.state_dict() for kind, trained in weights.items()},
        folder / f"weights{rank}.pt",
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Accelerator]]:
    folder = tmp_path_factory.mktemp("distributed")
    alone = tiny_training(folder / "alone", **CHANGES)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(one_process, (port, folder), nprocs=2)
    yield folder, alone


def log_of(output: Path) -> list[dict[str, Any]]:
    lines = (training_folder(output) / LOG_FILE).read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_give_the_same_curve(trained: tuple[Path, Accelerator], kind: str) -> None:
    """FSDP2 was interrupted and resumed on the way."""
    folder, _ = trained
    one, two = log_of(folder / "alone"), log_of(folder / kind)
    assert len(one) == len(two)
    for mine, yours in zip(one, two, strict=True):
        assert mine.keys() == yours.keys()
        for name in mine.keys() - {"positions_per_second", "evaluation"}:
            assert yours[name] == pytest.approx(mine[name], rel=2e-3, abs=1e-5), (
                name,
                mine["step"],
            )
        if "evaluation" in mine:
            assert yours["evaluation"]["length"] == pytest.approx(
                mine["evaluation"]["length"], abs=0.02
            )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_what_two_processes_save_is_whole(trained: tuple[Path, Accelerator], kind: str) -> None:
    folder, alone = trained
    there = {
        p.relative_to(folder / kind).as_posix() for p in (folder / kind).rglob("*") if p.is_file()
    }
    assert there == set(FILES)
    assert not (training_folder(folder / kind) / CHECKPOINT_FILE).exists()
    loaded = Accelerator.from_pretrained(folder / kind, alone.base, dtype=torch.float32)
    both = [torch.load(folder / f"weights{rank}.pt")[kind] for rank in (0, 1)]
    for name, expected in alone.state_dict().items():
        assert torch.equal(both[0][name], both[1][name]), name
        torch.testing.assert_close(both[0][name], expected, atol=2e-3, rtol=1e-2, msg=name)
        torch.testing.assert_close(
            loaded.state_dict()[name], both[0][name], atol=1e-2, rtol=1e-2, msg=name
        )
