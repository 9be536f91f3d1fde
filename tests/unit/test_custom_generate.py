"""transformers' own `generate` with an accelerator folder: same arguments, same result, fewer steps."""

from __future__ import annotations

import copy
import gc
import importlib.abc
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import MAX_POSITIONS, VOCABULARY, tiny_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation import LogitsProcessor, StoppingCriteria

from multirate.config.accelerator import AcceleratorConfig
from multirate.config.errors import MultirateError
from multirate.decode import hf
from multirate.decode.hf import generate_from_folder, generate_with_accelerator
from multirate.decode.hf_rows import RowSampler, row_checkers, sampling
from multirate.models.base import BaseModel
from multirate.streams.accelerator import Accelerator

NEW = 16
PAD, EOS = 0, 2


def make(model: PreTrainedModel, *, noise: float = 0.1, seed: int = 0) -> Accelerator:
    """A drafter that is right at times: the model's own layers, run a second time with some noise."""
    base = BaseModel(model)
    config = AcceleratorConfig(
        num_layers=base.num_layers,
        hidden_size=base.hidden_size,
        vocab_size=base.vocab_size,
        gates=(0, base.num_layers),
        entry="gate",
        layer_kind="tied",
        rank=2,
        draft_vocab_size=VOCABULARY,
        expected_acceptance=(0.9,),
    )
    accelerator = Accelerator(config, base)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in accelerator.parameters():
            parameter.copy_(noise * torch.randn(parameter.shape, generator=generator))
    return accelerator


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("saved") / "fast"
    return str(make(tiny_model("llama")).save_pretrained(folder, dtype=torch.float32))


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(autouse=True)
def modules_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where transformers copies `generate.py`, empty at first."""
    cache = tmp_path / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(cache))
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield cache
    for name in set(sys.modules) - before:
        if name.startswith("transformers_modules"):
            del sys.modules[name]


def prompts(*lengths: int, seed: int = 0) -> dict[str, Tensor]:
    """Left-padded prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (len(lengths), max(lengths)), generator=generator)
    columns = torch.arange(max(lengths))
    mask = (columns >= max(lengths) - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


SINGLE = prompts(7)
BATCH = prompts(5, 9, 2, 9)


def fast(model: PreTrainedModel, folder: str, **arguments: Any) -> Any:
    arguments = {"max_new_tokens": NEW, "do_sample": False, **arguments}
    return model.generate(custom_generate=folder, trust_remote_code=True, **arguments)


def plain(model: PreTrainedModel, **arguments: Any) -> Any:
    return model.generate(**{"max_new_tokens": NEW, "do_sample": False, **arguments})


def count_passes(model: PreTrainedModel, run: Callable[[], Any]) -> int:
    """How often the model's own head is asked: once a step, since drafts use a copy of its rows."""
    calls: list[None] = []
    handle = model.lm_head.register_forward_hook(lambda *_: calls.append(None))
    run()
    handle.remove()
    return len(calls)


# ------------------------------------------------------------------------------ same output


@pytest.mark.parametrize("drafts", [1, 4, 9])
@pytest.mark.parametrize("inputs", [SINGLE, prompts(1), BATCH], ids=["one", "one token", "batch"])
def test_greedy_output_is_transformers_own(
    model: PreTrainedModel, folder: str, inputs: dict[str, Tensor], drafts: int
) -> None:
    expected = plain(model, **inputs)
    assert torch.equal(fast(model, folder, num_assistant_tokens=drafts, **inputs), expected)
    passes = count_passes(model, lambda: fast(model, folder, num_assistant_tokens=drafts, **inputs))
    assert passes < NEW  # drafts were accepted


def test_the_draft_length_is_chosen_from_measured_costs(
    model: PreTrainedModel, folder: str
) -> None:
    expected = plain(model, **SINGLE)
    assert torch.equal(fast(model, folder, **SINGLE), expected)


def test_other_forms_of_the_same_call(model: PreTrainedModel, folder: str) -> None:
    ids = SINGLE["input_ids"]
    expected = plain(model, input_ids=ids)
    options: dict[str, Any] = {"custom_generate": folder, "trust_remote_code": True}
    config = GenerationConfig(max_new_tokens=NEW, pad_token_id=PAD, eos_token_id=EOS)
    assert torch.equal(model.generate(ids, max_new_tokens=NEW, **options), expected)
    assert torch.equal(model.generate(inputs=ids, generation_config=config, **options), expected)
    longest = len(ids[0]) + NEW
    assert torch.equal(model.generate(ids, max_length=longest, **options), expected)
    assert torch.equal(
        model.generate(ids, GenerationConfig(max_length=longest), **options), expected
    )


def test_max_length_counts_padding(model: PreTrainedModel, folder: str) -> None:
    expected = plain(model, max_new_tokens=None, max_length=14, **BATCH)
    found = fast(model, folder, max_new_tokens=None, max_length=14, num_assistant_tokens=4, **BATCH)
    assert torch.equal(found, expected) and found.shape[1] == 14


def test_rows_end_at_end_of_sequence_tokens_and_are_padded(
    model: PreTrainedModel, folder: str
) -> None:
    free = plain(model, **BATCH)[:, BATCH["input_ids"].shape[1] :]
    ends = [int(free[0, 3]), int(free[1, 6]), int(free[2, 2])]
    expected = plain(model, eos_token_id=ends, pad_token_id=1, **BATCH)
    lengths = (expected != 1).sum(1)
    assert len(set(lengths.tolist())) > 1
    for drafts in (1, 5):
        found = fast(
            model, folder, eos_token_id=ends, pad_token_id=1, num_assistant_tokens=drafts, **BATCH
        )
        assert torch.equal(found, expected)


class Forbid(LogitsProcessor):
    """Forbids other tokens in every row, by the row's place in the batch."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row in range(len(scores)):
            scores[row, row::3] = -torch.inf
        return scores


class AfterOdd(LogitsProcessor):
    """Looks at the last token, and writes in place as transformers' own processors may."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[input_ids[:, -1] % 2 == 1, :40] -= 2.0
        return scores


@pytest.mark.parametrize("inputs", [SINGLE, prompts(5, 5), BATCH], ids=["one", "even", "padded"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"eos_token_id": list(range(2, 60)), "min_new_tokens": 9},
        {"eos_token_id": list(range(2, 60)), "min_length": 15},
        {"bad_words_ids": [[n] for n in range(3, 60)]},
        {"suppress_tokens": list(range(3, 60)), "begin_suppress_tokens": list(range(60, 80))},
        {"encoder_repetition_penalty": 9.0},
        {"forced_eos_token_id": EOS},
        {"logits_processor": [Forbid()]},
        {"logits_processor": [AfterOdd()], "repetition_penalty": 1.3},
        {"prefix_allowed_tokens_fn": lambda row, ids: [10 + row, 20 + row, 30 + len(ids)]},
    ],
    ids=lambda arguments: "+".join(arguments),
)
def test_processors_are_applied_as_in_transformers(
    model: PreTrainedModel, folder: str, inputs: dict[str, Tensor], arguments: dict[str, Any]
) -> None:
    expected = plain(model, **arguments, **inputs)
    assert not torch.equal(expected, plain(model, **inputs)), "the argument must matter here"
    found = fast(model, folder, num_assistant_tokens=4, **arguments, **inputs)
    assert torch.equal(found, expected)


class StopAtMultiple(StoppingCriteria):
    """Ends a row at a multiple of n; notes the lengths it was asked about."""

    def __init__(self, n: int) -> None:
        self.n, self.lengths = n, list[int]()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.lengths.append(input_ids.shape[1])
        return input_ids[:, -1] % self.n == 0


@pytest.mark.parametrize("inputs", [SINGLE, BATCH], ids=["one", "batch"])
def test_stopping_criteria_end_a_row_in_the_middle_of_a_block(
    model: PreTrainedModel, folder: str, inputs: dict[str, Tensor]
) -> None:
    expected = plain(model, stopping_criteria=[StopAtMultiple(7)], **inputs)
    assert expected.tolist() != plain(model, **inputs).tolist(), "a row must end early"
    found = fast(
        model, folder, stopping_criteria=[StopAtMultiple(7)], num_assistant_tokens=6, **inputs
    )
    assert torch.equal(found, expected)


def test_stopping_criteria_are_asked_token_by_token(model: PreTrainedModel, folder: str) -> None:
    criterion = StopAtMultiple(7)
    found = fast(model, folder, stopping_criteria=[criterion], num_assistant_tokens=6, **SINGLE)
    start, end = SINGLE["input_ids"].shape[1], found.shape[1]
    assert criterion.lengths == list(range(start + 1, end + 1))


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for every character."""
    vocabulary = {chr(33 + i): i for i in range(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="!"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_stop_strings_end_a_row(model: PreTrainedModel, folder: str) -> None:
    words = tokenizer()
    free = plain(model, **SINGLE)
    stop = words.decode(free[0, -NEW + 5 : -NEW + 7])
    arguments = {"stop_strings": [stop], "tokenizer": words}
    expected = plain(model, **arguments, **SINGLE)
    assert expected.shape[1] < free.shape[1]
    assert torch.equal(fast(model, folder, num_assistant_tokens=6, **arguments, **SINGLE), expected)
    config = GenerationConfig(stop_strings=[stop], max_new_tokens=NEW)
    found = fast(model, folder, generation_config=config, tokenizer=words, **SINGLE)
    assert torch.equal(found, expected)
    assert config.stop_strings == [stop]
    with pytest.raises(MultirateError, match="pass tokenizer="):
        fast(model, folder, stop_strings=[stop], **SINGLE)


def test_a_generation_stops_at_the_end_of_the_context(model: PreTrainedModel, folder: str) -> None:
    found = fast(model, folder, max_new_tokens=2 * MAX_POSITIONS, num_assistant_tokens=4, **SINGLE)
    assert found.shape[1] == MAX_POSITIONS
    expected = plain(model, max_new_tokens=MAX_POSITIONS - SINGLE["input_ids"].shape[1], **SINGLE)
    assert torch.equal(found, expected)


def test_the_result_is_a_dictionary_if_asked_for(model: PreTrainedModel, folder: str) -> None:
    result = fast(model, folder, return_dict_in_generate=True, **BATCH)
    assert torch.equal(result.sequences, plain(model, **BATCH))
    assert result.sequences.dtype == torch.long


class Collector:
    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        assert not self.ended
        self.parts.append(value)

    def end(self) -> None:
        self.ended = True


def test_a_streamer_gets_prompt_and_tokens_as_in_transformers(
    model: PreTrainedModel, folder: str
) -> None:
    ours, theirs = Collector(), Collector()
    found = fast(model, folder, streamer=ours, num_assistant_tokens=4, **SINGLE)
    plain(model, streamer=theirs, **SINGLE)
    assert ours.ended and torch.equal(torch.cat([p.flatten() for p in ours.parts]), found[0])
    assert [p.tolist() for p in ours.parts] == [p.tolist() for p in theirs.parts]


# ------------------------------------------------------------------------------ sampling


def test_sampling_follows_torchs_seed(model: PreTrainedModel, folder: str) -> None:
    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return fast(model, folder, do_sample=True, num_assistant_tokens=3, **BATCH)

    first = run(1)  # loads the accelerator; the later ones do not
    assert torch.equal(run(1), first)
    assert not torch.equal(run(2), first)
    model.__dict__.pop("_multirate_engines")
    assert torch.equal(run(1), first)


def test_several_sequences_are_rows_of_their_own(model: PreTrainedModel, folder: str) -> None:
    found = fast(model, folder, do_sample=True, num_return_sequences=3, **SINGLE)
    assert found.shape == (3, SINGLE["input_ids"].shape[1] + NEW)
    assert len({tuple(row) for row in found.tolist()}) > 1
    found = fast(model, folder, do_sample=True, top_k=1, num_return_sequences=2, **BATCH)
    expected = plain(model, **BATCH).repeat_interleave(2, dim=0)
    assert torch.equal(found, expected)


SAMPLING: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({"top_k": 0}, {}, 0),
    ({"temperature": 0.7}, {"temperature": 0.7, "top_k": 50}, 0),
    (
        {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.1},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.1},
        0,
    ),
    ({"top_p": 0.6, "top_k": 0, "repetition_penalty": 1.4}, {"top_p": 0.6}, 1),
    ({"top_k": 0, "repetition_penalty": 1.4}, {}, 1),
    ({"typical_p": 0.6, "temperature": 0.7}, {}, 3),  # not at the end: all stay processors
    ({"top_k": 5, "no_repeat_ngram_size": 2, "renormalize_logits": True}, {}, 3),
    ({"top_k": 20, "logits_processor": [Forbid(), AfterOdd()]}, {"top_k": 20}, 2),
]


@pytest.mark.parametrize("inputs", [SINGLE, BATCH], ids=["one", "batch"])
@pytest.mark.parametrize(("arguments", "expected", "left"), SAMPLING)
def test_the_sampled_distribution_is_transformers_own(
    model: PreTrainedModel,
    inputs: dict[str, Tensor],
    arguments: dict[str, Any],
    expected: dict[str, Any],
    left: int,
) -> None:
    """Rows in different places, and drafts behind them, against the prepared list itself."""
    prepared: dict[str, Any] = {}

    def prepare(model: PreTrainedModel, input_ids: Tensor, **kwargs: Any) -> Tensor:
        prepared.update(kwargs)
        return input_ids

    model.generate(
        custom_generate=prepare, do_sample=True, max_new_tokens=NEW, **arguments, **inputs
    )
    processors, config = prepared["logits_processor"], prepared["generation_config"]
    options, rest = sampling(processors, config)
    names = ("temperature", "top_k", "top_p", "min_p")
    settings = {"temperature": 1.0, "top_k": None, "top_p": None, "min_p": None, **expected}
    assert {name: getattr(options, name) for name in names} == settings
    assert len(rest) == left
    padded, mask = inputs["input_ids"].tolist(), inputs["attention_mask"].bool()
    rows = [ids[seen].tolist() for ids, seen in zip(inputs["input_ids"], mask, strict=True)]
    checkers = row_checkers(
        prepared["stopping_criteria"],
        padded,
        rows,
        context_length=MAX_POSITIONS,
        device=torch.device("cpu"),
    )
    sampler = RowSampler(
        options, rest, padded=padded, prompts=rows, checkers=checkers, device=torch.device("cpu")
    )
    going = list(range(len(rows)))
    if len(rows) > 2:  # one row ends, and leaves
        checkers[1].push([EOS])
        going.remove(1)
    outputs = [[50 + row, 51, 50 + row][: 1 + row] for row in going]
    contexts = [rows[row] + output for row, output in zip(going, outputs, strict=True)]
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(len(going), 3, VOCABULARY, generator=generator)
    drafts = torch.randint(3, VOCABULARY, (len(going), 2), generator=generator)
    scores = sampler.scores(logits.clone(), contexts, drafts).softmax(-1)
    for place, row in enumerate(going):
        for position in range(3):
            new = outputs[place] + drafts[place, :position].tolist()
            ids = torch.tensor([ids + new for ids in padded])  # transformers' rectangle
            batch = logits[place, position].repeat(len(rows), 1)
            theirs = processors(ids, batch)[row].softmax(-1)
            torch.testing.assert_close(scores[place, position], theirs, atol=1e-6, rtol=1e-5)


# ------------------------------------------------------------------------------ which folder


def engines(model: PreTrainedModel) -> list[Any]:
    return [engine for _, engine in model.__dict__["_multirate_engines"].values()]


def test_a_moved_folder_still_works(model: PreTrainedModel, tmp_path: Path) -> None:
    first = make(model).save_pretrained(tmp_path / "first" / "fast")
    expected = fast(model, str(first), **SINGLE)
    second = tmp_path / "second" / "fast"  # the same name, so the same cached module
    second.parent.mkdir()
    first.rename(second)
    assert torch.equal(fast(model, str(second), **SINGLE), expected)
    third = second.rename(tmp_path / "other")
    assert torch.equal(fast(tiny_model("llama"), str(third), **SINGLE), expected)


def test_folders_of_the_same_name_are_told_apart(model: PreTrainedModel, tmp_path: Path) -> None:
    for seed in (1, 2):
        make(model, seed=seed).save_pretrained(tmp_path / str(seed) / "fast", dtype=torch.float32)
        fast(model, str(tmp_path / str(seed) / "fast"), **SINGLE)
    weights = [next(engine.accelerator.parameters()) for engine in engines(model)]
    expected = [next(make(model, seed=seed).parameters()) for seed in (1, 2)]
    assert len(weights) == 2 and not torch.equal(*weights)
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


def test_a_relative_path_is_found(
    model: PreTrainedModel, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(folder).parent)
    expected = plain(model, **SINGLE)
    assert torch.equal(fast(model, "fast", **SINGLE), expected)
    assert torch.equal(fast(model, "./fast/", **SINGLE), expected)
    assert len(engines(model)) == 1


def test_a_hub_id_is_found_with_its_revision(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = tmp_path / "hub"
    repository = hub / "models--owner--fast.v1"
    commits = ["0123456789abcdef0123456789abcdef01234567", "a" * 40]
    (repository / "refs").mkdir(parents=True)
    for seed, (name, commit) in enumerate(zip(("main", "next"), commits, strict=True)):
        (repository / "refs" / name).write_text(commit)
        accelerator = make(model, seed=seed)
        accelerator.save_pretrained(repository / "snapshots" / commit, dtype=torch.float32)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    expected = plain(model, **SINGLE)
    for arguments in ({}, {"revision": "next"}):
        assert torch.equal(fast(model, "owner/fast.v1", **arguments, **SINGLE), expected)
    weights = [next(engine.accelerator.parameters()) for engine in engines(model)]
    expected_weights = [next(make(model, seed=seed).parameters()) for seed in (0, 1)]
    assert all(torch.equal(a, b) for a, b in zip(weights, expected_weights, strict=True))


def test_generate_py_on_its_own_asks_for_the_folder(model: PreTrainedModel, folder: str) -> None:
    with pytest.raises(MultirateError, match="accelerator=<folder or hub id>"):
        generate_from_folder(model, max_new_tokens=NEW, **SINGLE)
    found = generate_from_folder(
        model, accelerator=folder, max_new_tokens=NEW, do_sample=False, **SINGLE
    )
    assert torch.equal(found, plain(model, **SINGLE))


def test_code_runs_only_if_it_is_trusted(model: PreTrainedModel, folder: str) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(custom_generate=folder, trust_remote_code=False, **SINGLE)


def test_without_multirate_the_error_says_how_to_install_it(
    model: PreTrainedModel, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NotInstalled(importlib.abc.MetaPathFinder):
        def find_spec(self, fullname: str, *args: Any) -> None:
            if fullname.split(".")[0] == "multirate":
                raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)

    for name in [name for name in sys.modules if name.split(".")[0] == "multirate"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [NotInstalled(), *sys.meta_path])
    with pytest.raises(ImportError, match="pip install multirate"):
        fast(model, folder, **SINGLE)


# ------------------------------------------------------------------------------ what is kept


def test_the_second_call_loads_nothing(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[Any] = []
    load, measure = hf.load_accelerator, hf.Engine._measure

    def counting(name: Any, *args: Any, **kwargs: Any) -> Any:
        loads.append(name)
        return load(name, *args, **kwargs)

    measured: list[Any] = []
    monkeypatch.setattr(hf, "load_accelerator", counting)
    monkeypatch.setattr(
        hf.Engine, "_measure", lambda *args: measured.append(args) or measure(*args)
    )
    folder = tmp_path / "a"
    make(model).save_pretrained(folder)
    for _ in range(3):
        fast(model, str(folder), **SINGLE)
    assert (len(loads), len(measured)) == (1, 1)
    make(model, seed=5).save_pretrained(folder, overwrite=True)
    fast(model, str(folder), **SINGLE)
    assert len(loads) == 2 and len(engines(model)) == 1
    fast(model.bfloat16(), str(folder), **SINGLE)
    assert len(loads) == 3
    assert engines(model)[0].accelerator.entry is None
    assert next(engines(model)[0].accelerator.parameters()).dtype == torch.bfloat16


def test_the_model_is_let_go_and_can_be_copied(folder: str) -> None:
    model = tiny_model("llama")
    names = list(model.state_dict())
    expected = fast(model, folder, **SINGLE)
    assert list(model.state_dict()) == names
    assert torch.equal(plain(model, **SINGLE), expected)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not engines(other)
        assert torch.equal(fast(other, folder, **SINGLE), expected)
        assert engines(other)[0].base.model is other
    seen = weakref.ref(model)
    del model, other
    gc.collect()
    assert seen() is None


def test_an_accelerator_in_memory_is_used(model: PreTrainedModel) -> None:
    accelerator = make(model)
    expected = plain(model, **BATCH)
    found = model.generate(
        custom_generate=generate_with_accelerator,
        accelerator=accelerator,
        num_assistant_tokens=4,
        max_new_tokens=NEW,
        **BATCH,
    )
    assert torch.equal(found, expected)
    streamer = Collector()
    method = partial(generate_with_accelerator, accelerator=accelerator, streamer=streamer)
    found = model.generate(custom_generate=method, max_new_tokens=NEW, streamer=streamer, **SINGLE)
    assert torch.equal(torch.cat([part.flatten() for part in streamer.parts]), found[0])
    with pytest.raises(MultirateError, match="for another model object"):
        tiny_model("llama").generate(
            custom_generate=generate_with_accelerator,
            accelerator=accelerator,
            max_new_tokens=NEW,
            **SINGLE,
        )


# ------------------------------------------------------------------------------ refused


def cache_in_use(model: PreTrainedModel) -> DynamicCache:
    return model(SINGLE["input_ids"][:, :3], use_cache=True).cache


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 2}, "mode beam_search .* num_beams=1"),
        ({"prompt_lookup_num_tokens": 3}, "mode assisted_generation"),
        ({"assistant_model": tiny_model("llama")}, "leave out assistant_model"),
        ({"return_dict_in_generate": True, "output_scores": True}, "does not keep output_scores"),
        ({"guidance_scale": 1.5}, "Leave out guidance_scale"),
        ({"cache": cache_in_use}, "cannot continue a cache"),
        ({"inputs_embeds": torch.zeros(1, 7, 32)}, "must be input_ids"),
        ({"position_ids": torch.arange(3, 10)[None]}, "position_ids must count"),
        ({"attention_mask": torch.zeros(1, 7)}, "prompt is empty"),
        ({"input_ids": torch.full((1, 3), VOCABULARY)}, f"Token id {VOCABULARY}"),
        ({"input_ids": torch.ones((1, MAX_POSITIONS), dtype=torch.long)}, "Shorten the prompt"),
        ({"streamer": Collector(), **BATCH}, "A streamer serves one prompt"),
        ({"num_assistant_tokens": 0}, "num_draft_tokens=0 is not allowed"),
        ({"num_assistant_tokens": "many"}, "num_draft_tokens='many' is not allowed"),
        ({"num_assistant_tokens": 4, "do_sample": True, "temperature": 1e-9}, "overflows float32"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_what_would_be_ignored_is_refused(
    model: PreTrainedModel, folder: str, arguments: dict[str, Any], message: str
) -> None:
    arguments = {
        key: v(model) if callable(v) and key == "cache" else v for key, v in arguments.items()
    }
    arguments = {**({} if "input_ids" in arguments else SINGLE), **arguments}
    with pytest.raises(MultirateError, match=message):
        fast(model, folder, **arguments)


def test_a_typing_mistake_is_refused_as_by_transformers(
    model: PreTrainedModel, folder: str
) -> None:
    with pytest.raises(ValueError, match="temprature"):
        fast(model, folder, temprature=0.5, **SINGLE)


def test_a_folder_for_another_model_is_refused(folder: str) -> None:
    with pytest.raises(MultirateError, match="has another config"):
        fast(tiny_model("llama", rms_norm_eps=1e-3), folder, **SINGLE)
