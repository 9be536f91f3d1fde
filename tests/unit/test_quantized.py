"""Quantised weights: the numbers of their grid, rows independent of each other, still lossless."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import TINY_MODELS, tiny_model
from torch import Tensor, nn

import multirate
from multirate.config.errors import MultirateError
from multirate.decode.engine import Engine
from multirate.models import kernels, quantized
from multirate.models.architectures import ARCHITECTURES
from multirate.models.base import BaseModel
from multirate.models.packed import can_pack
from multirate.models.quantized import (
    HalfLinear,
    QuantizedLinear,
    is_exact,
    quantize_weight,
    require_quantizable,
)
from multirate.streams.accelerator import Accelerator

pytestmark = pytest.mark.skipif(
    not can_pack("cpu") or shutil.which("g++") is None,
    reason="the kernel is for x86 CPUs with AVX2, and g++ builds it",
)

DENSE = [n for n in TINY_MODELS if not ARCHITECTURES[n.partition("-")[0]].experts]


@pytest.fixture(autouse=True, scope="module")
def kernel() -> None:
    quantized.load_kernel()


def restored(weight: Tensor, bits: int) -> Tensor:
    """A weight matrix after a round trip through its grid."""
    return quantize_weight(weight, bits).groups().flatten(1)[:, : weight.shape[1]]


def on_grid(model: nn.Module, bits: int) -> nn.Module:
    """The float32 model of quantised weights: 8 bits in its LM head, embeddings as they were."""
    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = restored(module.weight, 8 if module is head else bits)
            module.weight = nn.Parameter(weight, requires_grad=False)
    return model


def is_near(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether it is the product of these numbers: 16-bit inputs with VNNI, else float32."""
    expected = nn.functional.linear(
        x.double(), weight.double(), bias if bias is None else bias.double()
    )
    error = ((found - expected).square().mean() / expected.square().mean()).sqrt()
    return bool(error < (5e-5 if kernels.vector_flags() == kernels._VNNI else 1e-6))


def logits(base: BaseModel, ids: Tensor) -> Tensor:
    rows, n = ids.shape
    arena, block = base.arena(rows=rows, max_len=n), base.block([0] * rows, n)
    return base.head(base.run_layers(base.embed(ids), 0, base.num_layers, block, arena))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(64, 96), (45, 70), (1, 5)])  # [out, in], not all whole blocks
def test_a_layer_multiplies_by_its_rounded_weights(
    bits: int, shape: tuple[int, int], bias: bool
) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(shape[1], shape[0], bias=bias)
    layer, x = QuantizedLinear.of(linear, bits), torch.randn(2, 7, shape[1])
    assert is_near(layer(x), x, restored(linear.weight, bits), linear.bias)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_layer_multiplies_unlike_inputs(bits: int) -> None:
    """Outliers, rows of other magnitudes, groups of zeros; and none of them shows in other rows."""
    torch.manual_seed(0)
    weight, x = torch.randn(96, 320), torch.randn(9, 320)
    layer, w = QuantizedLinear(weight, bits=bits), restored(weight, bits)
    x.view(-1)[::97] *= 10
    assert is_near(layer(x), x, w, None)
    x[1], x[2, 32:] = 0, 0
    x[3], x[4] = x[3] * 1e20, x[4] * 1e-20
    for row in (0, 2, 3, 4):
        assert is_near(layer(x)[row], x[row], w, None)
    assert (layer(x)[1] == 0).all()
    alone = layer(x)
    for value in (float("nan"), float("inf")):
        x[5, 70] = value
        out = layer(x)
        assert not out[5].isfinite().any()
        assert torch.equal(out[:5], alone[:5]) and torch.equal(out[6:], alone[6:])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(64, 96), (45, 70), (1, 5)])
def test_a_layer_multiplies_by_its_float16_weights(shape: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(shape[1], shape[0], bias=bias)
    layer, x = HalfLinear.of(linear), torch.randn(2, 7, shape[1])
    expected = nn.functional.linear(x, linear.weight.half().float(), linear.bias)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert HalfLinear(torch.randn(64, 96)).nbytes == 2 * 64 * 96


@pytest.mark.parametrize(("bits", "steps"), [(4, 15), (8, 254)])
def test_weights_move_by_half_a_step_at_most(bits: int, steps: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(40, 128)
    groups = weight.unflatten(1, (-1, 32))
    low, high = groups.amin(-1), groups.amax(-1)
    span = high - low if bits == 4 else 2 * groups.abs().amax(-1)
    moved = (restored(weight, bits) - weight).unflatten(1, (-1, 32))
    # Fewer steps of a group are only chosen where they are nearer in sum.
    rms = moved.square().mean(-1).sqrt()
    assert (rms <= 0.51 * span / steps).all()
    scales = 64 * 4 * (2 if bits == 4 else 1)  # of 40 outputs in two blocks of 32
    assert QuantizedLinear(weight, bits=bits).nbytes == 64 * 128 * bits // 8 + 2 * scales


@pytest.mark.parametrize("steps", [15, 11, 8])
def test_weights_on_a_q4_1_grid_are_kept_exactly(steps: int) -> None:
    """Every group uses the grid's first and last point, but may have fewer points than 16."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(0, steps + 1, (32, 3, 32), generator=generator)
    q[..., 0], q[..., 1] = 0, steps
    d = (torch.rand(32, 3, 1, generator=generator) / 50).half().float()
    m = (-torch.rand(32, 3, 1, generator=generator) / 9).half().float()
    weight = (q * d + m).flatten(1)
    assert is_exact(weight, 4) and not is_exact(weight, 8)
    # int8 may use 4 bits, and does where 8 would round.
    linear = nn.Linear(96, 32, bias=False)
    linear.weight = nn.Parameter(weight)
    assert QuantizedLinear.of(linear, 8).bits == 4
    linear.weight = nn.Parameter(weight + 1e-5 * torch.randn(weight.shape, generator=generator))
    assert QuantizedLinear.of(linear, 8).bits == 8


def test_weights_on_a_q8_0_grid_are_kept_exactly() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-127, 128, (32, 3, 32), generator=generator)
    q[..., 5] = 127
    d = (torch.rand(32, 3, 1, generator=generator) / 50).half().float()
    assert is_exact((q * d).flatten(1), 8)


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_a_row_does_not_depend_on_the_rows_beside_it(bits: int) -> None:
    """Bit for bit: what makes a verified block write what plain steps write."""
    torch.manual_seed(0)
    weight, x = torch.randn(96, 64), torch.randn(19, 64)
    layer = HalfLinear(weight) if bits == 16 else QuantizedLinear(weight, bits=bits)
    alone = torch.cat([layer(row[None]) for row in x])
    for n in range(2, 20):
        assert torch.equal(layer(x[:n]), alone[:n])
        assert torch.equal(layer(x[-n:]), alone[-n:])
    assert torch.equal(layer(x[:, None])[:, 0], alone)
    many = x.repeat(60, 1)  # their rounding is shared out to threads
    assert torch.equal(layer(many), alone.repeat(60, 1))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_stored_layer_is_the_same_layer(bits: int, bias: bool) -> None:
    torch.manual_seed(0)
    layer, x = QuantizedLinear.of(nn.Linear(70, 45, bias=bias), bits), torch.randn(3, 70)
    again = QuantizedLinear.from_stored(layer.stored)
    assert torch.equal(again(x), layer(x))
    assert {**vars(again), "_buffers": None} == {**vars(layer), "_buffers": None}
    assert again.weight.data_ptr() == layer.weight.data_ptr() and again.nbytes == layer.nbytes


@pytest.mark.parametrize("vectors", ["_AVX2", "_AVX512"])
def test_the_kernel_of_other_cpus(vectors: str) -> None:
    """What CPUs with less than this one compute: the tests above, in a process that is told to."""
    if len(getattr(kernels, vectors)) >= len(kernels.vector_flags()):
        pytest.skip("this is what the other tests run, or more than the CPU has")
    told = f"kernels.vector_flags = lambda: kernels.{vectors}"
    code = (
        f"import sys, pytest; from multirate.models import kernels; {told}; sys.exit(pytest.main())"
    )
    these = "test_a_layer_multiplies or test_a_row_does_not or test_adapters_beside"
    run = subprocess.run(
        [sys.executable, "-c", code, "-q", "-p", "no:cacheprovider", __file__, "-k", these],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and "55 passed" in run.stdout, run.stdout + run.stderr


def test_weights_that_no_cache_holds_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the size of the whole model, unless that is slower; the products are the same."""
    layers, x = nn.Sequential(HalfLinear(torch.randn(64, 64)), nn.ReLU()), torch.randn(3, 64)
    quantized.stream_weights(layers)
    before = layers(x)
    assert not layers[0].streamed
    monkeypatch.setattr(quantized, "STREAMED_FROM", 64 * 64 * 2 - 1)
    monkeypatch.setattr(quantized, "STREAMED_SLACK", 0.0)
    quantized.stream_weights(layers)
    assert not layers[0].streamed
    monkeypatch.setattr(quantized, "STREAMED_SLACK", 1e9)
    quantized.stream_weights(layers)
    assert layers[0].streamed
    assert torch.equal(layers(x), before)


@pytest.mark.parametrize("bits", [4, 16])
def test_the_compiler_sees_the_output_shape(bits: int) -> None:
    weight, x = torch.randn(45, 64), torch.randn(3, 2, 64)
    layer = HalfLinear(weight) if bits == 16 else QuantizedLinear(weight, bits=bits)
    operator = torch.ops.multirate.quantized_linear.default
    arguments = (x, layer.weight, layer.scales, layer.bias, bits, 45, False)
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
    assert torch.equal(torch.export.export(layer, (x,)).module()(x), layer(x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "outs", [(64, 32, 32), (45, 70), (33,), (1, 1)]
)  # blocks of several layers
@pytest.mark.parametrize(("inputs", "rank"), [(96, 16), (70, 5), (70, 37), (5, 3)])
def test_adapters_beside_the_weights(
    outs: tuple[int, ...], inputs: int, rank: int, bias: bool
) -> None:
    """Each layer's own is added to its outputs, and rows stay independent of each other."""
    torch.manual_seed(0)
    weight, x = torch.randn(sum(outs), inputs), torch.randn(9, inputs)
    offset = torch.randn(sum(outs)) if bias else None
    adapters = [(torch.randn(rank, inputs).half(), torch.randn(o, rank).half()) for o in outs]
    layer = QuantizedLinear(weight, offset, bits=4)
    layer.adapt(adapters)
    full = restored(weight, 4) + torch.cat([B.float() @ A.float() for A, B in adapters])
    assert is_near(layer(x), x, full, offset)
    alone = torch.cat([layer(row[None]) for row in x])
    for n in range(2, 10):
        assert torch.equal(layer(x[:n]), alone[:n])
    assert torch.equal(layer(x.repeat(30, 1)), alone.repeat(30, 1))
    assert torch.equal(torch.export.export(layer, (x,)).module()(x), layer(x))


@torch.inference_mode()
@pytest.mark.parametrize("name", DENSE)
def test_logits_are_those_of_the_rounded_weights(name: str) -> None:
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    for kind, bits in (("int8", 8), ("int4", 4)):
        base = BaseModel(tiny_model(name))
        base.pack(kind)
        assert base.dtype_name == kind and base.packed and base.dtype == torch.float32
        assert not [m for m in base.model.modules() if isinstance(m, nn.Linear)]
        expected = logits(BaseModel(on_grid(tiny_model(name), bits)), ids)
        error = (logits(base, ids) - expected).square().mean() / expected.square().mean()
        assert error.sqrt() < (5e-4 if kernels.vector_flags() == kernels._VNNI else 2e-5)


@torch.inference_mode()
@pytest.mark.parametrize(("kind", "bound"), [("int8", 3e-4), ("int4", 5e-2)])
def test_quality(kind: str, bound: float) -> None:
    """KL to the float32 model, of next tokens that are far from certain."""
    ids = torch.randint(3, 90, (4, 16), generator=torch.Generator().manual_seed(0))
    expected = logits(BaseModel(tiny_model("llama")), ids).log_softmax(-1)
    base = BaseModel(tiny_model("llama"))
    base.pack(kind)
    found = logits(base, ids).log_softmax(-1)
    distance = (expected.exp() * (expected - found)).sum(-1).mean()
    assert bound / 10 < distance < bound


def engine_of(kind: str | None, preset: str) -> Engine:
    base = BaseModel(tiny_model("llama"))
    torch.manual_seed(1)
    shape = {"draft_vocab_size": 60} | ({"rank": 4} if preset == "carry" else {})
    accelerator = Accelerator.from_preset(preset, base, **shape)
    for parameter in accelerator.parameters():
        parameter.data = torch.randn_like(parameter) * 0.1
    if kind is not None:
        accelerator.pack(kind)
        base.pack(kind)
    return Engine(base, accelerator=accelerator)


@pytest.mark.parametrize("preset", ["carry", "paper"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_speculative_decoding_stays_lossless(kind: str, preset: str) -> None:
    engine = engine_of(kind, preset)
    prompts, settings = [[5, 6, 7, 8], [9, 10]], {"max_new_tokens": 24, "ignore_eos": True}
    fast = engine.generate(prompts, num_draft_tokens=3, **settings)
    slow = engine.generate(prompts, strategy="plain", **settings)
    for a, b in zip(fast, slow, strict=True):
        assert a.token_ids == b.token_ids and len(a.token_ids) == 24
        assert a.dtype == kind and a.speculation.num_drafts > 0


@torch.inference_mode()
def test_a_drafter_has_8_bits_beside_4() -> None:
    usual, engine = engine_of(None, "carry"), engine_of("int4", "carry")
    layers = [m for m in engine.accelerator.layers[0].folded.modules() if hasattr(m, "bits")]
    assert {m.bits for m in layers} == {8} and len(layers) == 4  # siblings are one
    p = torch.randn(1, 3, 32)
    expected, found = usual.accelerator.draft_logits(p), engine.accelerator.draft_logits(p)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_load_quantises_what_is_stored(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "dense")
    engine = multirate.load(tmp_path / "dense", quantize="int4", device="cpu")
    assert engine.generate([3, 4, 5], max_new_tokens=4).dtype == "int4"
    assert engine.base.embed_tokens.weight.dtype == torch.float32  # as stored
    # Other engines get the model as it is.
    assert any(isinstance(m, nn.Linear) for m in engine.stock_model().modules())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantize": "int3"}, "Unknown quantisation 'int3'. Use one of: int8, int4."),
        (
            {"quantize": "int8", "dtype": "packed"},
            "--quantize int8 and --dtype packed both name the weights' type. Leave one of them out.",
        ),
        ({"quantize": "int4", "dtype": torch.bfloat16}, "--dtype bfloat16 both name"),
    ],
)
def test_what_load_refuses(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(MultirateError) as error:
        multirate.load(tmp_path / "never read", device="cpu", **settings)
    assert message in str(error.value)


def test_experts_and_other_devices_are_refused(tmp_path: Path) -> None:
    tiny_model("olmoe").save_pretrained(tmp_path / "moe")
    with pytest.raises(
        MultirateError, match=r"without experts .* this one is a mixture of experts"
    ):
        multirate.load(tmp_path / "moe", quantize="int8", device="cpu")
    with pytest.raises(MultirateError, match="this one is on meta"):
        require_quantizable("int8", "meta", experts=False)


# ---------------------------------------------------------------- CUDA


def test_cuda_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(MultirateError, match=r"pip install 'multirate\[quantize\]'"):
        require_quantizable("int4", "cuda", experts=False)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_torchao_gets_each_layer_once_and_the_head_as_int8(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, str] = {}

    def quantize_(model: nn.Module, config: str, *, filter_fn: Any) -> None:
        for name, module in model.named_modules():
            if filter_fn(module, name):
                assert isinstance(module, nn.Linear) and name not in found
                found[name] = config

    fake = SimpleNamespace(
        quantize_=quantize_,
        Int8WeightOnlyConfig=lambda: "int8",
        Int4WeightOnlyConfig=lambda **_: "int4",
    )
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(quantization=fake))
    monkeypatch.setitem(sys.modules, "torchao.quantization", fake)
    model = tiny_model("llama")
    quantized.quantize_with_torchao(model, model.get_output_embeddings(), kind)
    assert found.pop("lm_head") == "int8"
    assert set(found.values()) == {kind} and len(found) == 4 * 7


# ---------------------------------------------------------------- building the kernel


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIRATE_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MultirateError, match=r"A C.. compiler is needed once.*--dtype packed"):
        quantized.load_kernel.__wrapped__()


def test_a_compiler_that_fails_leaves_nothing(
    failing_compiler: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(MultirateError, match=r"could not build the kernel .* error: too old"):
        quantized.load_kernel.__wrapped__()
    assert not list((tmp_path / "kernels").glob("**/*.so"))
    assert capsys.readouterr().err == ""  # it is tried before anything is announced


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("MULTIRATE_CACHE", str(file))
    with pytest.raises(MultirateError, match="Point MULTIRATE_CACHE to a writable folder"):
        quantized.load_kernel.__wrapped__()
