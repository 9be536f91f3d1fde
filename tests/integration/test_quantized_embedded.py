"""The embedded model in 4 bits: its own numbers exactly, and the accelerator that ships still drafts."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

import multirate
from multirate.bench.cost_card import step_weights
from multirate.bench.prompts import read_prompts
from multirate.cli.info import model_facts
from multirate.config.errors import MultirateError
from multirate.decode.engine import Engine
from multirate.models import packing
from multirate.models.embedded import EMBEDDED_NAME
from multirate.models.forms import choose_form
from multirate.models.packed import can_pack
from multirate.models.quantized import QuantizedLinear

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        not can_pack("cpu") or shutil.which("g++") is None,
        reason="the kernel is for x86 CPUs with AVX2, and g++ builds it",
    ),
]


@torch.inference_mode()
def log_probabilities(engine: Engine, ids: Tensor) -> Tensor:
    base, n = engine.base, ids.shape[1]
    block, arena = base.block([0], n), base.arena(rows=1, max_len=n)
    h = base.run_layers(base.embed(ids), 0, base.num_layers, block, arena)
    return base.head(h)[0].log_softmax(-1)


@pytest.fixture(scope="module")
def int4() -> Engine:
    return multirate.load(EMBEDDED_NAME, "default", quantize="int4", device="cpu")


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_nothing_is_lost(kind: str, int4: Engine) -> None:
    """Its file has Q4_1 layers and a Q8_0 head: "int8" finds that 4 bits hold the layers."""
    engine = int4 if kind == "int4" else multirate.load(EMBEDDED_NAME, quantize=kind, device="cpu")
    layers = [m for m in engine.base.model.modules() if isinstance(m, QuantizedLinear)]
    assert sorted(m.bits for m in layers) == [4] * 120 + [8]  # siblings are one
    text = "The tides are caused by the moon, whose gravity pulls the oceans towards it."
    ids = torch.tensor([engine.tokenizer(text).input_ids])
    full = multirate.load(EMBEDDED_NAME, dtype="float32", device="cpu")
    expected, found = log_probabilities(full, ids), log_probabilities(engine, ids)
    # The same weights: sums in another order, and with AVX512-VNNI inputs of 16 bits, are all there is.
    assert (found - expected).abs().max() < 2e-2
    assert (expected.exp() * (expected - found)).sum(-1).mean() < 1e-6


def test_info_tells_its_bytes(int4: Engine) -> None:
    facts = model_facts(choose_form(EMBEDDED_NAME, device="cpu"))
    model = int4.base.model
    held = sum(t.nbytes for t in {*model.parameters(), *model.buffers()})
    assert facts["dtype"] == "int4" and facts["step_weight_bytes"] == step_weights(int4.base)[1]
    assert facts["weight_bytes"] == pytest.approx(held, rel=1e-5)  # rotary frequencies


def test_the_accelerator_is_accepted_as_before(int4: Engine) -> None:
    """It was trained beside the float32 model; here its own layers have 8 bits."""
    usual = multirate.load(EMBEDDED_NAME, "default", dtype="packed", device="cpu")
    accepted = {}
    settings = {"max_new_tokens": 32, "ignore_eos": True}
    prompts = [row.content for row in read_prompts("mt_bench", limit=4).rows]
    for name, engine in (("int4", int4), ("packed", usual)):
        results = [
            engine.generate(p, num_draft_tokens=3, draft_width=1, **settings) for p in prompts
        ]
        counts = [r.speculation for r in results]
        accepted[name] = sum(c.num_accepted_tokens for c in counts) / sum(
            c.num_drafts for c in counts
        )
        if name == "int4":
            plain = [engine.generate(p, strategy="plain", **settings) for p in prompts]
            assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    assert accepted["int4"] == pytest.approx(accepted["packed"], abs=0.05)


def test_where_the_kernel_cannot_be_built_the_default_is_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> None:
        raise MultirateError("it does not build")

    monkeypatch.setattr(packing, "load_kernel", fails)
    packing.has_kernel.cache_clear()
    try:
        with pytest.warns(UserWarning, match="packed as 16 bits by FBGEMM: it does not build"):
            engine = multirate.load(EMBEDDED_NAME, device="cpu")
        assert engine.base.dtype_name == "packed"
    finally:
        packing.has_kernel.cache_clear()
    monkeypatch.undo()
    assert multirate.load(EMBEDDED_NAME, device="cpu").base.dtype_name == "int4"
