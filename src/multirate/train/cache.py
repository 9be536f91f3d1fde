"""The teacher's states on disk: computed in the first epoch, read in later ones.

One safetensors file a text row, named after the row, in a folder named after everything else that its
content depends on: the base model's weights, its precision, the states that are kept. So a stale file is
never read: it has another name. Which rows are kept follows from the size cap alone, before anything
runs.

Shapes: n positions of a row, m of its window, D hidden size, G key-value heads, d head dimension.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.nn import functional as F

from multirate.config.errors import MultirateError
from multirate.models.base import BaseModel
from multirate.models.loading import config_fingerprint
from multirate.train.batches import Batch, collate
from multirate.train.data import Row, digest
from multirate.train.teacher import Needs, TeacherStates, run_teacher

# "states.I" `[m + 1, D]`, "keys.I" and "values.I" `[G, n, d]` of one row.
RowStates = dict[str, Tensor]

_KINDS = ("states", "keys", "values")
_SAMPLES = 256  # numbers of each weight tensor that a model is recognised by
_HEADER_BYTES = 1024  # of a file, about


class TeacherCache:
    """Teacher states of text rows on disk.

    Args:
        folder: where; several models and accelerators may share it.
        base: the teacher.
        needs: the states and layers that are kept.
        rows: all rows that training may ask for.
        max_bytes: cap. Rows are kept in their order until it is reached; the others are computed anew
            every time.

    Attributes:
        wanted_bytes: what all rows would take.
        bytes: what the kept ones take.

    Raises:
        MultirateError: the folder cannot be made.
    """

    def __init__(
        self, folder: Path, base: BaseModel, needs: Needs, rows: Sequence[Row], *, max_bytes: float
    ) -> None:
        self.base, self.needs = base, needs
        # Half precision on disk: these are inputs and targets, not weights.
        self.dtype = torch.float16 if base.dtype == torch.float16 else torch.bfloat16
        key = repr((weights_fingerprint(base), str(base.dtype), needs, str(self.dtype)))
        self.folder = folder / hashlib.sha256(key.encode()).hexdigest()[:16]
        self.kept: set[str] = set()
        self.bytes = self.wanted_bytes = 0
        layer = base.arena(rows=1, max_len=1).layers[0]
        position = len(needs.layers) * (layer.keys.numel() + layer.values.numel())
        for row in rows:
            width = collate([row], whole=needs.whole).trained.shape[1] + 1
            numbers = len(needs.states) * width * base.hidden_size + len(row) * position
            size = numbers * self.dtype.itemsize + _HEADER_BYTES
            self.wanted_bytes += size
            if self.bytes + size <= max_bytes:
                self.bytes += size
                self.kept.add(digest([row]))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MultirateError(
                f"Cannot make the teacher cache {self.folder}: {error.strerror or error}. Choose "
                f"another --teacher-cache."
            ) from None

    def teach(self, batch: Batch) -> TeacherStates:
        """What `run_teacher` gives, read from disk where it is there and written where it is not.

        Rows that are kept come out in half precision the first time too, and are computed all
        together, so that a resumed training sees the same numbers as an uninterrupted one.
        """
        names = [digest([row]) for row in batch.rows]
        kept = [i for i, name in enumerate(names) if name in self.kept]
        found: dict[int, RowStates] = {}
        read = {i: self._read(names[i]) for i in kept}
        if all(read.values()):
            found |= {i: states for i, states in read.items() if states is not None}
        else:
            for i, states in self._computed(batch, kept).items():
                found[i] = {k: v.to(self.dtype).cpu().contiguous() for k, v in states.items()}
                self._write(names[i], found[i])
        found |= self._computed(batch, [i for i in range(len(names)) if i not in found])
        return self._together([found[i] for i in range(len(names))], batch)

    def _computed(self, batch: Batch, places: Sequence[int]) -> dict[int, RowStates]:
        if not places:
            return {}
        rows = [batch.rows[i] for i in places]
        part = collate(rows, whole=self.needs.whole).to(batch.ids.device)
        teacher = run_teacher(self.base, part, self.needs)
        found: dict[int, RowStates] = {}
        for place, (i, row) in enumerate(zip(places, rows, strict=True)):
            width = collate([row], whole=self.needs.whole).trained.shape[1] + 1
            found[i] = {f"states.{k}": h[place, :width] for k, h in teacher.states.items()}
            found[i] |= {f"keys.{k}": x[place, :, : len(row)] for k, x in teacher.keys.items()}
            found[i] |= {f"values.{k}": x[place, :, : len(row)] for k, x in teacher.values.items()}
        return found

    def _together(self, rows: Sequence[RowStates], batch: Batch) -> TeacherStates:
        """Rows side by side, padded with zeros to the batch's width."""
        size = {"states": batch.trained.shape[1] + 1}
        parts: dict[str, dict[int, Tensor]] = {kind: {} for kind in _KINDS}
        for name in rows[0]:
            kind, index = name.split(".")
            width = size.get(kind, batch.ids.shape[1])
            parts[kind][int(index)] = torch.stack(
                [F.pad(row[name], (0, 0, 0, width - row[name].shape[-2])).to(
                    device=self.base.device, dtype=self.base.dtype) for row in rows]
            )  # fmt: skip
        return TeacherStates(**parts)

    def _read(self, name: str) -> RowStates | None:
        try:
            return load((self.folder / name).read_bytes())
        except (FileNotFoundError, SafetensorError):  # never made, or cut short by a crash
            return None

    def _write(self, name: str, states: RowStates) -> None:
        path = self.folder / name
        new = path.with_suffix(f".{os.getpid()}")
        try:
            new.write_bytes(save(states))
            os.replace(new, path)
        except OSError as error:
            new.unlink(missing_ok=True)
            raise MultirateError(
                f"Cannot write the teacher cache {path}: {error.strerror or error}. Make room, lower "
                f"--teacher-cache-gb, or go on without --teacher-cache."
            ) from None


def weights_fingerprint(base: BaseModel) -> str:
    """A hash of the model's config and of some numbers of each of its weights."""
    sha = hashlib.sha256(config_fingerprint(base.config).encode())
    for name, weight in base.model.state_dict().items():
        flat = weight.detach().flatten()
        some = flat[:: max(1, flat.numel() // _SAMPLES)].float().cpu()
        sha.update(name.encode() + some.numpy().tobytes())
    return sha.hexdigest()
