"""Packed float16 weights: the same numbers as a float32 model of those weights, and still lossless."""

from __future__ import annotations

import pytest
import torch
from tiny_models import TINY_MODELS, tiny_model
from torch import nn

import multirate
from multirate.config.errors import MultirateError
from multirate.decode.engine import Engine
from multirate.models.architectures import ARCHITECTURES
from multirate.models.base import BaseModel
from multirate.models.forms import choose_form
from multirate.models.packed import PackedLinear, can_pack
from multirate.streams.accelerator import Accelerator

pytestmark = pytest.mark.skipif(not can_pack("cpu"), reason="FBGEMM is for x86 CPUs with AVX2")

DENSE = [n for n in TINY_MODELS if not ARCHITECTURES[n.partition("-")[0]].experts]


def rounded(model: nn.Module) -> nn.Module:
    """The float32 model whose weights are those that float16 can hold."""
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    return model


@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_multiplies_by_its_float16_weights(bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(70, 45, bias=bias)
    packed, x = PackedLinear.of(linear), torch.randn(2, 3, 70)
    expected = nn.functional.linear(x, linear.weight.half().float(), linear.bias)
    torch.testing.assert_close(packed(x), expected, rtol=1e-5, atol=1e-5)
    assert packed.nbytes == 2 * 70 * 45


def test_a_row_depends_on_the_rows_beside_it_by_float32_rounding_only() -> None:
    """What makes a verified block write what plain steps write."""
    torch.manual_seed(0)
    packed, x = PackedLinear(torch.randn(96, 64) / 8), torch.randn(17, 64)
    alone = torch.cat([packed(row[None]) for row in x])
    for n in (2, 3, 5, 8, 17):
        torch.testing.assert_close(packed(x[:n]), alone[:n], rtol=1e-6, atol=2e-6)


@torch.inference_mode()
@pytest.mark.parametrize("name", DENSE)
def test_logits_are_those_of_the_float16_weights(name: str) -> None:
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    expected = rounded(tiny_model(name))(ids).logits

    model = tiny_model(name)
    for (
        parameter
    ) in model.parameters():  # as loading does: buffers of rotary frequencies stay float32
        parameter.data = parameter.data.half()
    base = BaseModel(model)
    base.pack()
    arena = base.arena(rows=2, max_len=12)
    block = base.block([0, 0], 12)
    found = base.head(base.run_layers(base.embed(ids), 0, base.num_layers, block, arena))

    assert found.dtype == torch.float32 and base.dtype_name == "packed"
    assert not [m for m in base.model.modules() if isinstance(m, nn.Linear)]
    # Gemma scales embeddings inside its own module, which stays float16.
    tolerance = 2e-2 if name.startswith("gemma") else 2e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("preset", ["carry", "paper"])
def test_a_packed_accelerator_drafts_the_same_and_stays_lossless(preset: str) -> None:
    shape = {"draft_vocab_size": 60} | ({"rank": 4} if preset == "carry" else {})

    def engine(packed: bool) -> Engine:
        base = BaseModel(rounded(tiny_model("llama")))
        torch.manual_seed(1)
        accelerator = Accelerator.from_preset(preset, base, **shape)
        for parameter in accelerator.parameters():
            parameter.data = torch.randn_like(parameter) * 0.1
        if packed:
            accelerator.pack()
            base.pack()
        return Engine(base, accelerator=accelerator)

    prompts = [[5, 6, 7, 8], [9, 10]]
    settings = {"max_new_tokens": 24, "ignore_eos": True}
    usual, packed = engine(False), engine(True)
    for fast, slow in zip(
        packed.generate(prompts, num_draft_tokens=3, **settings),
        packed.generate(prompts, strategy="plain", **settings),
        strict=True,
    ):
        assert fast.token_ids == slow.token_ids and len(fast.token_ids) == 24
        assert fast.dtype == "packed"
    expected = usual.generate(prompts[0], num_draft_tokens=3, **settings).speculation
    found = packed.generate(prompts[0], num_draft_tokens=3, **settings).speculation
    assert found.num_drafts == expected.num_drafts > 0


def test_experts_are_refused_and_load_in_bfloat16(tmp_path) -> None:
    tiny_model("olmoe").save_pretrained(tmp_path / "moe")
    form = choose_form(tmp_path / "moe", device="cpu")
    assert (form.stored, form.packing) == (torch.bfloat16, None)
    with pytest.raises(MultirateError, match="'packed' is for models without experts"):
        multirate.load(tmp_path / "moe", dtype="packed", device="cpu")


def test_packed_is_what_a_cpu_gets_by_default(tmp_path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "dense")
    default = multirate.load(tmp_path / "dense", device="cpu")
    assert default.base.packed and default.base.dtype == torch.float32
    chosen = multirate.load(tmp_path / "dense", device="cpu", dtype="bfloat16")
    assert not chosen.base.packed and chosen.base.dtype_name == "bfloat16"
    same = [e.generate([3, 4, 5], max_new_tokens=4).dtype for e in (default, chosen)]
    assert same == ["packed", "bfloat16"]
