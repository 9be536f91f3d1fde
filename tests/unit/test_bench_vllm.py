"""vLLM in another Python: the real worker script, with a stand-in for the library."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from benching import make_engine, write
from tiny_models import MAX_POSITIONS

from multirate.bench.methods import METHODS
from multirate.bench.options import SpeculativeOptions
from multirate.bench.prompts import read_prompts
from multirate.bench.registry import Output
from multirate.bench.speculative import bench_speculative
from multirate.config.errors import MultirateError
from multirate.decode.engine import Engine

NEW = 6

# Counts up from a prompt's last token, says what it was made with, and prints into stdout as vLLM does.
FAKE = """
import json, os, sys
from types import SimpleNamespace as Space

__version__ = "0.32.0"
drafts = 0

class LLM:
    def __init__(self, **settings):
        print("INFO loading")
        if settings["model"] == "broken":
            raise ValueError("no such model")
        self.settings = settings
        threads = os.environ["OMP_NUM_THREADS"]
        json.dump(settings | {"threads": threads}, open(os.environ["SEEN"], "a"))

    def generate(self, prompts, params, use_tqdm):
        global drafts
        print("INFO generating")
        if params.max_tokens == 1:
            sys.exit("out of memory")
        drafts += 4
        outputs = []
        for prompt in prompts:
            last = prompt["prompt_token_ids"][-1]
            ids = [last + i for i in range(1, params.max_tokens + 1)]
            stop = [i for i, token in enumerate(ids, 1) if token in params.stop_token_ids]
            outputs.append(Space(outputs=[Space(token_ids=ids[: stop[0]] if stop else ids)]))
        return outputs

    def get_metrics(self):
        name = "vllm:spec_decode_num_"
        return [
            Space(name="vllm:other", value=9),
            Space(name=name + "drafts", value=drafts),
            Space(name=name + "draft_tokens", value=3 * drafts),
            Space(name=name + "accepted_tokens", value=drafts // 2),
            Space(name=name + "accepted_tokens_per_pos", values=[drafts // 4, drafts // 4, 0]),
        ]

class SamplingParams(Space):
    pass
"""


@pytest.fixture
def engine() -> Engine:
    return make_engine()


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A vLLM for this Python; what it was made with."""
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "vllm.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "library"))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    return tmp_path / "seen"


def options(*methods: str, **settings: object) -> SpeculativeOptions:
    return SpeculativeOptions(methods, NEW, vllm_python=sys.executable, **settings)


def test_it_gets_ids_and_gives_ids(engine: Engine, seen: Path) -> None:
    engine.base.model.generation_config.eos_token_id = [9, 2]
    method = METHODS["vllm"].make(engine, options("vllm", batch=2))
    method.prepare([[[5, 6], [40]]])
    assert method.run([[5, 6], [40]], 4) == [Output([7, 8, 9]), Output([41, 42, 43, 44])]
    assert method.run([[50]], 2) == [Output([51, 52])]
    method.close()
    made = seen.read_text()
    assert '"model": "tiny", "dtype": "bfloat16", "max_model_len": 8, "max_num_seqs": 2' in made
    assert '"speculative_config": null' in made and '"enable_prefix_caching": false' in made


def test_what_was_drafted_is_counted_call_by_call(engine: Engine, seen: Path) -> None:
    method = METHODS["vllm-ngram"].make(engine, options("vllm-ngram"))
    method.prepare([[[3] * MAX_POSITIONS]])
    method.run([[5]], 4)
    (output,) = method.run([[5]], 4)
    method.close()
    assert '"num_speculative_tokens": 10' in seen.read_text()
    assert f'"max_model_len": {MAX_POSITIONS}' in seen.read_text()
    speculation = output.speculation
    assert (speculation.num_drafts, speculation.num_draft_tokens) == (4, 12)
    assert speculation.mean_acceptance_length == 1.5
    assert speculation.per_position_acceptance_rate == [0.25, 0.25, 0]


def test_it_is_measured_like_the_others(engine: Engine, seen: Path, tmp_path: Path) -> None:
    prompts = read_prompts(write(tmp_path, {"prompt": "AB"}, {"prompt": "ABC"}))
    report = bench_speculative(engine, prompts, options("plain", "vllm", "vllm-ngram"))
    vllm = report.methods["vllm"]
    assert vllm.identical is not None and vllm.speedup_vs_plain > 0
    assert report.methods["vllm-ngram"].speculation.num_drafts == 8  # not the warm-up's
    assert report.provenance["vllm"] == "0.32.0"
    assert report.provenance["own_dtypes"]["vllm"]["near_tie_tolerance"] == 0.25


def test_what_is_missing_is_told(engine: Engine, seen: Path) -> None:
    with pytest.raises(MultirateError, match=r"need a Python that has vLLM .*--vllm-python PYTHON"):
        SpeculativeOptions(("vllm",))
    with pytest.raises(MultirateError, match=r"There is no Python /nosuch/python"):
        SpeculativeOptions(("vllm-ngram",), vllm_python="/nosuch/python")
    engine.base.config.name_or_path = "broken"
    method = METHODS["vllm"].make(engine, options("vllm"))
    with pytest.raises(MultirateError, match=r"failed: ValueError: no such model\. Check that"):
        method.prepare([[[1]]])
    method.close()
    engine.base.config.name_or_path = "tiny"
    method.prepare([[[1]]])
    with pytest.raises(MultirateError, match="failed: out of memory"):
        method.run([[1]], 1)
    method.close()
    (seen.parent / "library" / "vllm.py").unlink()
    with pytest.raises(MultirateError, match="No module named 'vllm'"):
        method.prepare([[[1]]])
    method.close()
