"""What training does: it improves, keeps the best, leaves the base alone, and says what went wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY
from training import SHAPE, text_rows, tiny_base, tiny_training

from multirate.config.errors import MultirateError
from multirate.models.loading import config_fingerprint
from multirate.streams.accelerator import Accelerator
from multirate.streams.folder import CONFIG_FILE, FILES
from multirate.train import loop
from multirate.train.acceptance import mean_acceptance_length, measure_acceptance
from multirate.train.batches import collate, split_rows
from multirate.train.checkpoint import CHECKPOINT_FILE, LOG_FILE, training_folder
from multirate.train.data import Row
from multirate.train.losses import StreamLoss
from multirate.train.memory import memory_advice
from multirate.train.options import TrainingOptions
from multirate.train.teacher import Needs, run_teacher


class Events(list[tuple[str, dict[str, Any]]]):
    """A report that keeps what it is told."""

    def __call__(self, event: str, values: dict[str, Any]) -> None:
        self.append((event, values))

    def of(self, event: str) -> list[dict[str, Any]]:
        return [values for name, values in self if name == event]


def loss_of(stream: Accelerator, **options: Any) -> float:
    batch = collate(text_rows())
    teacher = run_teacher(stream.base, batch, Needs.of(stream.config))
    with torch.no_grad():
        return float(StreamLoss(stream, TrainingOptions(**options))(batch, teacher)[0])


@pytest.mark.parametrize("closed_form", [True, False])
@pytest.mark.parametrize("preset", ["carry", "paper"])
def test_training_improves_any_start_and_leaves_the_base_alone(
    tmp_path: Path, preset: str, closed_form: bool
) -> None:
    base = tiny_base()
    base.model.requires_grad_(True)
    before = {name: t.clone() for name, t in base.model.state_dict().items()}
    options = {"closed_form": closed_form, "draft_steps": 2, "save_seconds": 1e6}
    shape = {"draft_vocab_size": VOCABULARY}
    start = tiny_training(
        tmp_path / "a", base=base, preset=preset, shape=shape, epochs=0, **options
    )
    end = tiny_training(tmp_path / "b", base=base, preset=preset, shape=shape, epochs=4, **options)
    # The closed form starts near the floor, which is the entropy of the teacher.
    assert loss_of(end) < (1.0 if closed_form else 0.99) * loss_of(start)
    for name, tensor in base.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(p.grad is None for p in base.model.parameters())


def test_closed_form_only(tmp_path: Path) -> None:
    events = Events()
    tiny_training(tmp_path / "out", epochs=0, report=events)
    assert [name for name, _ in events] == ["start", "fitted", "evaluated", "saved"]
    assert {p.name for p in training_folder(tmp_path / "out").iterdir()} == {LOG_FILE}


def test_the_best_evaluated_weights_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = iter([1.1, 1.3, 1.2, 1.25, 1.29, 1.0])
    monkeypatch.setattr(loop, "mean_acceptance_length", lambda rates: next(lengths))
    weights: list[dict[str, torch.Tensor]] = []
    original = loop.TrainingRun._evaluate

    def evaluate(self: loop.TrainingRun) -> bool:
        weights.append({k: v.clone() for k, v in self.accelerator.state_dict().items()})
        return original(self)

    monkeypatch.setattr(loop.TrainingRun, "_evaluate", evaluate)
    events = Events()
    trained = tiny_training(tmp_path / "out", eval_steps=2, patience=3, epochs=5, report=events)
    assert [v["best"] for v in events.of("evaluated")] == [True, True, False, False, False]
    (stopped,) = events.of("stopped")
    assert (stopped["step"], stopped["best"]["step"]) == (8, 2)
    assert len(events.of("step")) == 8 < events.of("start")[0]["steps"]
    for name, tensor in trained.state_dict().items():
        assert torch.equal(tensor, weights[1][name]), name
    loaded = Accelerator.from_pretrained(tmp_path / "out", trained.base)
    for name, tensor in trained.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, atol=1e-2, rtol=1e-2)
    assert not (training_folder(tmp_path / "out") / CHECKPOINT_FILE).exists()


def test_expected_acceptance_is_what_the_saved_weights_measure(tmp_path: Path) -> None:
    events = Events()
    trained = tiny_training(tmp_path / "out", report=events, ema_decay=0.9)
    kept, _ = split_rows(text_rows(), heldout=6, seed=0)
    measured = measure_acceptance(trained, [collate(kept)], loop.ACCEPTANCE_STEPS)
    assert trained.config.expected_acceptance == pytest.approx(measured)
    best = max(events.of("evaluated"), key=lambda v: v["length"])
    assert best["acceptance"] == pytest.approx(measured)
    assert best["length"] == pytest.approx(mean_acceptance_length(measured))
    config = json.loads((tmp_path / "out" / CONFIG_FILE).read_text())
    assert config["expected_acceptance"] == pytest.approx(measured)
    assert config["base_fingerprint"] == config_fingerprint(trained.base.config)
    there = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*")}
    assert {name for name in there if name != "custom_generate"} == set(FILES)


def test_average_of_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The average follows a young average's rule, and is what is evaluated."""
    seen: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    original = loop.TrainingRun.train_step

    def step(self: loop.TrainingRun) -> None:
        if not seen:
            seen.append(([p.detach().clone() for p in self.parameters], []))
        original(self)
        seen.append(
            ([p.detach().clone() for p in self.parameters], [a.clone() for a in self.average])
        )

    monkeypatch.setattr(loop.TrainingRun, "train_step", step)
    tiny_training(tmp_path / "out", ema_decay=0.3, epochs=0.5)
    expected = seen[0][0]
    for i, (weights, average) in enumerate(seen[1:]):
        decay = min(0.3, (1 + i) / (10 + i))
        expected = [decay * e + (1 - decay) * w for e, w in zip(expected, weights, strict=True)]
        torch.testing.assert_close(average, expected)
    assert len(seen) > 3


def test_log_and_rate(tmp_path: Path) -> None:
    events = Events()
    tiny_training(tmp_path / "out", report=events, warmup_share=0.25, learning_rate=0.01)
    lines = (training_folder(tmp_path / "out") / LOG_FILE).read_text().splitlines()
    records = [json.loads(line) for line in lines]
    steps = [r for r in records if "step" in r]
    total = events.of("start")[0]["steps"]
    assert [r["step"] for r in steps] == list(range(1, total + 1))
    names = {"loss", "gradient_norm", "learning_rate", "positions_per_second"}
    for s in (1, 2, 3):
        names |= {f"cross_entropy_{s}", f"distillation_{s}"}
    assert names <= steps[0].keys()
    assert [r["evaluation"]["step"] for r in records if "evaluation" in r] == sorted(
        {*range(0, total + 1, 5), total}
    )
    rates = [r["learning_rate"] for r in steps]
    top = rates.index(max(rates))
    assert max(rates) == pytest.approx(0.01) and top == round(0.25 * total) - 1
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True) and rates[-1] < 0.002
    (finished,) = events.of("finished")
    assert finished["peak_memory_bytes"] > 50e6 and finished["positions_per_second"] > 0
    assert finished["accelerator_share"] > finished["draft_step_share"] > 0


def test_held_out_text_may_be_given(tmp_path: Path) -> None:
    events = Events()
    tiny_training(
        tmp_path / "out", report=events, epochs=0, arguments={"heldout": text_rows(seed=9, count=3)}
    )
    assert events.of("start")[0]["texts"] == 40


def test_more_intervals_train(tmp_path: Path) -> None:
    events = Events()
    shape = {"rank": 2, "gates": (0, 2, 4)}
    tiny_training(tmp_path / "out", preset="paper", shape=shape, report=events)
    first, last = events.of("step")[0], events.of("step")[-1]
    assert last["gate1_cross_entropy_1"] < first["gate1_cross_entropy_1"]


def test_a_loss_that_is_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = StreamLoss.loss

    def loss(self: StreamLoss, *args: Any) -> Any:
        total, parts = original(self, *args)
        calls.append(1)
        return (total * float("nan") if len(calls) == 4 else total), parts

    calls: list[int] = []
    monkeypatch.setattr(StreamLoss, "loss", loss)
    with pytest.raises(MultirateError, match=r"loss became nan.* at step 4.*learning rate.*0.003"):
        tiny_training(tmp_path / "out", save_seconds=0)
    monkeypatch.undo()
    state = torch.load(training_folder(tmp_path / "out") / CHECKPOINT_FILE, weights_only=True)
    assert state["step"] == 3 and all(bool(w.isfinite().all()) for w in state["weights"].values())
    assert (tmp_path / "out" / CONFIG_FILE).exists()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        MemoryError(),
    ],
)
def test_too_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def loss(self: StreamLoss, *args: Any) -> Any:
        raise error

    monkeypatch.setattr(StreamLoss, "loss", loss)
    with pytest.raises(MultirateError, match=r"--batch-tokens \(now 96\).*--draft-steps \(now 3\)"):
        tiny_training(tmp_path / "out")
    monkeypatch.undo()
    tiny_training(tmp_path / "out", resume=True)  # nothing was lost


def test_other_errors_pass(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="a defect"), memory_advice(TrainingOptions()):
        raise RuntimeError("a defect")


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MultirateError, match="hold 6 texts, but 6 are kept back"):
        tiny_training(tmp_path / "out", rows=text_rows(count=6))
    for ids, message in [
        ([5, 6, 7, 8, 9, 10], "0 texts are left to train on and 20 to measure"),  # one prompt
        ([5, 6, 7, 8, 9, VOCABULARY], f"token {VOCABULARY}, outside the model's vocabulary"),
    ]:
        rows = [Row(np.array(ids, dtype=np.int32), ((3, 6),))] * 20
        with pytest.raises(MultirateError, match=message):
            tiny_training(tmp_path / "out", rows=rows)
    for name, value in [
        ("epochs", -1), ("batch_tokens", 3), ("gradient_accumulation", 0), ("draft_steps", 0),
        ("step_decay", 2.0), ("clip", 0.0), ("ema_decay", 1.0), ("patience", -1),
        ("distillation_loss", "l2"), ("learning_rate", float("nan")), ("warmup_share", 1.5),
        ("seed", -1),
    ]:  # fmt: skip
        with pytest.raises(MultirateError, match=f"{name}="):
            TrainingOptions(**{name: value})
    with pytest.raises(MultirateError, match="nothing to learn"):
        TrainingOptions(prediction_weight=0, distillation_weight=0)
    for trackers, message in [
        ("paper", "report_to='paper' is not known. Allowed: .*tensorboard"),
        ("aim", r"report_to='aim' is not installed.*pip install aim"),
    ]:
        with pytest.raises(MultirateError, match=message):
            tiny_training(tmp_path / "out", arguments={"report_to": trackers})
    assert list(tmp_path.iterdir()) == []


def test_trackers_get_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[dict[str, float], int]] = []
    monkeypatch.setattr(
        "accelerate.Accelerator.log", lambda self, values, step: logged.append((values, step))
    )
    tiny_training(tmp_path / "out", epochs=0.3)
    names = {name for values, _ in logged for name in values}
    assert {"loss", "learning_rate", "mean_acceptance_length", "acceptance_4"} <= names
    assert [step for values, step in logged if "loss" in values] == sorted(
        step for values, step in logged if "loss" in values
    )


def test_gradient_accumulation_changes_nothing_but_memory(tmp_path: Path) -> None:
    one = tiny_training(tmp_path / "one", epochs=1)
    parts = tiny_training(tmp_path / "parts", epochs=1, gradient_accumulation=3)
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(parts.state_dict()[name], tensor, atol=2e-3, rtol=1e-2, msg=name)


def test_a_rank_beyond_the_width_is_the_width(tmp_path: Path) -> None:
    trained = tiny_training(tmp_path / "out", preset="paper", shape={"rank": 10**9}, epochs=0)
    assert (
        max(min(p.shape) for p in trained.parameters() if p.dim() == 2) == trained.base.hidden_size
    )


@pytest.mark.parametrize("taken", ["", LOG_FILE])
def test_a_place_that_the_log_cannot_have(tmp_path: Path, taken: str) -> None:
    folder = training_folder(tmp_path / "out")
    if taken:
        (folder / taken).mkdir(parents=True)
    else:
        folder.write_text("a file")
    with pytest.raises(MultirateError, match=r"Cannot (make|write the log) .*out\.train"):
        tiny_training(tmp_path / "out")


def test_shape_is_what_was_asked(tmp_path: Path) -> None:
    trained = tiny_training(tmp_path / "out", epochs=0)
    assert trained.config.rank == SHAPE["rank"] and trained.draft_ids is not None
    assert len(trained.draft_ids) == SHAPE["draft_vocab_size"]


def test_a_finished_accelerator_is_trained_further(tmp_path: Path) -> None:
    base = tiny_base()
    first = tiny_training(tmp_path / "a", base=base, epochs=1)
    events = Events()
    more = {"start_from": tmp_path / "a"}
    same = tiny_training(
        tmp_path / "b", base=base, shape={}, arguments=more, epochs=0, report=events
    )
    assert [name for name, _ in events] == ["start", "evaluated", "saved"]  # no closed form
    assert same.config.rank == first.config.rank == SHAPE["rank"]
    stored = Accelerator.from_pretrained(tmp_path / "a", base, dtype=torch.float32)
    for name, tensor in stored.state_dict().items():
        assert torch.equal(tensor, same.state_dict()[name]), name
    further = tiny_training(tmp_path / "c", base=base, shape={}, arguments=more, epochs=3)
    assert loss_of(further) < loss_of(same)
    with pytest.raises(MultirateError, match=r"so rank cannot be given beside start_from"):
        tiny_training(tmp_path / "d", base=base, shape={"rank": 2}, arguments=more)
    with pytest.raises(MultirateError, match="nowhere"):
        tiny_training(tmp_path / "d", base=base, shape={}, arguments={"start_from": "./nowhere"})


def test_an_accelerator_is_not_trained_further_in_its_own_place(tmp_path: Path) -> None:
    """Its training could not be resumed: what it began with is replaced by the best so far."""
    base, start = tiny_base(), tmp_path / "a"
    tiny_training(start, base=base, epochs=0)
    arguments = {"start_from": start, "overwrite": True}
    with pytest.raises(MultirateError, match=r"in its own place.*another folder"):
        tiny_training(tmp_path / "b" / ".." / "a", base=base, shape={}, arguments=arguments)
    with pytest.raises(MultirateError, match="so preset cannot be given beside start_from"):
        tiny_training(tmp_path / "c", base=base, shape={}, arguments=arguments, preset="paper")


def test_resuming_from_another_start_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_base()
    for name, epochs in (("a", 0), ("b", 1)):
        tiny_training(tmp_path / name, base=base, epochs=epochs)

    def killed(run: loop.TrainingRun) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop.TrainingRun, "train_step", killed)
        tiny_training(tmp_path / "c", base=base, shape={}, arguments={"start_from": tmp_path / "a"})
    with pytest.raises(MultirateError, match="start_from"):
        tiny_training(
            tmp_path / "c",
            base=base,
            shape={},
            arguments={"start_from": tmp_path / "b"},
            resume=True,
        )
