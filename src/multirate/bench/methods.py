"""The decoding methods that a benchmark compares; a rival is one more entry of `METHODS`.

Those of our own engine are here, other engines in `outside`.

All of them get the same token ids, and decode at the same temperature and up to the same limits;
all of a call is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from multirate.bench.outside import OUTSIDE
from multirate.bench.registry import Entry, Method, Output
from multirate.config.errors import MultirateError
from multirate.config.generation import GenerationOptions
from multirate.decode.drafter import Drafter
from multirate.decode.engine import Engine
from multirate.decode.lookup import NgramFirstDrafter, PromptLookupDrafter
from multirate.decode.results import GenerationResult
from multirate.decode.rivals import EarlyExitDrafter

if TYPE_CHECKING:
    from multirate.bench.options import SpeculativeOptions


def _plain(engine: Engine, settings: SpeculativeOptions) -> Method:
    """Our engine without drafts: what every speedup is measured against."""
    options = GenerationOptions(strategy="plain", **settings.sampling)
    return Method(lambda ids, new: _output(engine.generate(ids, options, max_new_tokens=new)))


def _multirate(engine: Engine, settings: SpeculativeOptions) -> Method:
    """Our engine with the drafts of its own drafter, the accelerator."""
    options = draft_options(settings)

    def prepare(prompts: Sequence[list[int]]) -> None:
        if settings.num_draft_tokens is None:
            for ids in prompts:  # kept by the engine: one measurement for prompts of similar length
                engine.step_costs(rows=1, context=len(ids), max_drafts=options.max_draft_tokens)

    return Method(
        lambda ids, new: _output(engine.generate(ids, options, max_new_tokens=new)), prepare
    )


def _with(make: Callable[[Engine], Drafter]) -> Callable[[Engine, SpeculativeOptions], Method]:
    """Our engine with another drafter, of whose steps it then measures the costs."""

    def method(engine: Engine, settings: SpeculativeOptions) -> Method:
        rival = Engine(engine.base, tokenizer=engine.tokenizer, drafter=make(engine))
        return _multirate(rival, settings)

    return method


def _ngrams_first(engine: Engine) -> Drafter:
    """Prompt lookup, and the accelerator's stream where it finds nothing."""
    return NgramFirstDrafter(cast(Drafter, engine.drafter))


def _first_layers(engine: Engine) -> Drafter:
    """Early exit after a sixth of the layers."""
    return EarlyExitDrafter(engine.base, max(1, engine.base.num_layers // 6))


METHODS: dict[str, Entry] = {
    "plain": Entry(_plain),
    "multirate": Entry(_multirate, needs_accelerator=True),
    "ngram-multirate": Entry(_with(_ngrams_first), needs_accelerator=True),
    "prompt-lookup": Entry(_with(lambda engine: PromptLookupDrafter())),
    "first-k": Entry(_with(_first_layers)),
    **OUTSIDE,
}


def draft_options(settings: SpeculativeOptions) -> GenerationOptions:
    """Options of speculative decoding with the number of drafts and the temperature asked for.

    Raises:
        MultirateError: fewer than one draft.
    """
    return GenerationOptions(
        strategy="speculative",
        num_draft_tokens=settings.num_draft_tokens,
        max_draft_tokens=max(GenerationOptions.max_draft_tokens, settings.num_draft_tokens or 0),
        **settings.sampling,
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
