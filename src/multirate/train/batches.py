"""Rows to batches: what is held back, which rows share a step, and the window that is trained.

One training step takes one group of rows. How a group is shared among processes and accumulated
micro-batches does not change which rows it holds, so the loss curve does not depend on it either.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from multirate.streams.fit import FIRST_POSITION
from multirate.train.data import Row

# Rows of similar length share a batch (less padding), but only within so many shuffled rows, so that
# batches stay mixed in content and a run can stop at any token count.
_WINDOW = 1024


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows side by side, and the window of each that is trained.

    The stream runs only over a row's window, from its first to its last trained position; the
    teacher's keys and values cover the whole row. Shapes: B rows, n positions, m window positions.

    Attributes:
        ids: LongTensor `[B, n]`, right-padded.
        rows: the B texts.
        starts: first position of each row's window, at least `FIRST_POSITION`; 1 if `whole`.
        trained: bool `[B, m]`, the position's next token is one to be learned.
    """

    ids: Tensor
    rows: tuple[Row, ...]
    starts: tuple[int, ...]
    trained: Tensor

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each row."""
        return tuple(len(row) for row in self.rows)

    def to(self, device: torch.device) -> Batch:
        return replace(self, ids=self.ids.to(device), trained=self.trained.to(device))


def trained_positions(row: Row) -> np.ndarray:
    """Bool `[n]`: positions whose next token is learned, bar the outliers before `FIRST_POSITION`."""
    learned = np.zeros(len(row) + 1, dtype=bool)
    for start, stop in row.spans:
        learned[start:stop] = True
    learned[: FIRST_POSITION + 1] = False
    return learned[1:]


def collate(rows: Sequence[Row], *, blank: bool = False, whole: bool = False) -> Batch:
    """A batch of at least one row.

    Args:
        rows: the texts.
        blank: train no position: a stand-in for a process that has no row of its own in this step.
        whole: start every window at position 1, for a stream with keys and values of its own, which
            must have read the prompt too.
    """
    windows = []
    for row in rows:
        places = trained_positions(row).nonzero()[0]
        windows.append(places if len(places) and not blank else np.array([], dtype=np.int64))
    starts = tuple(int(places[0]) if len(places) else FIRST_POSITION for places in windows)
    if whole:
        starts = (1,) * len(rows)
    width = max([1, *(int(p[-1]) - s + 1 for p, s in zip(windows, starts, strict=True) if len(p))])
    ids = torch.zeros((len(rows), max(len(row) for row in rows)), dtype=torch.long)
    trained = torch.zeros((len(rows), width), dtype=torch.bool)
    for i, (row, places, start) in enumerate(zip(rows, windows, starts, strict=True)):
        ids[i, : len(row)] = torch.from_numpy(row.ids.astype(np.int64))
        trained[i, torch.from_numpy(places - start)] = True
    return Batch(ids, tuple(rows), starts, trained)


def drafted_positions(trained: Tensor, step: int) -> Tensor:
    """Of trained positions `[B, m]`, those that draft step `step` (from 1) can stand at.

    A draft starts at a trained position, and its later steps stand behind it.
    """
    used = trained
    for _ in range(step - 1):
        used = torch.nn.functional.pad(used, (1, 0))[:, :-1] & trained
    return used


def grouped(rows: Sequence[Row], *, tokens: int, seed: int | None = None) -> list[list[int]]:
    """Indices of rows that share a step: rows of similar length, at most about `tokens` positions.

    Args:
        rows: the texts.
        tokens: positions in a group, padding included.
        seed: shuffles groups and rows; None keeps the order of the rows.
    """
    order = list(range(len(rows)))
    rng = random.Random(seed)
    if seed is not None:
        rng.shuffle(order)
        order = [
            i
            for start in range(0, len(order), _WINDOW)
            for i in sorted(order[start : start + _WINDOW], key=lambda i: len(rows[i]))
        ]
    groups: list[list[int]] = [[]]
    longest = 0
    for i in order:
        longest = max(longest, len(rows[i]))
        if groups[-1] and longest * (len(groups[-1]) + 1) > tokens:
            groups.append([])
            longest = len(rows[i])
        groups[-1].append(i)
    if seed is not None:
        rng.shuffle(groups)
    return [group for group in groups if group]


def batches(rows: Sequence[Row], *, tokens: int, whole: bool = False) -> Iterator[Batch]:
    """Batches of rows in their order, at most about `tokens` positions each; `whole`: see `collate`."""
    for group in grouped(rows, tokens=tokens):
        yield collate([rows[i] for i in group], whole=whole)


def schedule(rows: Sequence[Row], *, epochs: float, tokens: int, seed: int) -> list[list[int]]:
    """The groups of a whole training, in order: every epoch newly shuffled, the last maybe cut."""
    groups: list[list[int]] = []
    whole, part = divmod(epochs, 1)
    for epoch in range(int(whole) + (part > 0)):
        one = grouped(rows, tokens=tokens, seed=seed + epoch)
        groups += one if epoch < whole else one[: max(1, round(part * len(one)))]
    return groups


def sample_rows(rows: Sequence[Row], tokens: int, *, seed: int) -> list[Row]:
    """Rows from all over a text that hold about `tokens` positions."""
    chosen: list[Row] = []
    count = 0
    for row in random.Random(seed).sample(rows, len(rows)):
        if count >= tokens:
            break
        chosen.append(row)
        count += len(row)
    return chosen


def split_rows(rows: Sequence[Row], *, heldout: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Shuffle and split into at least `heldout` rows and the rest.

    Answers to one prompt stay together: a held-out answer whose twin was trained on measures nothing.
    """
    groups: dict[object, list[Row]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.prompt if row.spans[0][0] > 1 else index, []).append(row)
    order = list(groups.values())
    random.Random(seed).shuffle(order)
    kept: list[Row] = []
    while len(kept) < heldout and order:
        kept += order.pop()
    return kept, [row for group in order for row in group]


def frequent_tokens(rows: Sequence[Row], *, size: int, vocab_size: int) -> Tensor:
    """The `size` most frequent learned token ids of a text, `[size]`; of equals, the lowest id."""
    learned = [row.ids[start:stop] for row in rows for start, stop in row.spans]
    counts = np.bincount(np.concatenate(learned), minlength=vocab_size)
    order = np.argsort(-counts, kind="stable")
    return torch.from_numpy(order[:size].copy())
