"""The decoding methods that a benchmark compares; a rival is one more entry of `METHODS`.

All of them get the same token ids and decode greedily up to the same limits; all of a call is timed.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig

from multirate.bench.registry import Entry, Method, Output
from multirate.config.errors import MultirateError
from multirate.config.generation import GenerationOptions
from multirate.decode.engine import Engine
from multirate.decode.results import GenerationResult
from multirate.models import hf

if TYPE_CHECKING:
    from multirate.bench.options import SpeculativeOptions


def _plain(engine: Engine, settings: SpeculativeOptions) -> Method:
    """Our engine without drafts: what every speedup is measured against."""
    options = GenerationOptions(strategy="plain")
    return Method(lambda ids, new: _output(engine.generate(ids, options, max_new_tokens=new)))


def _multirate(engine: Engine, settings: SpeculativeOptions) -> Method:
    """Our engine with the accelerator's drafts."""
    options = draft_options(settings.num_draft_tokens)

    def prepare(prompts: Sequence[list[int]]) -> None:
        if settings.num_draft_tokens is None:
            for ids in prompts:  # kept by the engine: one measurement for prompts of similar length
                engine.step_costs(rows=1, context=len(ids), max_drafts=options.max_draft_tokens)

    return Method(
        lambda ids, new: _output(engine.generate(ids, options, max_new_tokens=new)), prepare
    )


def _transformers(engine: Engine, settings: SpeculativeOptions) -> Method:
    """The stock `model.generate` with its own default cache."""
    model, context = engine.base.model, engine.base.context_length

    def run(ids: list[int], new: int) -> Output:
        eos = sorted(engine.eos_token_ids)
        input_ids = torch.tensor([ids], device=engine.base.device)
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=min(new, context - len(ids)),
            eos_token_id=eos or None,
            pad_token_id=eos[0] if eos else 0,  # never written: a batch of one needs no padding
        )
        # Whatever the arguments leave open comes from the model's own generation config, repetition
        # penalties included: with that it would not be greedy decoding of the same model.
        own, model.generation_config = model.generation_config, GenerationConfig()
        try:
            with hf.quiet(), warnings.catch_warnings(action="ignore"):
                output = model.generate(
                    input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config
                )
        finally:
            model.generation_config = own
        return Output(output[0, len(ids) :].tolist())

    return Method(run)


METHODS: dict[str, Entry] = {
    "plain": Entry(_plain),
    "transformers": Entry(_transformers),
    "multirate": Entry(_multirate, needs_accelerator=True),
}


def draft_options(num_draft_tokens: int | None) -> GenerationOptions:
    """Options of speculative decoding with a fixed number of drafts, or None for the chosen one.

    Raises:
        MultirateError: fewer than one draft.
    """
    longest = max(GenerationOptions.max_draft_tokens, num_draft_tokens or 0)
    return GenerationOptions(
        strategy="speculative", num_draft_tokens=num_draft_tokens, max_draft_tokens=longest
    )


def require_methods(names: Sequence[str]) -> None:
    """Check a list of method names.

    Raises:
        MultirateError: no name, an unknown one, or one twice.
    """
    known = f"Methods: {', '.join(METHODS)}."
    if not names:
        raise MultirateError(f"No method was named. {known}")
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise MultirateError(f"Unknown method {unknown[0]!r}. {known}")
    twice = [name for name in METHODS if names.count(name) > 1]
    if twice:
        raise MultirateError(f"Method {twice[0]!r} is named twice; name each once. {known}")


def _output(result: GenerationResult) -> Output:
    return Output(result.token_ids, result.speculation)
