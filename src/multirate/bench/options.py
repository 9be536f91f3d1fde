"""What `multirate bench speculative` is asked to measure."""

from __future__ import annotations

from dataclasses import dataclass

from multirate.bench.methods import METHODS, draft_options, require_methods
from multirate.config.errors import MultirateError
from multirate.config.generation import GenerationOptions


@dataclass(frozen=True)
class SpeculativeOptions:
    """What is measured.

    Attributes:
        methods: names in `METHODS`.
        max_new_tokens: most tokens a prompt; an end-of-sequence token may end it earlier.
        num_draft_tokens: drafts a step; None for the number that the measured step costs suggest.
        by_category: also sum up each category of prompts on its own.

    Raises:
        MultirateError: an unknown method, or a number that is not allowed.
    """

    methods: tuple[str, ...] = ("plain", "transformers", "multirate")
    max_new_tokens: int = 128
    num_draft_tokens: int | None = None
    by_category: bool = False

    def __post_init__(self) -> None:
        require_methods(self.methods)
        GenerationOptions(max_new_tokens=self.max_new_tokens)
        draft_options(self.num_draft_tokens)

    @property
    def needs_accelerator(self) -> bool:
        return any(METHODS[name].needs_accelerator for name in self.methods)

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
