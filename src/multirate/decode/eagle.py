"""Drafting with a stream that has keys and values of its own, as EAGLE's (arXiv 2401.15077, 2503.01840).

The preset `eagle` of `config.accelerator` is such a stream. It must read the whole text itself: for each
position the token there and the model's features one position before, which the generation loop shows
in `observe`. What was drafted from its own features is read again once the model has verified it.

Shapes: R rows, n positions, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from multirate.decode.drafter import Draft, DraftRequest, Observation
from multirate.decode.stream import StreamDrafter
from multirate.streams.accelerator import Accelerator, Carried, Guess

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
        lengths = [length - FIRST for length in request.lengths]
        return self._draft(
            request, lambda: self._read_on(request), lengths=lengths, arena=self.arena
        )

    def _read_on(self, request: DraftRequest) -> Guess:
        """Read the text up to its last token, `[R, 1]`: what follows it."""
        base, lengths = self.accelerator.base, request.lengths
        lacking = (length + 1 - read for length, read in zip(lengths, self.read, strict=True))
        n = max(1, *lacking)  # what stands behind the last token is needed in any case
        # All rows read as many: a row that lacks fewer reads some again. Only one shorter than
        # that is padded on the right, and its next tokens overwrite the padding.
        starts = [max(FIRST, length + 1 - n) for length in lengths]
        texts = [row[start : start + n] for row, start in zip(request.ids, starts, strict=True)]
        ids = torch.tensor([[*text, *[0] * (n - len(text))] for text in texts], device=base.device)
        if len(starts) == 1:
            before = slice(starts[0] - 1, starts[0] - 1 + n)
            states = tuple(self.features[i][:, before] for i in self.carry_layers)
        else:
            places = torch.tensor(starts, device=base.device)[:, None] - 1
            places = places + torch.arange(n, device=base.device)
            rows = torch.arange(len(starts), device=base.device)[:, None]
            states = tuple(self.features[i][rows, places] for i in self.carry_layers)
        block = base.block([start - FIRST for start in starts], n)
        last = torch.tensor([[len(text) - 1] for text in texts], device=base.device)
        self.read = [length + 1 for length in lengths]
        return self.accelerator.guess(ids, Carried(states, own=False), block, self.arena, last=last)
