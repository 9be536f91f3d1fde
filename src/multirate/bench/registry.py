"""What a decoding method is to a benchmark; the methods themselves are in `methods` and `outside`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from multirate.decode.engine import Engine
from multirate.decode.results import Speculation

if TYPE_CHECKING:
    from multirate.bench.options import SpeculativeOptions

Prepare = Callable[[Sequence[list[int]]], None]


@dataclass(frozen=True)
class Output:
    """What a method made of one prompt.

    Attributes:
        token_ids: new tokens, an end-of-sequence token included.
        speculation: None for a method that drafts nothing.
    """

    token_ids: list[int]
    speculation: Speculation | None = None


@dataclass(frozen=True)
class Method:
    """A way to decode, bound to a model.

    Attributes:
        run: takes a prompt's ids and the most new tokens.
        prepare: called once with all prompts before anything is timed; what a method measures or
            compiles belongs here.
        dtype: of its weights and activations, where they are not the engine's.
    """

    run: Callable[[list[int], int], Output]
    prepare: Prepare = lambda prompts: None
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Entry:
    """A method's line in the registry.

    Attributes:
        make: takes the engine and what was asked for.
        needs_accelerator: whether the engine must have one.
        check: raises a MultirateError where something that was asked for, or a library, is missing;
            called before a model is loaded.
        reads_gguf: whether it runs a GGUF file instead of the engine's weights, which are rounded
            in another way: its outputs are not compared with plain decoding's.
    """

    make: Callable[[Engine, SpeculativeOptions], Method]
    needs_accelerator: bool = False
    check: Callable[[SpeculativeOptions], None] = lambda settings: None
    reads_gguf: bool = False
