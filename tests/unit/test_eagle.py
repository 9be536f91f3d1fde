"""A stream with its own keys and values (the preset `eagle`): it drafts what it was trained to draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_stream_steps import shaken
from tiny_models import VOCABULARY, tiny_model
from training import tiny_training

from multirate.config.accelerator import preset_config
from multirate.config.errors import MultirateError
from multirate.config.generation import GenerationOptions
from multirate.decode.drafter import MODEL, DraftRequest, Observation
from multirate.decode.eagle import OwnKvRun
from multirate.decode.engine import Engine
from multirate.decode.loop import prefill
from multirate.decode.sampling import Sampler
from multirate.decode.stream import AcceleratorDrafter
from multirate.models.base import BaseModel
from multirate.streams.accelerator import Accelerator
from multirate.train.batches import collate
from multirate.train.data import Row
from multirate.train.teacher import Needs, run_teacher
from multirate.train.unroll import unroll

MODELS = ["llama", "mistral", "qwen3-windowed", "gemma2", "gpt_oss"]
PROMPTS = [[5, 9, 11, 7, 5, 9, 11], [8, 3, 8], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29], [4]]
NEW = 20


def unrolled(stream: Accelerator, ids: torch.Tensor, steps: int) -> list[torch.Tensor]:
    rows = [Row(row.numpy().astype("int32"), ((4, len(row)),)) for row in ids]
    batch = collate(rows, whole=True)
    needs = Needs.of(stream.config)
    assert needs.layers == ()  # it reads none of the model's own keys and values
    teacher = run_teacher(stream.base, batch, needs)
    return [drafted.exit for drafted in unroll(stream, batch, teacher, steps)]


def request(ids: list[list[int]], stream: Accelerator, count: int) -> DraftRequest:
    return DraftRequest(
        torch.tensor([row[-1] for row in ids]), [len(row) - 1 for row in ids], {},
        stream.base.arena(rows=len(ids), max_len=0), ids, count=count,
        sampler=Sampler(GenerationOptions(), device="cpu"), go_on=lambda *_: True,
    )  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_drafts_are_those_of_the_unrolled_forward(model: str) -> None:
    """Recurrent on its own features, over its own keys and values, from verified features before."""
    base = BaseModel(tiny_model(model))
    stream = shaken(base, "eagle", draft_vocab_size=31).eval()
    ids = torch.randint(3, VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        run = AcceleratorDrafter(stream).start(rows=2, max_len=20)
        assert isinstance(run, OwnKvRun)
        prefill(base, ids[:, :-1].tolist(), base.arena(rows=2, max_len=20), stream.carry_layers,
                observe=run.observe)  # fmt: skip
        drafted = run.draft(request(ids.tolist(), stream, 3)).tokens
        text = torch.cat([ids, drafted], dim=1)
        exits = unrolled(stream, text, 3)
        for step, exit_ in enumerate(exits):
            place = ids.shape[1] - 1 + step - 1  # windows start at position 1
            logits = stream.draft_logits(exit_[:, place])
            assert torch.equal(stream.draft_ids[logits.argmax(-1)], drafted[:, step])


def test_it_reads_again_what_it_drafted_from_its_own_features() -> None:
    """After a verified block the next drafts are those of a run that saw all of the text at once."""
    base = BaseModel(tiny_model("llama"))
    stream = shaken(base, "eagle", draft_vocab_size=31).eval()
    texts = [list(range(10, 26)), list(range(40, 50))]
    with torch.inference_mode():
        wanted = OwnKvRun(stream, rows=2, max_len=24)
        prefill(base, [t[:-1] for t in texts], base.arena(rows=2, max_len=24), stream.carry_layers,
                observe=wanted.observe)  # fmt: skip
        run = OwnKvRun(stream, rows=2, max_len=24)
        arena = base.arena(rows=2, max_len=24)
        heads = [texts[0][:9], texts[1][:6]]
        prefill(base, [t[:-1] for t in heads], arena, stream.carry_layers, observe=run.observe)
        run.draft(request(heads, stream, 4))
        # The rest of each text as a verified block in which an entry was rejected.
        lengths = [len(t) - 1 for t in heads]
        block = [[*texts[0][8:15], 0], [*texts[1][5:9], 0, 0, 0, 0]]
        states = dict.fromkeys(stream.carry_layers)
        base.run_layers(base.embed(torch.tensor(block)), 0, base.num_layers,
                        base.block(lengths, 8), arena, states=states)  # fmt: skip
        run.observe(Observation(lengths, states, None, [list(range(7)), list(range(4))]))
        found, expected = (r.draft(request(texts, stream, 4)).tokens for r in (run, wanted))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("model", ["llama", "gemma2"])
def test_output_is_the_plain_one(model: str) -> None:
    base = BaseModel(tiny_model(model))
    engine = Engine(base, accelerator=shaken(base, "eagle", draft_vocab_size=60))
    options = GenerationOptions(max_new_tokens=NEW, ignore_eos=True)
    plain = [engine.generate(p, options, strategy="plain").token_ids for p in PROMPTS]
    for drafts, width in ((1, 1), (4, 1), (2, 3)):
        results = engine.generate(PROMPTS, options, num_draft_tokens=drafts, draft_width=width)
        assert [r.token_ids for r in results] == plain
    grown = engine.generate(PROMPTS, options)  # trees, as measured costs have it
    assert [r.token_ids for r in grown] == plain


class Bushy:
    """A growth that continues two nodes of every level."""

    def chance(self, claimed: float, kind: int = MODEL) -> float:
        return claimed

    def pays(self, chance: float = 1.0) -> bool:
        return True

    def beam(self, depth: int, chances: Sequence[Sequence[float]], limit: int) -> int:
        return min(2, limit)


def test_branches_of_a_tree_are_drafted_as_if_they_stood_alone() -> None:
    base = BaseModel(tiny_model("llama"))
    stream = shaken(base, "eagle", draft_vocab_size=31).eval()
    ids = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        run = OwnKvRun(stream, rows=2, max_len=40)
        prefill(base, ids[:, :-1].tolist(), base.arena(rows=2, max_len=20), stream.carry_layers,
                observe=run.observe)  # fmt: skip
        tree = run.draft(replace(request(ids.tolist(), stream, 3), growth=Bushy(), width=2))
        assert tree.steps == (1, 2, 2)
        for row, parents in enumerate(tree.parent_lists()):
            tokens = tree.tokens[row].tolist()
            for leaf in range(len(tokens)):
                path = [leaf]
                while parents[path[0]] >= 0:
                    path.insert(0, parents[path[0]])
                if len(path) < 3 or tokens[leaf] != tokens[parents.index(parents[leaf])]:
                    continue  # a first child at the last level: what follows its path for certain
                text = torch.tensor([[*ids[row].tolist(), *(tokens[i] for i in path)]])
                exit_ = unrolled(stream, text, 3)[2][0, -1]
                assert int(stream.draft_ids[stream.draft_logits(exit_).argmax()]) == tokens[leaf]


def test_its_shape() -> None:
    shape = {"num_layers": 30, "hidden_size": 8, "vocab_size": 90, "num_attention_heads": 2}
    config = preset_config("eagle", **shape)
    assert (config.gates, config.carry_layers, config.own_kv) == ((29, 30), (2, 15, 27), True)
    with pytest.raises(MultirateError, match="own_kv=True needs entry='carry'"):
        preset_config("paper", **shape, own_kv=True)


def test_it_trains_in_parts_and_from_a_cache(tmp_path: Path) -> None:
    """Its windows hold the whole text, however a step is shared and wherever its states come from."""
    lines: dict[str, list[float]] = {}

    def trained(name: str, **settings: Any) -> dict[str, torch.Tensor]:
        lines[name] = []
        return tiny_training(
            tmp_path / name,
            preset="eagle",
            epochs=0.5,
            report=lambda event, values: (
                lines[name].append(values["loss"]) if event == "step" else None
            ),
            **settings,
        ).state_dict()

    whole = trained("whole")
    assert len(lines["whole"]) > 2 and lines["whole"][-1] != lines["whole"][0]
    parts = trained("parts", gradient_accumulation=3)
    cached = trained("cached", arguments={"teacher_cache": tmp_path / "cache"})
    for name, weight in whole.items():
        torch.testing.assert_close(parts[name], weight, atol=1e-3, rtol=1e-2)
    assert lines["parts"] == pytest.approx(lines["whole"], rel=1e-4)
    assert lines["cached"] == pytest.approx(lines["whole"], rel=2e-2)  # rounded to bfloat16
    assert cached.keys() == whole.keys()
