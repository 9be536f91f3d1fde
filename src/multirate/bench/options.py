"""What `multirate bench speculative` is asked to measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multirate.bench.methods import METHODS, draft_options, require_methods
from multirate.bench.statistics import SEED
from multirate.config.errors import MultirateError
from multirate.config.generation import GenerationOptions


@dataclass(frozen=True)
class SpeculativeOptions:
    """What is measured.

    Attributes:
        methods: names in `METHODS`.
        max_new_tokens: most tokens a prompt; an end-of-sequence token may end it earlier.
        num_draft_tokens: drafts a step; None for the number that the measured step costs suggest.
        gguf: the model as files that llama.cpp reads, one for each quantisation; for its methods only.
        temperature: 0 for greedy decoding; above, every method samples from the whole distribution.
        by_category: also sum up each category of prompts on its own.
        batch: prompts that are decoded together; the last batch may be smaller.
        context: tokens that a prompt is lengthened to with text in front of it (`prompts`); None leaves
            prompts as they are.
        turns: how many of a conversation's turns are prompts of their own.
        vllm_python: a Python that has vLLM; for its methods only.
        draft_model: the smaller model of the method `two-model`.

    Raises:
        MultirateError: an unknown method, one whose library or file is missing, a file that no
            method reads, or a number that is not allowed.
    """

    methods: tuple[str, ...] = ("plain", "transformers", "multirate")
    max_new_tokens: int = 128
    num_draft_tokens: int | None = None
    gguf: tuple[Path, ...] = ()
    temperature: float = 0.0
    by_category: bool = False
    batch: int = 1
    context: int | None = None
    turns: int = 1
    vllm_python: str | None = None
    draft_model: str | None = None

    def __post_init__(self) -> None:
        require_methods(self.methods)
        GenerationOptions(max_new_tokens=self.max_new_tokens, **self.sampling)
        draft_options(self)
        for option in ("batch", "turns", "context"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise MultirateError(f"{option}={value} is not allowed; give at least 1.")
        for name in self.methods:
            METHODS[name].check(self)
            if self.batch > 1 and not METHODS[name].batches:
                raise MultirateError(
                    f"Method {name!r} decodes one prompt at a time: leave it out (--methods), or use "
                    f"--batch 1 (now {self.batch})."
                )
        if self.draft_model is not None and "two-model" not in self.methods:
            raise MultirateError(
                f"{self.draft_model} was given (--draft-model), and no method reads it. Add 'two-model' "
                f"to --methods."
            )
        if self.gguf and not reads_gguf(self.methods):
            readers = ", ".join(name for name, entry in METHODS.items() if entry.reads_gguf)
            raise MultirateError(
                f"{self.gguf[0]} was given (--gguf), and no method reads it. Name one (--methods): "
                f"{readers}."
            )

    @property
    def sampling(self) -> dict[str, Any]:
        """Of our own engine's options, those that say how a token is chosen."""
        return {"temperature": self.temperature, "seed": SEED if self.temperature else None}

    @property
    def needs_accelerator(self) -> bool:
        return any(METHODS[name].needs_accelerator for name in self.methods)

    def require_plain(self, option: str) -> None:
        """Check that plain decoding, which speed-ups are measured against, is among the methods.

        Raises:
            MultirateError: it is not; `option` is what asked for it.
        """
        if "plain" not in self.methods:
            raise MultirateError(
                f"{option} shows speed-ups against plain decoding: add 'plain' to --methods."
            )

    def require_weights(self, model: str) -> None:
        """Check that the trained weights of methods that have some are there for a model of this name.

        Raises:
            MultirateError: they are not.
        """
        for name in self.methods:
            METHODS[name].find_weights(model)

    def require_accelerator(self, there: bool) -> None:
        """Check that there is an accelerator if a method needs one.

        Raises:
            MultirateError: there is none.
        """
        if self.needs_accelerator and not there:
            name = next(name for name in self.methods if METHODS[name].needs_accelerator)
            raise MultirateError(
                f"Method {name!r} needs an accelerator, and there is none for this model. Give one "
                f"(--accelerator), make one with `multirate train`, or leave the method out (--methods)."
            )


def reads_gguf(methods: Sequence[str]) -> bool:
    """Whether a method among these runs a GGUF file; unknown names do not."""
    return any(METHODS[name].reads_gguf for name in methods if name in METHODS)
