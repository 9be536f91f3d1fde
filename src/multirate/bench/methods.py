"""The decoding methods that a benchmark compares; a rival is one more entry of `METHODS`.

Those of our own engine are here, other engines in `outside`, `llama_cpp` and `vllm`.

All of them get the same token ids, and decode at the same temperature and up to the same limits;
all of a call is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from multirate.bench.llama_cpp import LLAMA_CPP, file_labels
from multirate.bench.outside import LOOKUP_TOKENS, TRANSFORMERS, first_layers
from multirate.bench.registry import Batch, Entry, Method, Output
from multirate.bench.rivals import RIVALS, Rival
from multirate.bench.vllm import VLLM
from multirate.config.errors import MultirateError
from multirate.config.generation import GenerationOptions
from multirate.decode.drafter import Drafter
from multirate.decode.engine import Engine
from multirate.decode.lookup import PromptLookupDrafter
from multirate.decode.rivals import EarlyExitDrafter
from multirate.decode.stream import AcceleratorDrafter
from multirate.streams.accelerator import Accelerator

if TYPE_CHECKING:
    from multirate.bench.options import SpeculativeOptions


def _plain(engine: Engine, settings: SpeculativeOptions) -> Method:
    """Our engine without drafts: what every speedup is measured against."""
    options = GenerationOptions(strategy="plain", **settings.sampling)
    return Method(_generate(engine, options))


def _multirate(
    engine: Engine,
    settings: SpeculativeOptions,
    max_draft_tokens: int = GenerationOptions.max_draft_tokens,
    **unless_asked: Any,
) -> Method:
    """Our engine with the drafts of its own drafter: the accelerator's stream, and lookups."""
    options = draft_options(settings, max_draft_tokens)
    if settings.num_draft_tokens is None:
        options = replace(options, **unless_asked)

    def prepare(batches: Sequence[Batch]) -> None:
        for batch in batches:  # kept by the engine: one measurement for batches of similar size
            engine.draft_length(batch, options)

    return Method(_generate(engine, options), prepare)


def _generate(engine: Engine, options: GenerationOptions) -> Callable[[Batch, int], list[Output]]:
    def run(batch: Batch, new: int) -> list[Output]:
        results = engine.generate(batch, options, max_new_tokens=new)
        return [Output(result.token_ids, result.speculation) for result in results]

    return run


def _with(
    make: Callable[[Engine], Drafter], max_draft_tokens: int = GenerationOptions.max_draft_tokens
) -> Callable[[Engine, SpeculativeOptions], Method]:
    """Our engine with another drafter, of whose steps it then measures the costs."""

    def method(engine: Engine, settings: SpeculativeOptions) -> Method:
        rival = Engine(engine.base, tokenizer=engine.tokenizer, drafter=make(engine))
        return _multirate(rival, settings, max_draft_tokens)

    return method


def _rival(rival: Rival) -> Entry:
    def method(engine: Engine, settings: SpeculativeOptions) -> Method:
        return _multirate(rival.engine(engine, settings), settings, **rival.options)

    return Entry(method, check=rival.check, find_weights=rival.find_weights)


def _stream(engine: Engine) -> Drafter:
    """The accelerator's stream without lookups in the text."""
    return AcceleratorDrafter(cast(Accelerator, engine.accelerator))


def _first_layers(engine: Engine) -> Drafter:
    """The first layers draft, and leave at the model's own head."""
    return EarlyExitDrafter(engine.base, first_layers(engine.base.num_layers))


METHODS: dict[str, Entry] = {
    "plain": Entry(_plain),
    "multirate": Entry(_multirate, needs_accelerator=True),
    "multirate-stream": Entry(_with(_stream), needs_accelerator=True),
    "prompt-lookup": Entry(
        _with(lambda engine: PromptLookupDrafter(num_tokens=LOOKUP_TOKENS), LOOKUP_TOKENS)
    ),
    "first-k": Entry(_with(_first_layers)),
    **{name: _rival(rival) for name, rival in RIVALS.items()},
    **TRANSFORMERS,
    **LLAMA_CPP,
    **VLLM,
}


def draft_options(
    settings: SpeculativeOptions, max_draft_tokens: int = GenerationOptions.max_draft_tokens
) -> GenerationOptions:
    """Options of speculative decoding with the number of drafts and the temperature asked for.

    Raises:
        MultirateError: fewer than one draft.
    """
    return GenerationOptions(
        strategy="speculative",
        num_draft_tokens=settings.num_draft_tokens,
        max_draft_tokens=max(max_draft_tokens, settings.num_draft_tokens or 0),
        **settings.sampling,
    )


def bind(engine: Engine, settings: SpeculativeOptions) -> dict[str, Method]:
    """The methods asked for, by the names under which they are reported.

    One that runs GGUF files is there once for each file; of several files the name tells which.
    """
    methods = {}
    for name in settings.methods:
        entry = METHODS[name]
        if not entry.reads_gguf:
            methods[name] = entry.make(engine, settings)
            continue
        labels = file_labels(settings.gguf)
        for path, label in zip(settings.gguf, labels, strict=True):
            own = name if len(labels) == 1 else f"{name}:{label}"
            methods[own] = entry.make(engine, replace(settings, gguf=(path,)))
    return methods


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
