"""Which form a linear layer's weights get."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from multirate.config.errors import MultirateError
from multirate.models import kernels, packing
from multirate.models.packed import PackedLinear, can_pack
from multirate.models.quantized import HalfLinear, QuantizedLinear

pytestmark = [
    pytest.mark.skipif(not can_pack("cpu"), reason="FBGEMM is for x86 CPUs with AVX2"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="the kernel needs g++"),
]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    packing.has_kernel.cache_clear()
    yield
    packing.has_kernel.cache_clear()


def linear() -> nn.Linear:
    return nn.Linear(32, 32, bias=False)


@pytest.mark.parametrize(("cpu", "form"), [("AVX512", HalfLinear), ("AVX2", PackedLinear)])
def test_packed_is_the_faster_of_two_kernels(
    monkeypatch: pytest.MonkeyPatch, cpu: str, form: type
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: cpu)
    head = linear()
    assert isinstance(packing.layer_packer("packed", head)(linear()), form)
    assert isinstance(packing.layer_packer("packed", head)(head), form)


def fails() -> None:
    raise MultirateError("it does not build")


@pytest.mark.parametrize("compiler", [True, False])
def test_without_our_kernel_packed_is_fbgemms(
    monkeypatch: pytest.MonkeyPatch, compiler: bool
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(kernels, "has_compiler", lambda: compiler)
    monkeypatch.setattr(packing, "load_kernel", fails)
    told = pytest.warns(UserWarning, match="packed as 16 bits by FBGEMM: it does not build")
    with told if compiler else nullcontext():
        assert not packing.has_kernel()
    assert isinstance(packing.layer_packer("packed", linear())(linear()), PackedLinear)
    assert isinstance(packing.draft_packer("packed", CPU)(linear()), PackedLinear)


def test_a_kernel_of_an_earlier_run_needs_no_compiler(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, tmp_path: Path
) -> None:
    """As in an image whose cache was filled where there was one."""
    assert packing.has_kernel()
    for name in ("find_compiler", "has_compiler"):
        monkeypatch.setattr(kernels, name, lambda: None)
    for cache, expected in ((None, True), (tmp_path, False)):
        if cache is not None:
            monkeypatch.setenv("MULTIRATE_CACHE", str(cache))
        packing.has_kernel.cache_clear()
        packing.load_kernel.cache_clear()
        assert packing.has_kernel() is expected
    assert not recwarn.list


@pytest.mark.parametrize("kind", ["packed", "int8", "int4"])
def test_drafts_come_from_8_bits(kind: str) -> None:
    drafting = packing.draft_packer(kind, CPU)(linear())
    assert isinstance(drafting, QuantizedLinear) and drafting.bits == 8


def test_a_head_keeps_8_bits() -> None:
    head = linear()
    pack = packing.layer_packer("int4", head)
    bits = [packed.bits for packed in (pack(head), pack(linear()))]  # type: ignore[union-attr]
    assert bits == [8, 4]
