"""Engines that are not ours: what goes into them and what is counted of what comes out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from benching import make_engine, write
from gguf import GGUFWriter, LlamaFileType
from tiny_models import MAX_POSITIONS, VOCABULARY, tiny_model

from multirate.bench import speculative
from multirate.bench.llama_cpp import file_labels
from multirate.bench.methods import METHODS, bind
from multirate.bench.options import SpeculativeOptions
from multirate.bench.prompts import read_prompts
from multirate.bench.registry import Output
from multirate.bench.speculative import bench_speculative
from multirate.cli.main import main
from multirate.config.errors import MultirateError
from multirate.decode.compare import Comparison, near_tie_tolerance
from multirate.decode.engine import Engine

NEW = 12
STEP = 3


@pytest.fixture
def engine() -> Engine:
    return make_engine()


class FakeLlama:
    """llama-cpp-python's Llama as far as it is used: counts up from the prompt's last token.

    Like the real one it keeps what it has read until it is reset, and never stops by itself.
    """

    made: list[FakeLlama]

    def __init__(self, model_path: str, **settings: Any) -> None:
        if Path(model_path).read_bytes()[:4] != b"GGUF":
            raise ValueError(f"Failed to load model from file: {model_path}")
        self.settings, self.kept, self.calls = settings, 0, []
        self.made.append(self)

    def n_vocab(self) -> int:
        return VOCABULARY

    def reset(self) -> None:
        self.kept = 0

    def generate(self, tokens: list[int], **sampling: float) -> Iterator[int]:
        self.calls.append((list(tokens), sampling, self.kept))
        token = tokens[-1]
        while True:
            self.kept += 1
            token = (token + STEP) % VOCABULARY
            yield token


class FakeLookup:
    def __init__(self, max_ngram_size: int = 2, num_pred_tokens: int = 10) -> None:
        self.num_pred_tokens = num_pred_tokens


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> type[FakeLlama]:
    module, drafting = ModuleType("llama_cpp"), ModuleType("llama_cpp.llama_speculative")
    FakeLlama.made = []
    module.Llama, module.__version__ = FakeLlama, "0.3.36"
    drafting.LlamaPromptLookupDecoding = FakeLookup
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", drafting)
    return FakeLlama


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF")
    return file


@pytest.mark.parametrize("name", ["transformers-lookup", "transformers-early-exit"])
def test_drafting_of_transformers_gives_plain_tokens(engine: Engine, name: str) -> None:
    """On a text that repeats itself, and up to the end of the context."""
    methods = [METHODS[n].make(engine, SpeculativeOptions(("plain",))) for n in ("plain", name)]
    heads = []  # whole passes, and early exits: each asks for logits once
    engine.base.lm_head.register_forward_hook(lambda *_: heads.append(1))
    for ids in ([40, 41, 42] * 6, [50], [40 + i % 9 for i in range(MAX_POSITIONS - 4)]):
        plain, drafted = (method.run([ids], 3 * NEW) for method in methods)
        assert drafted == plain
        assert len(plain[0].token_ids) == min(3 * NEW, MAX_POSITIONS - len(ids))
    del heads[:]
    (output,) = methods[1].run([[40, 41, 42] * 6], 3 * NEW)
    if name == "transformers-lookup":
        assert len(output.token_ids) > len(heads)  # drafts helped
    else:
        assert len(output.token_ids) < len(heads)  # its drafts are passes of their own


def test_transformers_runs_the_stock_model_in_its_own_type(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where our engine's weights are packed; its own rounding then explains larger gaps."""
    stock = tiny_model("llama").to(torch.bfloat16)
    packed = Engine(engine.base, tokenizer=engine.tokenizer, stock=lambda: stock)
    forwards, tolerances = [], []
    stock.register_forward_hook(lambda *_: forwards.append(1))

    def compare(*_: Any, tolerance: float) -> Comparison:
        tolerances.append(tolerance)
        return Comparison(identical=True)

    monkeypatch.setattr(speculative, "compare_outputs", compare)
    prompts = read_prompts(write(tmp_path, {"prompt": "AB"}))
    settings = SpeculativeOptions(("plain", "transformers"), NEW)
    provenance = bench_speculative(packed, prompts, settings).provenance
    assert len(forwards) == 8 + NEW  # warm-up and run
    assert tolerances == [near_tie_tolerance(torch.float32), 0.25]
    assert provenance["dtype"] == "float32"
    assert provenance["own_dtypes"] == {
        "transformers": {"dtype": "bfloat16", "near_tie_tolerance": 0.25}
    }
    assert "own_dtypes" not in bench_speculative(engine, prompts, settings).provenance


def test_llama_cpp_gets_the_ids_and_the_threads(
    engine: Engine, llama: type[FakeLlama], gguf: Path
) -> None:
    settings = SpeculativeOptions(("llama.cpp", "llama.cpp-lookup"), NEW, gguf=(gguf,))
    methods = [METHODS[name].make(engine, settings) for name in settings.methods]
    for method in methods:
        method.prepare([[[5, 6]], [[7, 8, 9]]])
        for ids in ([5, 6], [7, 8, 9]):
            found = method.run([ids], 4)[0].token_ids
            assert found == [(ids[-1] + STEP * i) % VOCABULARY for i in range(1, 5)]
    threads = torch.get_num_threads()
    common = {"n_ctx": 256, "n_threads": threads, "n_threads_batch": threads,
              "n_gpu_layers": 0, "seed": 1, "verbose": False}  # fmt: skip
    assert llama.made[0].settings == common
    drafts = llama.made[1].settings.pop("draft_model")
    assert llama.made[1].settings == {**common, "logits_all": True}
    assert drafts.num_pred_tokens == 10
    greedy = {"temp": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    methods[1].prepare([[[0] * (256 - NEW - 10)]])
    assert llama.made[2].settings["n_ctx"] == 256  # its drafts included
    methods[1].prepare([[[0] * (256 - NEW - 9)]])
    assert llama.made[3].settings["n_ctx"] == 512
    for made in llama.made[:2]:  # nothing is left of the prompt before
        assert made.calls == [([5, 6], greedy, 0), ([7, 8, 9], greedy, 0)]


def test_llama_cpp_stops_where_ours_stops(
    engine: Engine, llama: type[FakeLlama], gguf: Path
) -> None:
    engine.base.model.generation_config.eos_token_id = [5 + 2 * STEP, 9]
    method = METHODS["llama.cpp"].make(
        engine, SpeculativeOptions(("llama.cpp",), NEW, gguf=(gguf,))
    )
    full = [4] * (MAX_POSITIONS - 2)
    method.prepare([[full]])
    assert method.run([[5]], NEW) == [Output([5 + STEP, 5 + 2 * STEP])]
    assert method.run([full], NEW) == [Output([4 + STEP, 4 + 2 * STEP])]  # the context ends


def test_other_weights_are_not_compared(
    engine: Engine, llama: type[FakeLlama], gguf: Path, tmp_path: Path
) -> None:
    names = ("plain", "transformers-lookup", "llama.cpp")
    prompts = read_prompts(write(tmp_path, {"prompt": "AB"}, {"prompt": "ABC"}))
    report = bench_speculative(engine, prompts, SpeculativeOptions(names, NEW, gguf=(gguf,)))
    methods = report.to_dict()["methods"]
    agreement = {
        name: [methods[name][key] for key in ("identical", "near_ties", "differences")]
        for name in names
    }
    assert agreement == {
        "plain": [2, 0, 0], "transformers-lookup": [2, 0, 0], "llama.cpp": [None, None, None],
    }  # fmt: skip
    assert methods["llama.cpp"]["speedup_vs_plain"] > 0
    provenance = report.provenance
    assert (provenance["gguf"], provenance["llama_cpp_python"]) == ("tiny.gguf", "0.3.36")


def test_several_files_are_told_apart(
    engine: Engine, llama: type[FakeLlama], tmp_path: Path
) -> None:
    files = []
    for kind in (LlamaFileType.MOSTLY_Q4_1, LlamaFileType.MOSTLY_Q8_0):
        files.append(tmp_path / f"{len(files)}.gguf")
        writer = GGUFWriter(files[-1], "llama")
        writer.add_file_type(kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
    settings = SpeculativeOptions(("plain", "llama.cpp"), NEW, gguf=tuple(files))
    assert list(bind(engine, settings)) == ["plain", "llama.cpp:Q4_1", "llama.cpp:Q8_0"]
    report = bench_speculative(engine, read_prompts(write(tmp_path, {"prompt": "AB"})), settings)
    assert report.provenance["gguf"] == ["0.gguf", "1.gguf"]
    assert report.methods["llama.cpp:Q8_0"].identical is None
    assert file_labels([*files[:1], files[0].with_name("other.gguf")]) == ["Q4_1", "other"]
    assert file_labels([files[0], files[0]]) == ["0", "0"]


def test_what_is_missing_is_told(
    engine: Engine, llama: type[FakeLlama], gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MultirateError, match=r"need the model as a GGUF file.*--gguf FILE"):
        SpeculativeOptions(("llama.cpp",))
    with pytest.raises(MultirateError, match=r"There is no GGUF file nosuch.gguf"):
        SpeculativeOptions(("llama.cpp-lookup",), gguf=(Path("nosuch.gguf"),))
    with pytest.raises(
        MultirateError, match=r"no method reads it. .*: llama.cpp, llama.cpp-lookup"
    ):
        SpeculativeOptions(("plain",), gguf=(gguf,))
    settings = SpeculativeOptions(("llama.cpp",), gguf=(gguf,))
    monkeypatch.setattr(FakeLlama, "n_vocab", lambda self: 7)
    with pytest.raises(MultirateError, match=rf"another model: .* 7 tokens, .* {VOCABULARY}"):
        METHODS["llama.cpp"].make(engine, settings).prepare([[[1]]])
    gguf.write_bytes(b"text")
    with pytest.raises(MultirateError, match=r"llama.cpp cannot load .*tiny.gguf: Failed to load"):
        METHODS["llama.cpp"].make(engine, settings).prepare([[[1]]])
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # as if it were not installed
    with pytest.raises(MultirateError, match="pip install llama-cpp-python"):
        SpeculativeOptions(("llama.cpp",), gguf=(gguf,))


def test_sampling_is_from_the_whole_distribution(
    engine: Engine, llama: type[FakeLlama], gguf: Path, tmp_path: Path
) -> None:
    ids, temperature = [40, 41, 42], 2.0
    names = ("plain", "transformers", "transformers-lookup", "llama.cpp", "multirate")
    settings = SpeculativeOptions(names, NEW, gguf=(gguf,), temperature=temperature)
    state = torch.random.get_rng_state()
    runs = {name: METHODS[name].make(engine, settings) for name in names}
    for name in names:
        runs[name].prepare([[ids]])
        first = runs[name].run([ids], NEW)
        assert len(first[0].token_ids) == NEW
        assert runs[name].run([ids], NEW) == first  # seeds are fixed
    assert torch.equal(torch.random.get_rng_state(), state)
    own = engine.generate(
        ids, temperature=temperature, seed=1, strategy="plain", max_new_tokens=NEW
    )
    assert runs["plain"].run([ids], NEW) == [Output(own.token_ids)]
    assert llama.made[0].calls[0][1] == {"temp": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    for last in range(10, 30):  # some of them draw a token that is not among the 50 likeliest
        logits = engine.base.model(torch.tensor([[*ids, last]])).logits[0, -1]
        with torch.random.fork_rng():
            torch.manual_seed(1)
            drawn = torch.multinomial(torch.softmax(logits / temperature, -1), 1)
        assert runs["transformers"].run([[*ids, last]], 1) == [Output(drawn.tolist())]
    prompts = read_prompts(write(tmp_path, {"prompt": "AB"}))
    report = bench_speculative(engine, prompts, SpeculativeOptions(("plain",), temperature=0.5))
    assert report.methods["plain"].identical is None
    assert report.provenance["temperature"] == 0.5
    assert report.provenance["decoding"] == "temperature 0.5, seed 1, one prompt at a time"
    with pytest.raises(MultirateError, match=r"temperature=-1.0 is not allowed"):
        SpeculativeOptions(temperature=-1)


def test_the_embedded_models_own_file_is_the_default(
    engine: Engine,
    llama: type[FakeLlama],
    gguf: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("multirate.load", lambda *_, **__: engine)
    monkeypatch.setattr("multirate.cli.bench.embedded_gguf", lambda: gguf)
    prompts = write(tmp_path, {"prompt": "AB"})

    def run(*arguments: object) -> tuple[int, str, str]:
        command = ["multirate", "bench", "speculative", "--prompts", prompts, *arguments]
        monkeypatch.setattr(sys, "argv", [str(argument) for argument in command])
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0), *capsys.readouterr()

    code, out, _ = run("smollm2-135m", "--methods", "plain,llama.cpp", "--json")
    assert (code, json.loads(out)["provenance"]["gguf"]) == (0, gguf.name)
    code, out, err = run("other", "--methods", "llama.cpp")
    assert (code, out) == (2, "") and "--gguf FILE" in err
    code, out, _ = run("other", "--methods", "plain,llama.cpp", "--gguf", gguf)
    (row,) = [line.split() for line in out.splitlines() if line.startswith("llama.cpp")]
    assert code == 0 and row[-1] == "-" and "near-tie is" in out
    code, out, _ = run("other", "--methods", "plain", "--temperature", 0.5)
    assert code == 0 and "temperature 0.5, 1 prompts" in out and "near-tie is" not in out
