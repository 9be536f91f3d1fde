"""Drafters of other methods, for a fair comparison: the same engine, the same exact acceptance.

Early exit drafts with the base model's own first layers (LayerSkip, Elhoushi et al. 2024, arXiv
2404.16710; LITE, Varshney et al. 2023, arXiv 2310.18581); two-model drafting with a smaller model
(Leviathan et al. 2023, arXiv 2211.17192). Prompt lookup is in `lookup`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import torch
from torch import Tensor

from multirate.config.errors import MultirateError
from multirate.decode.drafter import RANKED, Draft, Drafter, DraftRequest
from multirate.decode.growth import draft_chain
from multirate.decode.loop import prefill
from multirate.models.base import BaseModel


class EarlyExitDrafter(Drafter):
    """Drafts with the first layers of the base model, its final norm and its LM head.

    Keys and values of those layers are the model's own, so they lie in its arena; verification runs
    the drafts through all layers and overwrites what was drafted.

    Args:
        base: the model that verifies.
        num_layers: how many of its layers draft; all of them always guess right and save nothing.

    Raises:
        MultirateError: a number of layers that the model does not have.
    """

    def __init__(self, base: BaseModel, num_layers: int) -> None:
        if not 1 <= num_layers <= base.num_layers:
            raise MultirateError(
                f"num_layers={num_layers} is not allowed; the model has {base.num_layers} layers, so "
                f"give 1 to {base.num_layers}."
            )
        self.base, self.num_layers = base, num_layers

    @property
    def max_width(self) -> int:
        return RANKED

    @property
    def grows(self) -> bool:
        return True

    def draft(self, request: DraftRequest) -> Draft:
        base = self.base

        def step(made: int, token: Tensor) -> Tensor:
            block = base.block([length + made for length in request.lengths], 1)
            h = base.embed(token[:, None])
            h = base.run_layers(h, 0, self.num_layers, block, request.arena)
            return base.head(h)[:, 0]

        return draft_chain(step, request)


class ModelDrafter(Drafter):
    """Drafts with another, smaller model.

    Where a text has outgrown the smaller model's context, nothing is drafted.

    Args:
        model: drafts.
        base: the model that verifies.

    Raises:
        MultirateError: the models differ in vocabulary size or device.
    """

    def __init__(self, model: BaseModel, base: BaseModel) -> None:
        if model.vocab_size != base.vocab_size:
            raise MultirateError(
                f"The drafting model has a vocabulary of {model.vocab_size}, the base model one of "
                f"{base.vocab_size}: their token ids mean different things. Choose a drafting model "
                f"of the same family, with the same tokenizer."
            )
        if model.device != base.device:
            raise MultirateError(
                f"The drafting model is on {model.device}, the base model on {base.device}. Load both "
                f"on the same device."
            )
        self.model = model

    @property
    def max_width(self) -> int:
        return RANKED

    @property
    def grows(self) -> bool:
        return True

    def start(self, *, rows: int, max_len: int) -> Drafter:
        return _ModelRun(self.model, rows=rows, max_len=max_len)

    def draft(self, request: DraftRequest) -> Draft:
        """One draft from nothing: `start` gives the drafter that remembers what it has read."""
        longest = max(len(row) for row in request.ids)
        return self.start(rows=len(request.ids), max_len=longest + request.count).draft(request)


class _ModelRun(Drafter):
    """One generation of a `ModelDrafter`: the smaller model's keys and values, and what they hold."""

    def __init__(self, model: BaseModel, *, rows: int, max_len: int) -> None:
        self.model = model
        self.arena = model.arena(rows=rows, max_len=max_len)
        # The ids behind each row's keys and values: a verified text, then drafts.
        self.verified = [0] * rows
        self.drafts: list[list[int]] = [[] for _ in range(rows)]

    def keep(self, rows: Sequence[int]) -> None:
        self.arena.keep(torch.tensor(rows, device=self.model.device))
        self.verified = [self.verified[row] for row in rows]
        self.drafts = [self.drafts[row] for row in rows]

    def draft(self, request: DraftRequest) -> Draft:
        model, ids = self.model, request.ids
        count = min(request.count, model.context_length - max(len(row) for row in ids) + 1)
        if count < 1:
            return Draft(request.last.new_empty((len(ids), 0)))
        h = self._catch_up(ids)
        read = [request.last[:, None][:, :0]]  # drafts, each [R, 1]

        def step(made: int, token: Tensor) -> Tensor:
            nonlocal h
            if made > 0:
                read.append(token[:, None])
                block = model.block([length + made for length in request.lengths], 1)
                h = model.run_layers(
                    model.embed(token[:, None]), 0, model.num_layers, block, self.arena
                )
            return model.head(h)[:, 0]

        draft = draft_chain(step, replace(request, count=count))
        self.verified = [len(row) for row in ids]
        self.drafts = torch.cat(read, dim=1).tolist()
        return draft

    def _catch_up(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """Read what each row got since the last draft: h_N `[R, 1, D]` of its last token."""
        if not any(self.verified):
            return prefill(self.model, ids, self.arena, ())[0]
        missing = 1  # the last token's state is needed even where its keys are there
        for row, verified, drafts in zip(ids, self.verified, self.drafts, strict=True):
            new = row[verified:]
            right = takewhile(lambda pair: pair[0] == pair[1], zip(new, drafts, strict=False))
            missing = max(missing, len(new) - len(list(right)))
        # All rows read as many: a row that lacks fewer reads some again. Only one shorter than
        # that is padded on the right, and its next tokens overwrite the padding.
        starts = [max(0, len(row) - missing) for row in ids]
        texts = [row[start:] for row, start in zip(ids, starts, strict=True)]
        fresh = [[*text, *[0] * (missing - len(text))] for text in texts]
        block = self.model.block(starts, missing)
        h = self.model.embed(torch.tensor(fresh, device=self.model.device))
        h = self.model.run_layers(h, 0, self.model.num_layers, block, self.arena)
        ends = [len(text) - 1 for text in texts]
        return h[torch.arange(len(ids), device=h.device), ends][:, None]
