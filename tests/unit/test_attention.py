"""The attention kernel computes what torch's does, and a query's result depends on nothing beside it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor, nn
from torch.export import Dim, export
from torch.nn import functional as F

from multirate.config.errors import MultirateError
from multirate.models import attention
from multirate.models.attention import GROUPED, group_queries
from multirate.models.base import BaseModel
from multirate.models.kernels import load_library

needs_kernel = pytest.mark.skipif(
    not torch.cpu._is_avx2_supported() or shutil.which("g++") is None,
    reason="the kernel is for x86 CPUs with AVX2, and g++ builds it",
)


@pytest.fixture
def attend() -> object:
    attention.load_kernel()
    return torch.ops.multirate.attend


def example(
    rows: int, heads: int, kv_heads: int, n: int, d: int, slots: int, length: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, keys and values as layers hand them over, and a mask with holes."""
    generator = torch.Generator().manual_seed(n + length)
    query = torch.randn(rows, n, heads, d, generator=generator).transpose(1, 2)
    keys, values = torch.randn(2, rows, kv_heads, slots + 3, d, generator=generator)[
        :, :, :, :slots
    ]
    mask = torch.rand(rows, 1, n, length, generator=generator) < 0.8
    mask[..., 0] = True
    return query, keys, values, mask


def reference(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    length = mask.shape[-1]
    keys, values = keys[:, :, :length].double(), values[:, :, :length].double()
    seen = F.scaled_dot_product_attention(
        query.double(), keys, values, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return seen.transpose(1, 2).float()


@needs_kernel
@pytest.mark.parametrize("d", [64, 80, 128, 7])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "n", "length"),
    [
        (1, 9, 3, 1, 200),
        (1, 9, 3, 8, 130),
        (3, 4, 4, 2, 65),
        (2, 4, 1, 13, 64),
        (1, 6, 2, 70, 71),
        (12, 4, 2, 3, 150),  # rows enough to keep threads busy without splitting the text
        (1, 2, 2, 1, 1),
    ],
)
def test_it_computes_what_torch_does(
    attend: object, rows: int, heads: int, kv_heads: int, n: int, length: int, d: int
) -> None:
    inputs = example(rows, heads, kv_heads, n, d, slots=length + 9, length=length)
    found = attend(*inputs, d**-0.5)
    assert found.is_contiguous() and found.shape == (rows, n, heads, d)
    torch.testing.assert_close(found, reference(*inputs, d**-0.5), rtol=3e-6, atol=3e-6)


@needs_kernel
def test_large_scores_and_a_mask_shared_by_all_rows(attend: object) -> None:
    query, keys, values, mask = example(2, 4, 2, 5, 64, slots=300, length=290)
    shared = mask[:1]
    found = attend(query * 30, keys, values, shared.expand(2, -1, -1, -1), 1.0)
    assert torch.equal(found, attend(query * 30, keys, values, shared, 1.0))
    expected = reference(query * 30, keys, values, shared, 1.0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    strided = mask.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(
        attend(query, keys, values, mask, 1.0), attend(query, keys, values, strided, 1.0)
    )


@needs_kernel
def test_a_query_that_sees_nothing_gives_zeros(attend: object) -> None:
    query, keys, values, mask = example(1, 4, 2, 3, 64, slots=100, length=100)
    mask[:, :, 1] = False
    found = attend(query, keys, values, mask, 0.1)
    assert not found[:, 1].any()
    assert found[:, 0].any() and found.isfinite().all()


@needs_kernel
@pytest.mark.parametrize("length", [70, 300])
@pytest.mark.parametrize("d", [64, 7])
def test_a_query_s_result_depends_on_nothing_beside_it(attend: object, d: int, length: int) -> None:
    query, keys, values, mask = example(5, 6, 2, 50, d, slots=length + 200, length=length)
    whole = attend(query, keys, values, mask, 0.2)
    masked = torch.zeros(5, 1, 50, 130, dtype=torch.bool)
    longer = torch.cat((mask, masked), dim=-1)
    assert torch.equal(attend(query, keys, values, longer, 0.2), whole)
    for n in (1, 2, 3, 7, 16, 33):
        part = attend(query[:, :, -n:], keys, values, mask[:, :, -n:], 0.2)
        assert torch.equal(part, whole[:, -n:])
        for row in (0, 4):
            one = slice(row, row + 1)
            alone = attend(
                query[one, :, :n], keys[one], values[one], longer[one, :, :n, : length + n], 0.2
            )
            assert torch.equal(alone, whole[one, :n])


@needs_kernel
@pytest.mark.parametrize("d", [64, 7])
@pytest.mark.parametrize("window", [1000, 70])
def test_prefill_and_single_steps_give_the_same(attend: object, window: int, d: int) -> None:
    query, keys, values, _ = example(2, 6, 2, 200, d, slots=420, length=400)
    steps = torch.ones(200, 400, dtype=torch.bool).tril(200)
    mask = (steps & steps.triu(201 - window)).expand(2, 1, -1, -1)
    found = attend(query, keys, values, mask, 0.2)
    torch.testing.assert_close(
        found, reference(query, keys, values, mask, 0.2), rtol=3e-6, atol=3e-6
    )
    for i in (0, 1, 63, 120, 199):
        one = slice(i, i + 1)
        alone = attend(query[:, :, one], keys, values, mask[:, :, one, : 201 + i], 0.2)
        assert torch.equal(alone, found[:, one])


@needs_kernel
def test_slots_that_no_query_sees_are_not_read(attend: object) -> None:
    query, keys, values, mask = example(2, 6, 2, 3, 64, slots=400, length=400)
    mask[..., :130] = mask[0, ..., 140:270] = mask[..., 390:] = False
    mask[1, ..., 200:264] = False
    expected = attend(query, keys, values, mask, 0.2)
    for unseen in (slice(0, 130), slice(390, 400)):
        keys[:, :, unseen] = values[:, :, unseen] = float("nan")
    keys[0, :, 192:256] = values[0, :, 192:256] = float("nan")
    assert torch.equal(attend(query, keys, values, mask, 0.2), expected)


@needs_kernel
@pytest.mark.skipif(sys.platform != "linux", reason="reads glibc's floating-point environment")
def test_what_memory_held_before_is_not_multiplied(attend: object) -> None:
    # Unused lanes once held it, and where that was denormal an Intel CPU took 100 ms for a step.
    inputs = example(1, 9, 3, 1, 64, 200, 200)  # 3 of 8 or 16 lanes are used
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # flags belong to a thread
    try:
        # Of any size that the kernel may ask for.
        freed = [torch.full((1 << n,), 1e-40) for n in range(4, 20) for _ in range(4)]
        assert meets_denormals(torch.mul, freed.pop(), 1.0)
        freed.clear()
        assert not meets_denormals(attend, *inputs, 0.2)
    finally:
        torch.set_num_threads(threads)


def meets_denormals(work: Callable[..., object], *inputs: object) -> bool:
    """Whether this thread's vector instructions meet a denormal operand, by a flag of MXCSR."""
    libm = ctypes.CDLL("libm.so.6")
    environment = (ctypes.c_uint32 * 8)()  # its last word is MXCSR
    assert libm.fegetenv(environment) == 0
    environment[7] &= ~2
    assert libm.fesetenv(environment) == 0
    work(*inputs)
    assert libm.fegetenv(environment) == 0
    return bool(environment[7] & 2)


@needs_kernel
@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="the tests above were for AVX2")
def test_the_build_for_avx2_passes_the_tests_above() -> None:
    # A process of its own, since operators cannot be registered twice.
    tests = "computes or large or nothing or depends or steps or not_read or memory"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", tests, __file__],
        env={**os.environ, "ATEN_CPU_CAPABILITY": "avx2"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout


@needs_kernel
@pytest.mark.filterwarnings("ignore")  # of compilers about themselves
def test_it_can_be_exported_and_compiled_for_any_sizes(attend: object, tmp_path: Path) -> None:
    class Attention(nn.Module):
        def forward(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
            length = mask.shape[-1]
            keys, values = keys[:, :, :length], values[:, :, :length]
            out: Tensor = torch.ops.multirate.attend(query, keys, values, mask, 0.5)
            return out.flatten(2) * 2

    dynamic = Dim.DYNAMIC
    memory = {0: dynamic, 2: dynamic}
    program = export(
        Attention(),
        example(11, 4, 2, 13, 16, slots=47, length=37),
        dynamic_shapes=(memory, memory, memory, {0: dynamic, 2: dynamic, 3: dynamic}),
        prefer_deferred_runtime_asserts_over_guards=True,
    )
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "attention.pt2")
    )
    run = torch._inductor.aoti_load_package(path)
    for rows, n, length in ((11, 13, 37), (2, 40, 90)):
        inputs = example(rows, 4, 2, n, 16, slots=length + 9, length=length)
        assert torch.equal(run(*inputs), Attention()(*inputs))


def hidden(model: nn.Module) -> Tensor:
    """A state behind all layers: a text of nine, then four positions."""
    base = BaseModel(model)  # type: ignore[arg-type]
    arena = base.arena(rows=2, max_len=20)
    ids = torch.arange(26).view(2, 13)
    with torch.inference_mode():
        for start, stop in ((0, 9), (9, 13)):
            block = base.block([start] * 2, stop - start)
            h = base.run_layers(base.embed(ids[:, start:stop]), 0, base.num_layers, block, arena)
    return h


@needs_kernel
def test_a_model_s_layers_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = hidden(tiny_model("llama"))
    model = tiny_model("llama")
    group_queries(model)

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("torch's kernel was called")

    monkeypatch.setattr(F, "scaled_dot_product_attention", fail)
    torch.testing.assert_close(hidden(model), expected, rtol=1e-5, atol=1e-5)


@needs_kernel
def test_what_it_is_not_for_goes_to_torch() -> None:
    model = tiny_model("llama")
    group_queries(model)
    trained = model(torch.tensor([[3, 1, 4]]), labels=torch.tensor([[3, 1, 4]]))
    trained.loss.backward()
    assert model.get_decoder().layers[0].self_attn.q_proj.weight.grad.any()
    half = tiny_model("llama").bfloat16()
    group_queries(half)
    assert hidden(half).dtype == torch.bfloat16


def missing() -> None:
    raise MultirateError("there is no compiler")


def test_without_a_compiler_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tiny_model("llama")
    group_queries(plain, kernel=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    # As where no earlier run has built it either.
    monkeypatch.setattr("multirate.models.attention.load_kernel", missing)
    model = tiny_model("llama")
    group_queries(model)
    assert model.config._attn_implementation == GROUPED
    assert torch.equal(hidden(model), hidden(plain))
    assert capsys.readouterr().err == ""


# ---------------------------------------------------------------- building a library


SOURCE = Path(attention.__file__).with_name("attention.cpp")


def test_a_library_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIRATE_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        MultirateError, match=r"needed once, to build a test, and there is no g\+\+"
    ):
        load_library(SOURCE, "a test")


def test_a_compiler_that_fails_leaves_nothing_and_attention_goes_to_torch(
    failing_compiler: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(MultirateError, match=r"could not build a test: .* error: too old"):
        load_library(SOURCE, "a test")
    assert not list((tmp_path / "kernels").glob("**/*.so"))
    assert capsys.readouterr().err == ""  # it is tried before anything is announced

    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: True)
    monkeypatch.setattr(attention, "load_kernel", attention.load_kernel.__wrapped__)
    with pytest.warns(UserWarning, match="torch's own kernel: .*too old"):
        group_queries(tiny_model("llama"))


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("MULTIRATE_CACHE", str(file))
    with pytest.raises(MultirateError, match="Point MULTIRATE_CACHE to a writable folder"):
        load_library(SOURCE, "a test")
