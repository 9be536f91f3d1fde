"""Cost formulas against torch's FLOP counter and against modules that are built and counted."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from tiny_models import VOCABULARY, tiny_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from multirate.analyze.costs import (
    Cost,
    ModelShape,
    eagle3_parameters,
    eagle_parameters,
    lean_layer,
    linear_parameters,
    medusa_parameters,
    slow_layer,
    tied_layer,
)
from multirate.analyze.stacks import Stack, run_stack
from multirate.analyze.states import CachedText, read_batch
from multirate.analyze.text import Text
from multirate.models.base import BaseModel

MODELS = ["llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "olmo2", "mixtral", "gpt_oss"]
LENGTH = 12
START = 5  # kept positions begin here


def frozen(model: str, **changes: object) -> BaseModel:
    base = BaseModel(tiny_model(model, **changes).requires_grad_(False))
    if base.architecture.experts:
        # Expert by expert over the tokens that chose it: the counter cannot see grouped kernels.
        base.model.set_experts_implementation("eager")
    return base


def text_of(base: BaseModel, layers: set[int]) -> CachedText:
    ids = torch.randint(
        3, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    text = Text(ids, ((START + 2, LENGTH),))
    return CachedText(base, [read_batch(base, [text], layers=layers)])


def counted(base: BaseModel, stack: Stack) -> tuple[float, nn.Module]:
    """FLOPs per position of one accelerated layer over the kept positions of a text."""
    text = text_of(base, {stack.start, *stack.targets})
    batch = text.batches[0]
    layers = stack.layers(base)
    layers.requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        run_stack(layers, text, batch, batch.states[stack.start])
    return counter.get_total_flops() / (batch.stop - batch.start), layers[0]


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_lean_layer_flops(model: str, heads: int) -> None:
    base = frozen(model)
    flops, layer = counted(base, Stack("lean", 1, (3,), rank=6, heads=heads))
    shape = ModelShape.of(base)
    cost = lean_layer(shape, rank=6, heads=heads, scored=LENGTH, number_bytes=4)
    assert cost.flops == flops
    # All of its numbers are read once, and no key or value is written.
    assert cost.weight_bytes == 4 * sum(p.numel() for p in layer.parameters())
    assert cost.kv_written_bytes == 0
    kv_heads = {1: 1, 2: 2, 4: 2}[heads]
    assert cost.kv_bytes == 2 * LENGTH * kv_heads * shape.head_dim * 4


@pytest.mark.parametrize("model", MODELS)
def test_tied_layer_flops(model: str) -> None:
    base = frozen(model, attn_implementation="eager")
    flops, layer = counted(base, Stack("tied", 1, (3,), rank=6))
    adapters = sum(p.numel() for p in layer.parameters())
    # A first draft step over whole rows: every slow position and every row's own are in the product.
    cost = tied_layer(
        ModelShape.of(base), 2, adapter_weights=adapters, number_bytes=4,
        context=LENGTH + LENGTH - START,
    )  # fmt: skip
    assert cost.flops == pytest.approx(flops, rel=1e-9)


@pytest.mark.parametrize("model", MODELS)
def test_slow_layer_flops(model: str) -> None:
    base = frozen(model, attn_implementation="eager")
    ids = torch.randint(3, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    arena = base.arena(rows=1, max_len=LENGTH)
    block = base.block([0], LENGTH)
    h = base.embed(ids)
    with FlopCounterMode(display=False) as counter:
        base.run_layers(h, 0, 1, block, arena)
    cost = slow_layer(ModelShape.of(base), 0, context=LENGTH, number_bytes=2)
    found = counter.get_total_flops() / LENGTH
    assert cost.flops == pytest.approx(found, rel=1e-9)
    assert cost.kv_written_bytes == 2 * sum(
        x[:, :, :1].nbytes // 4 for x in (arena.layers[0].keys, arena.layers[0].values)
    )
    assert cost.kv_bytes == LENGTH * cost.kv_written_bytes


def test_gathered_tokens_cost_less() -> None:
    shape = ModelShape.of(BaseModel(tiny_model("llama")))
    everything = lean_layer(shape, rank=4, heads=2, scored=100, number_bytes=2)
    chosen = lean_layer(shape, rank=4, heads=2, scored=100, summed=10, number_bytes=2)
    known = lean_layer(shape, rank=4, heads=2, scored=10, number_bytes=2)
    saved = 90 * 2 * 2 * shape.head_dim
    assert everything.flops - chosen.flops == saved == chosen.flops - known.flops
    assert everything.kv_bytes - chosen.kv_bytes == saved


def test_costs_add_up() -> None:
    assert Cost(1, 2, 3, 4) + Cost(10, 20, 30, 40) * 2 == Cost(21, 42, 63, 84)
    assert Cost(1, 2, 3, 4).bytes == 5


def built(*modules: nn.Module) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


def test_parameters_of_rivals_by_building_them() -> None:
    base = BaseModel(tiny_model("llama"))
    shape, d = ModelShape.of(base), base.hidden_size
    layer = base.layers[0]
    medusa = [nn.Linear(d, d), nn.Linear(d, VOCABULARY, bias=False)] * 4
    assert medusa_parameters(shape, 4) == built(*medusa)
    assert linear_parameters(d, inputs=3) == built(nn.Linear(3 * d, d))
    # EAGLE: the base's layer without its input norm, and a map of two states.
    input_norm = cast(nn.Module, layer.input_layernorm)
    assert eagle_parameters(shape) == built(layer, nn.Linear(2 * d, d)) - built(input_norm)
    # EAGLE-3: queries, keys and values read two states; norms of input, feature, MLP and output.
    attention = cast(nn.Module, layer.self_attn)
    qkv = built(*(cast(nn.Module, getattr(attention, f"{x}_proj")) for x in "qkv"))
    body = built(layer, nn.Linear(3 * d, d, bias=False)) + qkv + 2 * d
    assert eagle3_parameters(shape, head=False) == body
    assert eagle3_parameters(shape, head=True) == body + VOCABULARY * d
