"""Training sees exactly what drafting will: the unrolled forward against the arena, step by step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_fit import accelerator
from tiny_models import VOCABULARY, tiny_model
from training import text_rows

from multirate.config.errors import MultirateError
from multirate.decode.loop import prefill
from multirate.models.base import BaseModel
from multirate.streams import accelerator as accelerator_module
from multirate.streams.accelerator import Accelerator, Carried
from multirate.train.acceptance import (
    count_accepted,
    mean_acceptance_length,
    measure_acceptance,
)
from multirate.train.batches import Batch, collate
from multirate.train.data import Row
from multirate.train.losses import StreamLoss
from multirate.train.options import TrainingOptions
from multirate.train.teacher import Needs, run_teacher
from multirate.train.unroll import Drafted, unroll

MODELS = ["llama", "mistral", "qwen3-windowed", "gemma2", "gemma3_text", "olmoe", "gpt_oss"]


def shaken(base: BaseModel, preset: str, **overrides: object) -> Accelerator:
    """An accelerator none of whose weights is at its start."""
    stream = accelerator(base, preset, **overrides)
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in stream.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=g))
    return stream


def whole_rows(ids: torch.Tensor, *, first: int = 2) -> Batch:
    """Rows that are learned from position `first` + 1 on."""
    return collate([Row(row.numpy().astype(np.int32), ((first + 1, len(row)),)) for row in ids])


def unrolled(stream: Accelerator, batch: Batch, steps: int) -> list[Drafted]:
    teacher = run_teacher(stream.base, batch, Needs.of(stream.config))
    return list(unroll(stream, batch, teacher, steps))


@pytest.mark.parametrize("preset", ["carry", "paper"])
@pytest.mark.parametrize("model", MODELS)
def test_unrolled_steps_equal_drafting(model: str, preset: str) -> None:
    base = BaseModel(tiny_model(model))
    changes = {"gates": (1, 3)} if preset == "paper" else {"draft_vocab_size": 31}
    stream = shaken(base, preset, **changes)
    ids = torch.randint(3, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(1))
    verified, steps = 11, 3
    with torch.no_grad():
        exits = [drafted.exit for drafted in unrolled(stream, whole_rows(ids, first=5), steps)]
        arena = base.arena(rows=2, max_len=20)
        prompt = ids[:, :verified].tolist()
        _, states = prefill(base, prompt, arena, stream.carry_layers)
        carried = Carried(tuple(states[i] for i in stream.carry_layers), own=False)
        for step in range(steps):
            at = verified + step
            block = base.block([at, at], 1)
            prefix = stream.prefix([verified, verified], block.positions)
            logits, carried = stream.step(ids[:, at : at + 1], carried, block, arena, prefix)
            found = stream.draft_logits(exits[step][:, at - 5])  # the window starts at position 5
            torch.testing.assert_close(
                logits[:, 0], found, atol=2e-5, rtol=1e-4, msg=f"step {step + 1}"
            )


def test_top_scoring_tokens_only() -> None:
    """Attending to as many tokens as there are changes nothing; to one, it does."""
    base = BaseModel(tiny_model("llama"))
    ids = torch.randint(3, VOCABULARY, (1, 16), generator=torch.Generator().manual_seed(1))
    outputs = {}
    for attended in (None, 16, 1):
        stream = shaken(base, "paper", attended_tokens=attended)
        with torch.no_grad():
            outputs[attended] = unrolled(stream, whole_rows(ids), 1)[0].exit
    torch.testing.assert_close(outputs[16], outputs[None])
    assert not torch.allclose(outputs[1], outputs[None], atol=1e-3)


def test_acceptance_of_a_perfect_and_a_useless_drafter() -> None:
    base = BaseModel(tiny_model("llama"))
    stream = accelerator(base, "carry", draft_vocab_size=VOCABULARY)
    stream.set_draft_ids(torch.arange(VOCABULARY))
    prompts = torch.randint(3, VOCABULARY, (6, 4), generator=torch.Generator().manual_seed(3))
    greedy = base.model.generate(prompts, max_new_tokens=9, do_sample=False, eos_token_id=None)
    text = [collate([Row(ids.numpy().astype(np.int32), ((4, 13),)) for ids in greedy])]
    useless = measure_acceptance(stream, text, 2)
    assert useless[0] < 0.3

    def perfect(accelerator, batch, teacher, steps):  # type: ignore[no-untyped-def]
        for step in range(1, steps + 1):
            yield Drafted(step, teacher.at(base.num_layers), [])

    assert measure_acceptance(stream, text, 2, unroll=perfect) == (1.0, 1.0)

    # Text that the model did not choose: a draft goes on only where the text is what was drafted.
    ids = greedy.clone()
    ids[:, 8] = (ids[:, 8] + 1) % VOCABULARY
    sampled = collate([Row(row.numpy().astype(np.int32), ((4, 13),)) for row in ids])
    best = base.model(ids).logits.argmax(-1)[:, 3:12]
    goes_on = int((best == ids[:, 4:])[:, :-1].sum())
    teacher = run_teacher(base, sampled, Needs.of(stream.config))
    counts = count_accepted(stream, sampled, teacher, 2, unroll=perfect)
    assert counts.tolist() == [[54, 54], [goes_on, goes_on]] and 0 < goes_on < 48


def test_mean_acceptance_length() -> None:
    assert mean_acceptance_length([]) == 1.0
    assert mean_acceptance_length([0.5, 0.5]) == pytest.approx(1.75)


def test_draft_vocabulary_is_checked_and_used() -> None:
    base = BaseModel(tiny_model("llama"))
    stream = accelerator(base, "carry", draft_vocab_size=3)
    for ids, words in [
        ([1, 2], "holds 2 ids"),
        ([1, 2, VOCABULARY], f"names token {VOCABULARY}, outside"),
        ([1, 2, -1], "names token -1, outside"),
        ([1, 2, 2], "names a token twice"),
    ]:
        with pytest.raises(MultirateError, match=words):
            stream.set_draft_ids(torch.tensor(ids))
    stream.set_draft_ids(torch.tensor([7, 3, 90]))
    p = torch.randn(2, 5, base.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(stream.draft_logits(p), base.head(p)[..., [7, 3, 90]])


def test_an_accelerator_for_another_shape_is_refused() -> None:
    base = BaseModel(tiny_model("llama"))
    config = accelerator(base, "carry").config
    other = BaseModel(tiny_model("llama", num_hidden_layers=3))
    with pytest.raises(MultirateError, match="num_layers=4, but the loaded model has 3"):
        Accelerator(config, other)


def test_generating_then_training_the_same_accelerator() -> None:
    base = BaseModel(tiny_model("llama"))
    base.model.requires_grad_(False)
    stream = shaken(base, "carry", draft_vocab_size=40)
    with torch.inference_mode():
        stream.draft_logits(torch.zeros(1, 1, base.hidden_size))
    batch = collate(text_rows(count=2))
    teacher = run_teacher(base, batch, Needs.of(stream.config))
    loss, _ = StreamLoss(stream, TrainingOptions(draft_steps=1))(batch, teacher)
    loss.backward()
    assert all(p.grad is not None for p in stream.layers.parameters())


@pytest.mark.parametrize("model", MODELS)
def test_folding_changes_speed_only(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator_module, "FOLD_LIMIT", 1.0)
    base = BaseModel(tiny_model(model))
    stream = shaken(base, "carry").eval()
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))
    names = set(stream.state_dict())
    before = {name: t.clone() for name, t in base.model.state_dict().items()}
    with torch.no_grad():
        adapted = [drafted.exit for drafted in unrolled(stream, whole_rows(ids), 2)]
        stream.fold()
        assert all(layer.folded is not None for layer in stream.layers)
        folded = [drafted.exit for drafted in unrolled(stream, whole_rows(ids), 2)]
    for one, other in zip(folded, adapted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    assert set(stream.state_dict()) == names
    for name, tensor in base.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    stream.train()
    assert all(layer.folded is None for layer in stream.layers)


def test_folding_keeps_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    base = BaseModel(tiny_model("llama"))
    stream = shaken(base, "carry").eval()  # 2 of 4 layers: far over it
    stream.fold()
    assert all(layer.folded is None for layer in stream.layers)
    one = stream.layers[0].fold_bytes() / sum(p.nbytes for p in base.model.parameters())
    monkeypatch.setattr(accelerator_module, "FOLD_LIMIT", 1.5 * one)  # room for the first only
    stream.fold()
    assert [layer.folded is not None for layer in stream.layers] == [True, False]
    drafted = unrolled(stream, whole_rows(torch.full((1, 6), 5)), 1)
    assert all(torch.isfinite(step.exit).all() for step in drafted)
