"""Compiled layers compute what eager ones do, for every size with the same few libraries."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tiny_models import TINY_MODELS, tiny_model

import multirate
from multirate.config.errors import MultirateError
from multirate.decode.engine import Engine
from multirate.models.ahead import _code, _signature
from multirate.models.architectures import ARCHITECTURES
from multirate.models.attention import GROUPED, group_queries
from multirate.models.base import BaseModel
from multirate.models.compiled import compile_mode
from multirate.models.packed import can_pack
from multirate.streams.accelerator import Accelerator

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
DENSE = [n for n in TINY_MODELS if not ARCHITECTURES[n.partition("-")[0]].experts]


def libraries(base: BaseModel) -> int:
    """How many a model's layers and draft steps run through."""
    assert base._compiled is not None and base._compiled._ahead is not None
    return len(base._compiled._ahead._libraries)


@torch.inference_mode()
def logits(
    base: BaseModel, starts: list[int], n: int, *, tree: bool = False, last: int | None = None
) -> torch.Tensor:
    """Of a block behind texts of these lengths, which were run before it; or of its last positions,
    which are run again."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(base.vocab_size, (len(starts), max(starts) + n), generator=generator)
    arena = base.arena(rows=len(starts), max_len=64)
    text = base.block([0] * len(starts), max(starts))
    base.run_layers(base.embed(ids[:, : max(starts)]), 0, base.num_layers, text, arena)
    shape = {}
    if tree:
        mask = torch.eye(n, dtype=torch.bool)
        mask[:, 0] = True
        shape = {"depths": torch.arange(n).clamp(max=1), "block_mask": mask}
    block = base.block(starts, n, **shape)
    h = base.embed(ids[:, max(starts) :])
    out = base.run_layers(h, 0, base.num_layers, block, arena)
    if last is not None:
        out = base.run_layers(h[:, -last:], 0, base.num_layers, block.tail(last), arena)
    return base.head(out)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "mode", "batch"), [("llama", "layers", True), ("mistral", "model", False)]
)
def test_compiled_layers_compute_what_eager_ones_do(name: str, mode: str, batch: bool) -> None:
    model = tiny_model(name, num_hidden_layers=2)
    group_queries(model, kernel=False)
    base = BaseModel(model)
    cases = [([9], 1, False, None), ([9], 4, False, None), ([20], 6, True, 2)]
    if batch:
        cases += [([11, 7, 3], 1, False, None), ([5, 8], 3, True, None), ([11, 7, 3], 5, False, 2)]
        cases += [([6, 6], 4, True, None), ([6, 6], 4, True, 2), ([6, 6], 4, False, 1)]
    expected = [logits(base, s, n, tree=tree, last=last) for s, n, tree, last in cases]
    base.compile(mode)
    base.warm_up(3 if batch else 1)
    assert base.compile_mode == mode
    compiled = libraries(base)
    assert compiled == (4 if batch else 2)
    for (starts, n, tree, last), want in zip(cases, expected, strict=True):
        found = logits(base, starts, n, tree=tree, last=last)
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    assert libraries(base) == compiled  # no size needed a library of its own
    assert base.compile_mode == mode


@needs_compiler
@pytest.mark.skipif(not can_pack("cpu"), reason="FBGEMM is for x86 CPUs with AVX2")
@pytest.mark.parametrize("kind", ["packed", "int4"])
def test_speculation_over_compiled_packed_weights_writes_what_plain_decoding_does(
    kind: str,
) -> None:
    base = BaseModel(tiny_model("llama"))
    stream = Accelerator.from_preset("carry", base)
    stream.pack(kind)
    base.pack(kind)
    engine = Engine(base, accelerator=stream)
    settings = {"max_new_tokens": 12, "ignore_eos": True}
    expected = engine.generate([3, 1, 4, 1, 5], strategy="plain", **settings)
    base.compile("layers")
    assert engine.drafter is not None
    base.warm_up(1)
    engine.drafter.warm_up(1)
    compiled = libraries(base)
    for strategy in ("plain", "speculative"):
        found = engine.generate([3, 1, 4, 1, 5], strategy=strategy, num_draft_tokens=2, **settings)
        assert found.token_ids == expected.token_ids
    assert base.compile_mode == "layers"
    assert libraries(base) == compiled == 5


def test_without_a_compiler_the_reason_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MULTIRATE_CACHE", str(tmp_path))
    monkeypatch.setattr("multirate.models.kernels.find_compiler", lambda: None)
    base = BaseModel(tiny_model("llama"))
    base.compile("layers")
    with pytest.warns(UserWarning, match=r"layers run eagerly: .*apt install g\+\+"):
        base.warm_up(1)


def fail(*args: object) -> None:
    raise RuntimeError("\nno compiler here\nand much more")


def test_what_cannot_be_compiled_runs_eagerly_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    base = BaseModel(tiny_model("llama"))
    expected = logits(base, [9], 4)
    base.compile("layers")

    monkeypatch.setattr(base._compiled, "_ahead", fail)
    with pytest.warns(UserWarning, match="layers run eagerly: no compiler here$"):
        base.warm_up(1)
    assert base.compile_mode is None
    assert torch.equal(logits(base, [9], 4), expected)


def test_layers_of_another_attention_are_compiled_for_themselves() -> None:
    """Eager attention adds its masks, the others read bools: a library for one makes nonsense there."""
    eager, torchs, grouped = (tiny_model(n) for n in ("llama-eager", "llama", "llama"))
    group_queries(grouped, kernel=False)
    models = (eager, torchs, grouped, tiny_model("llama", seed=1))
    signatures = [_signature(model.model.layers[0]) for model in models]
    assert len(set(signatures)) == 3 and signatures[1] == signatures[3]


def test_a_draft_step_of_other_code_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry's function is in another file than the module that calls it."""
    stream = Accelerator.from_preset("carry", BaseModel(tiny_model("llama")))
    read, edited = Path.read_bytes, {"entry.py": b"# edited"}
    before = stream._whole._stack(own=False, picks=False).before
    assert before is not None
    signatures = []
    for edits in ({}, edited, {}):
        monkeypatch.setattr(
            Path, "read_bytes", lambda self, e=edits: read(self) + e.get(self.name, b"")
        )
        _code.cache_clear()
        signatures.append(_signature(before))
    assert signatures[0] == signatures[2] != signatures[1]


def test_an_unknown_mode_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(MultirateError, match=r"'fast'.*auto, layers, model, graphs, none"):
        multirate.load("/nowhere", compile="fast")


@pytest.mark.parametrize(
    ("mode", "device", "compiler", "chosen"),
    [
        ("auto", "cpu", True, "layers"),
        ("auto", "cpu", False, None),
        ("auto", "cuda", True, None),
        ("model", "cuda", False, "model"),
        ("none", "cpu", True, None),
        (None, "cpu", True, None),
    ],
)
def test_what_a_mode_stands_for(
    monkeypatch: pytest.MonkeyPatch,
    mode: str | None,
    device: str,
    compiler: bool,
    chosen: str | None,
) -> None:
    monkeypatch.setattr("multirate.models.compiled.can_compile", lambda: compiler)
    assert compile_mode(mode, device) == chosen


@pytest.mark.parametrize("name", DENSE)
def test_grouped_attention_computes_what_sdpa_does(name: str) -> None:
    model = tiny_model(name)
    base = BaseModel(model)
    sizes = [([9], 1), ([9], 4), ([11, 7, 3], 3)]
    expected = [logits(base, starts, n) for starts, n in sizes]
    stock = model.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=8, do_sample=False)
    before = model.config._attn_implementation
    group_queries(model, kernel=False)
    assert model.config._attn_implementation == (GROUPED if before == "sdpa" else before)
    for (starts, n), want in zip(sizes, expected, strict=True):
        torch.testing.assert_close(logits(base, starts, n), want, rtol=1e-5, atol=1e-5)
    again = model.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=8, do_sample=False)
    assert torch.equal(again, stock)
