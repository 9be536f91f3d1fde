"""transformers' own `generate`: plain, with prompt lookup, and drafting with its own first layers.

It gets the same token ids and stops at the same end-of-sequence tokens.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from multirate.bench.registry import Batch, Entry, Method, Output
from multirate.bench.statistics import SEED
from multirate.decode.engine import Engine
from multirate.models import hf

if TYPE_CHECKING:
    from multirate.bench.options import SpeculativeOptions

LOOKUP_TOKENS = 10  # drafts a step of prompt lookup, as its author and both libraries have it


def _transformers(engine: Engine, settings: SpeculativeOptions) -> Method:
    """The stock `model.generate` with its own default cache."""
    return _generate(engine, settings)


def _transformers_lookup(engine: Engine, settings: SpeculativeOptions) -> Method:
    """`model.generate` with prompt lookup: drafts are what followed the same tokens before."""
    return _generate(engine, settings, prompt_lookup_num_tokens=LOOKUP_TOKENS)


def _transformers_early_exit(engine: Engine, settings: SpeculativeOptions) -> Method:
    """`model.generate` with `assistant_early_exit`: the first layers draft (LayerSkip)."""
    return _generate(engine, settings, assistant_early_exit=first_layers(engine.base.num_layers))


def first_layers(num_layers: int) -> int:
    """After how many layers drafts of a model's own first layers leave it: a sixth."""
    return max(1, num_layers // 6)


@lru_cache(maxsize=1)
def _stock(engine: Engine) -> PreTrainedModel:
    """One model for all methods."""
    return engine.stock_model()


def _generate(engine: Engine, settings: SpeculativeOptions, **drafting: Any) -> Method:
    model, context = _stock(engine), engine.base.context_length
    stock = None if model is engine.base.model else model.dtype
    sampling: dict[str, Any] = {"do_sample": False}
    if settings.temperature:  # without the limits that transformers sets by itself
        sampling = {
            "do_sample": True, "temperature": settings.temperature, "top_k": 0, "top_p": 1.0,
        }  # fmt: skip
    device = engine.base.device
    cuda = [device] if device.type == "cuda" else []

    def run(batch: Batch, new: int) -> list[Output]:
        eos = sorted(engine.eos_token_ids)
        pad = eos[0] if eos else 0
        longest = max(map(len, batch))
        padding = [longest - len(ids) for ids in batch]
        padded = [[pad] * n + ids for n, ids in zip(padding, batch, strict=True)]
        seen = [[0] * n + [1] * (longest - n) for n in padding]
        config = GenerationConfig(
            **sampling,
            max_new_tokens=min(new, context - longest),
            eos_token_id=eos or None,
            pad_token_id=pad,
            **drafting,
        )
        # Whatever the arguments leave open comes from the model's own generation config, repetition
        # penalties included: with that it would not be the same way to decode.
        own, model.generation_config = model.generation_config, GenerationConfig()
        try:
            with (
                hf.quiet(),
                warnings.catch_warnings(action="ignore"),
                torch.random.fork_rng(
                    devices=cuda
                ),  # whoever calls keeps a random state of their own
            ):
                torch.manual_seed(SEED)
                output = model.generate(
                    torch.tensor(padded, device=device),
                    attention_mask=torch.tensor(seen, device=device),
                    generation_config=config,
                )
        finally:
            model.generation_config = own
        return [Output(_until_end(row, set(eos))) for row in output[:, longest:].tolist()]

    return Method(run, dtype=stock)


def _until_end(tokens: list[int], eos: set[int]) -> list[int]:
    """Without the padding behind the token that ends a text."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in eos), len(tokens))
    return tokens[:end]


TRANSFORMERS: dict[str, Entry] = {
    "transformers": Entry(_transformers),
    "transformers-lookup": Entry(_transformers_lookup, batches=False),
    "transformers-early-exit": Entry(_transformers_early_exit, batches=False),
}
