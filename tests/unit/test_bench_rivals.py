"""Rivals in the benchmark: found beside the repository's data, refused where they do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benching import tokenizer
from test_heads import ACCURACY
from tiny_models import tiny_model

import multirate
from multirate.bench.methods import METHODS
from multirate.bench.options import SpeculativeOptions
from multirate.bench.rivals import RIVALS, require_same_tokens
from multirate.config.errors import MultirateError
from multirate.decode.deed import DeedDrafter, ExitHeads
from multirate.decode.engine import Engine
from multirate.decode.medusa import MedusaDrafter, MedusaHeads
from multirate.models.base import BaseModel
from multirate.streams.accelerator import Accelerator

NEW = 16
PROMPT = [5, 9, 11, 7, 5, 9, 11]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """A model in a folder, float32, where `data/` would be looked for."""
    monkeypatch.chdir(tmp_path)
    tiny_model("llama").save_pretrained("tiny")
    tokenizer().save_pretrained("tiny")
    tiny_model("llama", num_hidden_layers=2, seed=4).save_pretrained("small")
    tokenizer().save_pretrained("small")
    return multirate.load("tiny", dtype="float32", device="cpu")


def make_all(base: BaseModel) -> None:
    ids = torch.arange(base.vocab_size)
    MedusaDrafter(MedusaHeads(base, ids), ACCURACY).save("data/rivals/tiny-medusa")
    DeedDrafter(ExitHeads(base, ids, (1, 3))).save("data/rivals/tiny-deed")
    for kind, preset in (("rivals", "eagle"), ("accelerators", "paper")):
        Accelerator.from_preset(preset, base).save_pretrained(f"data/{kind}/tiny-{preset}")


@pytest.mark.parametrize("name", RIVALS)
def test_each_is_one_flag(name: str, engine: Engine) -> None:
    make_all(engine.base)
    settings = SpeculativeOptions(
        ("plain", name), NEW, 3, draft_model="small" if name == "two-model" else None
    )
    plain = METHODS["plain"].make(engine, settings).run([PROMPT], NEW)[0]
    rival = METHODS[name].make(engine, settings).run([PROMPT, PROMPT[2:]], NEW)[0]
    assert rival.token_ids == plain.token_ids
    assert rival.speculation is not None
    assert rival.speculation.num_draft_tokens > 0 or name == "lookahead"


def test_lookahead_drafts_as_published_unless_asked_otherwise(engine: Engine) -> None:
    method = METHODS["lookahead"].make(engine, SpeculativeOptions(("lookahead",), 40))
    method.prepare([[PROMPT]])
    speculation = method.run([PROMPT], 40)[0].speculation
    assert speculation is not None and speculation.num_drafts > 0
    assert len(speculation.per_position_acceptance_rate) == 4  # an n-gram less its first token


@pytest.mark.parametrize("name", ["paper", "eagle", "medusa", "deed"])
def test_one_that_is_not_there(name: str, engine: Engine) -> None:
    options = SpeculativeOptions((name,))
    with pytest.raises(MultirateError, match=rf"'{name}' needs .*tiny-{name}.*--output"):
        METHODS[name].make(engine, options)
    with pytest.raises(MultirateError, match=rf"'{name}' needs .*tiny-{name}.*--output"):
        options.require_weights("tiny")
    make_all(engine.base)
    options.require_weights("tiny")


def test_two_models_need_a_model_and_the_same_tokens(engine: Engine) -> None:
    with pytest.raises(MultirateError, match="needs a smaller model"):
        SpeculativeOptions(("two-model",))
    with pytest.raises(MultirateError, match="Add 'two-model'"):
        SpeculativeOptions(("plain",), draft_model="small")
    other = tokenizer()  # of the same size, with two ids swapped
    vocabulary = other.get_vocab()
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    other.backend_tokenizer.model = type(other.backend_tokenizer.model)(vocabulary, unk_token="!")
    with pytest.raises(MultirateError, match="small gives other token ids for the same text"):
        require_same_tokens(other, engine.tokenizer, name="small")
    split = tokenizer()  # the same words, found in other places
    split.backend_tokenizer.pre_tokenizer = None
    with pytest.raises(MultirateError, match="other token ids"):
        require_same_tokens(split, engine.tokenizer, name="small")
    with pytest.raises(MultirateError, match="a tokenizer is missing"):
        require_same_tokens(None, engine.tokenizer, name="small")
    require_same_tokens(tokenizer(), engine.tokenizer, name="small")
