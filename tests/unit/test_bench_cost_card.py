"""The floor of a plain step: what is counted of a model, and what is divided by what."""

from __future__ import annotations

import pytest
import torch
from benching import make_engine
from tiny_models import tiny_model

from multirate.bench import cost_card
from multirate.bench.cost_card import CostCard, measure_cost_card, step_weights
from multirate.decode.engine import Engine
from multirate.models.base import BaseModel
from multirate.models.packed import can_pack


def test_all_weights_but_the_embeddings_are_read() -> None:
    base = BaseModel(tiny_model("llama"))
    parameters = sum(p.numel() for p in base.model.parameters())
    count = parameters - base.embed_tokens.weight.numel()  # untied: the head is there besides
    assert step_weights(base) == (count, 4 * count)
    tied = BaseModel(tiny_model("gemma3_text"))
    assert tied.lm_head.weight is tied.embed_tokens.weight  # looked up, and the head is read
    assert step_weights(tied)[0] == sum(p.numel() for p in tied.model.parameters())
    half = BaseModel(tiny_model("llama").to(torch.bfloat16))
    assert step_weights(half) == (count, 2 * count)


def test_of_experts_those_that_a_token_meets() -> None:
    base = BaseModel(tiny_model("mixtral"))  # two of four
    experts = [p for p in base.layers.parameters() if p.dim() == 3]
    assert experts and {p.shape[0] for p in experts} == {4}
    others = sum(p.numel() for p in base.model.parameters()) - base.embed_tokens.weight.numel()
    count = others - sum(p.numel() for p in experts) // 2
    assert step_weights(base) == (count, 4 * count)


@pytest.mark.skipif(not can_pack("cpu"), reason="needs an x86 CPU with AVX2")
@pytest.mark.parametrize("kind", ["packed", "int8"])
def test_packed_weights_count_as_they_are_stored(kind: str) -> None:
    base = BaseModel(tiny_model("llama").half())
    dense = step_weights(base)[0]
    layers = list(base.layers.modules())
    linears = [m for m in layers if isinstance(m, torch.nn.Linear)] + [base.lm_head]
    matrices = sum(m.weight.numel() for m in linears)
    base.pack(kind)
    count, size = step_weights(base)
    packed = [m for m in base.model.modules() if hasattr(m, "in_features")]
    assert (count, len(packed)) == (dense, 4 * base.num_layers + 1)  # siblings are one
    assert size == sum(m.nbytes for m in packed) + 4 * (dense - matrices)  # norms are float32


def test_the_fraction_is_of_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    card = CostCard(rows=2, context=10, weight_bytes=600, kv_bytes_per_token=20, bandwidth=100.0,
                    matmul_rate=50.0, flops=200.0, step_seconds=20.0)  # fmt: skip
    assert card.floor_seconds == 10.0  # 600 + 2 x 10 x 20 bytes
    assert (card.matmul_seconds, card.roofline_fraction) == (4.0, 0.5)
    assert card.to_dict()["roofline_fraction"] == 0.5
    monkeypatch.setattr(cost_card, "STREAM_BYTES", 2**20)
    monkeypatch.setattr(cost_card, "MATMUL_SIZE", 32)
    engine = make_engine()
    bare = Engine(engine.base, tokenizer=engine.tokenizer)  # nothing drafts
    card = measure_cost_card(bare, rows=2, context=300)
    assert (card.rows, card.context) == (2, 512)
    config = engine.base.config
    head_dim = config.hidden_size // config.num_attention_heads
    assert card.kv_bytes_per_token == (
        2 * 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    )
    assert card.flops == 4 * step_weights(engine.base)[0]
    assert min(card.bandwidth, card.matmul_rate, card.step_seconds) > 0
