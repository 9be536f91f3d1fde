"""Drafting with a stream that has keys and values of its own, as EAGLE's (arXiv 2401.15077, 2503.01840).

The preset `eagle` of `config.accelerator` is such a stream. It must read the whole text itself: for each
position the token there and the model's features one position before, which the generation loop shows
in `observe`. What was drafted from its own features is read again once the model has verified it.

Shapes: R rows, n positions, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from multirate.decode.drafter import Draft, DraftRequest, Observation
from multirate.decode.stream import StreamDrafter
from multirate.streams.accelerator import Accelerator, Carried

# The first position with features before it. Own slots count from it: attention sees differences only.
FIRST = 1


class OwnKvRun(StreamDrafter):
    """One generation of a stream with its own keys and values.

    Args:
        accelerator: with `own_kv`.
        rows: prompts in the batch.
        max_len: most tokens of a row, drafts included.
    """

    def __init__(self, accelerator: Accelerator, *, rows: int, max_len: int) -> None:
        self.accelerator, base = accelerator, accelerator.base
        config = accelerator.config
        layers = {config.source_layer(i) for i in config.schedule.layers}
        self.arena = base.arena(rows=rows, max_len=max_len, only=layers)
        self.features = {
            i: torch.zeros(rows, max_len, base.hidden_size, dtype=base.dtype, device=base.device)
            for i in accelerator.carry_layers
        }
        # Positions before it have keys and values from verified features.
        self.read = [FIRST] * rows

    def keep(self, rows: Sequence[int]) -> None:
        kept = torch.tensor(rows, device=self.accelerator.base.device)
        self.arena.keep(kept)
        self.features = {i: x[kept] for i, x in self.features.items()}
        self.read = [self.read[row] for row in rows]

    def observe(self, seen: Observation) -> None:
        if seen.paths is None:
            start = seen.starts[0]  # the same in all rows of a chunk
            for i, state in seen.states.items():
                self.features[i][:, start : start + state.shape[1]] = state
            return
        places = [
            (row, start + depth, entry)
            for row, (start, path) in enumerate(zip(seen.starts, seen.paths, strict=True))
            for depth, entry in enumerate(path)
        ]
        row, position, entry = torch.tensor(places, device=self.accelerator.base.device).T
        for i, state in seen.states.items():
            self.features[i][row, position] = state[row, entry]

    def draft(self, request: DraftRequest) -> Draft:
        def first() -> tuple[Tensor, Carried]:
            carried = self._read_on(request)
            return self.accelerator.draft_logits(carried.states[1]), carried

        lengths = [length - FIRST for length in request.lengths]
        return self._draft(request, first, lengths=lengths, arena=self.arena)

    def _read_on(self, request: DraftRequest) -> Carried:
        """Read the text up to its last token: p at entry and exit there, each `[R, 1, D]`."""
        base, lengths = self.accelerator.base, request.lengths
        lacking = (length + 1 - read for length, read in zip(lengths, self.read, strict=True))
        n = max(1, *lacking)  # what stands behind the last token is needed in any case
        # All rows read as many: a row that lacks fewer reads some again. Only one shorter than
        # that is padded on the right, and its next tokens overwrite the padding.
        starts = [max(FIRST, length + 1 - n) for length in lengths]
        texts = [row[start : start + n] for row, start in zip(request.ids, starts, strict=True)]
        ids = torch.tensor([[*text, *[0] * (n - len(text))] for text in texts], device=base.device)
        before = torch.tensor(starts, device=base.device)[:, None] - 1
        before = before + torch.arange(n, device=base.device)
        rows = torch.arange(len(starts), device=base.device)
        carried = tuple(self.features[i][rows[:, None], before] for i in self.carry_layers)
        block = base.block([start - FIRST for start in starts], n)
        start = self.accelerator.enter(ids, Carried(carried, own=False), block, self.arena)
        end = self.accelerator.advance(start, block, self.arena, None)
        self.read = [length + 1 for length in lengths]
        last = torch.tensor([len(text) - 1 for text in texts], device=base.device)
        return Carried((start[rows, last][:, None], end[rows, last][:, None]), own=True)
