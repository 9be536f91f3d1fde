"""Packed weights that are kept: the same numbers, without packing; never those of something else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_gguf import tiny_llama, write_gguf
from tiny_models import tiny_model
from torch import Tensor, nn

import multirate
from multirate.config.errors import MultirateError
from multirate.models import words
from multirate.models.base import BaseModel
from multirate.models.cache import is_whole, save_whole
from multirate.models.packed import can_pack, pack_linears
from multirate.models.packing import layer_packer
from multirate.models.quantized import QuantizedLinear, load_kernel
from multirate.models.words import pack_kept

pytestmark = pytest.mark.skipif(
    not can_pack("cpu") or shutil.which("g++") is None,
    reason="the kernel is for x86 CPUs with AVX2, and g++ builds it",
)

LAYERS = 4 * 4 + 1  # siblings are one; and the head


@pytest.fixture(autouse=True, scope="module")
def kernel() -> None:
    load_kernel()


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[nn.Linear]:
    """Every layer that is packed from now on, not taken from a file."""
    made: list[nn.Linear] = []

    def counting(kind: str, head: nn.Module) -> Callable[[nn.Linear], nn.Module]:
        pack = layer_packer(kind, head)
        return lambda linear: made.append(linear) or pack(linear)  # type: ignore[func-returns-value]

    monkeypatch.setattr(words, "layer_packer", counting)
    return made


def packed(folder: Path, kind: str = "int4", seed: int = 0) -> dict[str, Tensor]:
    """The tensors of a tiny model's packed layers, by way of the file beside its folder."""
    model = tiny_model("llama", seed=seed)
    pack_kept(model, kind, folder)
    assert not any(type(module) is nn.Linear for module in model.modules())
    return tensors(model)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    return {f"{n}.{k}": t for n, m in layers.items() for k, t in m.named_buffers()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_kept_words_are_those_that_packing_makes(
    tmp_path: Path, kind: str, packings: list[nn.Linear]
) -> None:
    model = tiny_model("llama")
    pack_linears(model, layer_packer(kind, model.get_output_embeddings()))
    for _ in range(2):  # the second call packs nothing
        assert same(packed(tmp_path / "tiny-1", kind), tensors(model))
        assert len(packings) == LAYERS
    (file,) = tmp_path.glob("*.pt")
    assert is_whole(file) and file.name.startswith(f"tiny-1.{kind}-")


def test_a_model_of_kept_words_computes_the_same_and_on_cache_lines(tmp_path: Path) -> None:
    logits = []
    for _ in range(2):
        base = BaseModel(tiny_model("llama"))
        pack_kept(base.model, "int4", tmp_path / "tiny-1")
        base.pack("int4")
        ids = torch.tensor([[3, 5, 7]])
        block, arena = base.block([0], 3), base.arena(rows=1, max_len=3)
        logits.append(base.head(base.run_layers(base.embed(ids), 0, base.num_layers, block, arena)))
        assert all(t.data_ptr() % 64 == 0 for t in tensors(base.model).values())
    assert torch.equal(*logits)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def lose_sum(file: Path) -> None:
    file.with_name(f"{file.name}.crc32").unlink()


def other_format(file: Path) -> None:
    """Whole, but not for this torch."""
    save_whole(file, lambda path: path.write_bytes(b"packed weights of the future"))


@pytest.mark.parametrize("damage", [truncate, flip, empty, lose_sum, other_format])
def test_a_damaged_file_is_packed_anew(
    tmp_path: Path,
    damage: Callable[[Path], None],
    packings: list[nn.Linear],
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = packed(tmp_path / "tiny-1")
    (file,) = tmp_path.glob("*.pt")
    damage(file)
    capsys.readouterr()
    assert same(packed(tmp_path / "tiny-1"), first) and len(packings) == 2 * LAYERS
    said = capsys.readouterr().err
    assert (
        said == f"multirate: {file.name} in the cache is damaged or incomplete; making it again\n"
    )
    assert same(packed(tmp_path / "tiny-1"), first) and len(packings) == 2 * LAYERS


def test_words_of_other_code_are_not_used_and_go(
    tmp_path: Path, packings: list[nn.Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed(tmp_path / "tiny-1")
    packed(tmp_path / "tiny-1", "int8")
    packed(tmp_path / "tiny-2")  # another GGUF file
    assert len(packings) == 3 * LAYERS and len(list(tmp_path.glob("*.pt"))) == 3
    monkeypatch.setattr(words, "_layout", lambda: "0123456789abcdef")
    packed(tmp_path / "tiny-1")
    assert len(packings) == 4 * LAYERS
    names = sorted(file.name.split("-")[1] for file in tmp_path.glob("*.pt"))
    assert names == ["1.int4", "1.int8", "2.int4"]


def test_the_layout_stands_for_our_code_and_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = [words._layout()]
    monkeypatch.setattr(words, "vector_flags", lambda: ("-mavx1024",))
    words._layout.cache_clear()
    layouts.append(words._layout())
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: read(self) + b"\n# changed")
    words._layout.cache_clear()
    layouts.append(words._layout())
    words._layout.cache_clear()
    assert len(set(layouts)) == 3


def test_a_full_disk_is_told_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(file: Path, write: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(words, "save_whole", full)
    assert len(packed(tmp_path / "tiny-1")) > 0
    assert "not kept" in capsys.readouterr().err and not list(tmp_path.glob("*.pt"))


def test_loading_a_gguf_file_keeps_and_uses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packings: list[nn.Linear]
) -> None:
    monkeypatch.setenv("MULTIRATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("multirate.models.attention.has_kernel", lambda: False)  # nor build it
    file = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    settings = {"quantize": "int4", "device": "cpu"}
    first, second = (multirate.load(file, **settings) for _ in range(2))
    assert len(packings) == 2 * 4 + 1
    assert same(tensors(first.base.model), tensors(second.base.model))
    other = tiny_llama()
    other.lm_head.weight.data += 1
    file = write_gguf(tmp_path / "tiny.gguf", other)  # under the same name
    third = multirate.load(file, **settings)
    assert len(packings) == 2 * (2 * 4 + 1)
    assert not same(tensors(first.base.model), tensors(third.base.model))
    with pytest.raises(MultirateError, match="quantisation"):
        multirate.load(file, quantize="int3")
