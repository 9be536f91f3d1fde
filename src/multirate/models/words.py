"""The packed weights of a converted model, kept beside it.

Finding the grid that each matrix is on takes seconds; mapping the file of what was found does not. Its
name stands for what it is made from: the GGUF file (the converted folder's name has its hash), the kind,
and our code that packs. It is in torch's own format, which starts every tensor on a cache line, as the
kernel likes it; safetensors does not.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from multirate.models.cache import is_whole, note_damage, save_whole
from multirate.models.kernels import vector_flags
from multirate.models.packed import pack_linears
from multirate.models.packing import layer_packer
from multirate.models.quantized import QuantizedLinear

# What is packed, into what: any change to these makes other words, perhaps.
_CODE = (
    "packed.py", "packing.py", "quantized.cpp", "quantized.py", "quantized_inputs.h", "siblings.py",
    "words.py",
)  # fmt: skip


def pack_kept(model: PreTrainedModel, kind: str, folder: Path) -> None:
    """Pack all linear layers as `pack_linears` does, or take what an earlier run packed.

    Args:
        model: loaded from `folder`, on the CPU.
        kind: "int8" or "int4".
        folder: what a GGUF file was converted to (`models.gguf`).
    """
    file = folder.with_name(f"{folder.name}.{kind}-{_layout()}.pt")
    known = _read(file)
    packed = pack_linears(model, layer_packer(kind, model.get_output_embeddings()), known)
    if packed.keys() != known.keys():
        _write(file, packed, replaces=f"{folder.name}.{kind}-")


def _read(file: Path) -> dict[str, nn.Module]:
    """Packed layers by name; none if the file is not there or cannot be used."""
    if not is_whole(file):
        if file.exists():
            note_damage(file)
        return {}
    try:
        stored = torch.load(file, mmap=True, weights_only=True)
        return {name: QuantizedLinear.from_stored(own) for name, own in stored.items()}
    except Exception:  # whole, but another torch's: unpickling fails with anything
        note_damage(file)
        return {}


def _write(file: Path, packed: Mapping[str, nn.Module], replaces: str) -> None:
    """Keep packed layers in a file, in place of those that other code kept under this prefix."""
    stored = {name: layer.stored for name, layer in packed.items()}
    try:
        for old in list(file.parent.iterdir()):
            if old.name.startswith(replaces):
                old.unlink(missing_ok=True)
        save_whole(file, lambda path: torch.save(stored, path))
    except OSError as error:
        reason = error.strerror or error
        print(f"multirate: packed weights are not kept in {file.parent}: {reason}", file=sys.stderr)


@cache
def _layout() -> str:
    """16 hex digits for what our code makes of a matrix on this CPU."""
    digest = hashlib.sha256(repr(vector_flags()).encode())
    for name in _CODE:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:16]
