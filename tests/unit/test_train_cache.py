"""The teacher cache: same losses, never stale, never over its cap."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training import SHAPE, text_rows, tiny_base, tiny_training

from multirate.streams.accelerator import Accelerator
from multirate.train import cache as cache_module
from multirate.train.batches import collate
from multirate.train.cache import TeacherCache, weights_fingerprint
from multirate.train.losses import StreamLoss
from multirate.train.options import TrainingOptions
from multirate.train.teacher import Needs, TeacherStates, run_teacher


def files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def test_cached_losses_equal_fresh_ones(tmp_path: Path) -> None:
    base, rows = tiny_base(), text_rows(count=9)
    torch.manual_seed(0)
    stream = Accelerator.from_preset("carry", base, **SHAPE)
    needs = Needs.of(stream.config)
    cache = TeacherCache(tmp_path, base, needs, rows, max_bytes=1e9)
    module = StreamLoss(stream, TrainingOptions(draft_steps=2))
    one, other = collate(rows[:5]), collate([rows[7], rows[1], rows[8]])

    def loss(teacher: TeacherStates, batch=one):  # type: ignore[no-untyped-def]
        with torch.no_grad():
            return float(module(batch, teacher)[0])

    fresh = loss(run_teacher(base, one, needs))
    first = loss(cache.teach(one))
    assert len(files(tmp_path)) == 5
    assert loss(cache.teach(one)) == first == pytest.approx(fresh, rel=2e-3)
    assert first != fresh  # half precision
    # Rows come back in other company, too.
    assert loss(cache.teach(other), other) == pytest.approx(
        loss(run_teacher(base, other, needs), other), rel=2e-3
    )
    assert sum(p.stat().st_size for p in files(tmp_path)) <= cache.bytes


def test_cap_keeps_what_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, rows = tiny_base(), text_rows(count=8)
    stream = Accelerator.from_preset("carry", base, **SHAPE)
    needs = Needs.of(stream.config)
    everything = TeacherCache(tmp_path, base, needs, rows, max_bytes=1e9)
    half = TeacherCache(tmp_path, base, needs, rows, max_bytes=everything.bytes / 2)
    assert half.wanted_bytes == everything.bytes and len(everything.kept) == 8
    assert 2 <= len(half.kept) < 6
    batch = collate(rows)
    half.teach(batch)
    assert len(files(tmp_path)) == len(half.kept)
    assert sum(p.stat().st_size for p in files(tmp_path)) <= everything.bytes / 2
    ran: list[int] = []

    def counted(base, batch, needs):  # type: ignore[no-untyped-def]
        ran.append(len(batch.rows))
        return run_teacher(base, batch, needs)

    monkeypatch.setattr(cache_module, "run_teacher", counted)
    half.teach(batch)
    assert ran == [8 - len(half.kept)]


def test_a_stale_cache_is_never_used(tmp_path: Path) -> None:
    rows = text_rows(count=2)
    stream = Accelerator.from_preset("carry", tiny_base(), **SHAPE)
    needs = Needs.of(stream.config)
    folders = set()
    for base, wanted in (
        (tiny_base(), needs),
        (tiny_base(seed=1), needs),  # same config, other weights
        (tiny_base(rms_norm_eps=1e-3), needs),
        (tiny_base(), Needs(needs.states, (0, 1))),
    ):
        folders.add(TeacherCache(tmp_path, base, wanted, rows, max_bytes=1e9).folder)
    assert len(folders) == 4
    assert weights_fingerprint(tiny_base()) == weights_fingerprint(tiny_base())


def test_a_damaged_file_is_made_again(tmp_path: Path) -> None:
    base, rows = tiny_base(), text_rows(count=2)
    stream = Accelerator.from_preset("carry", base, **SHAPE)
    cache = TeacherCache(tmp_path, base, Needs.of(stream.config), rows, max_bytes=1e9)
    batch = collate(rows)
    before = cache.teach(batch)
    path = files(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:50])
    after = cache.teach(batch)
    for i, h in before.states.items():
        assert torch.equal(h, after.states[i])
    assert path.stat().st_size > 50


def test_training_with_a_cache_reads_it_in_later_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []

    def counted(base, batch, needs):  # type: ignore[no-untyped-def]
        ran.append(len(batch.rows))
        return run_teacher(base, batch, needs)

    monkeypatch.setattr(cache_module, "run_teacher", counted)
    said: list[dict[str, object]] = []
    cached = tiny_training(
        tmp_path / "out",
        arguments={"teacher_cache": tmp_path / "cache"},
        report=lambda event, values: said.append(values) if event == "cache" else None,
    )
    assert sum(ran) == 40  # every row once, in two epochs and several evaluations
    assert said[0]["bytes"] == said[0]["wanted_bytes"]
    plain = tiny_training(tmp_path / "plain")
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(cached.state_dict()[name], tensor, atol=0.05, rtol=0.1)
