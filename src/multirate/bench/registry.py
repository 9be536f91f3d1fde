"""What a decoding method is to a benchmark; the methods themselves are in `methods` and `outside`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from multirate.decode.engine import Engine
from multirate.decode.results import Speculation

if TYPE_CHECKING:
    from multirate.bench.options import SpeculativeOptions

Batch = list[list[int]]  # token ids of prompts that are decoded together
Prepare = Callable[[Sequence[Batch]], None]


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
        run: takes a batch and the most new tokens of a prompt; an output for each prompt.
        prepare: called once with all batches before anything is timed; what a method measures or
            compiles belongs here.
        dtype: of its weights and activations, where they are not the engine's.
        own_weights: whether it runs weights that were rounded in another way than the engine's: its
            outputs are not compared with plain decoding's.
        details: for the provenance, such as versions; read after `prepare`.
        close: called once after everything, also where it failed.
    """

    run: Callable[[Batch, int], list[Output]]
    prepare: Prepare = lambda batches: None
    dtype: torch.dtype | None = None
    own_weights: bool = False
    details: dict[str, Any] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Entry:
    """A method's line in the registry.

    Attributes:
        make: takes the engine and what was asked for.
        needs_accelerator: whether the engine must have one.
        check: raises a MultirateError where something that was asked for, or a library, is missing;
            called before a model is loaded.
        find_weights: finds the method's own trained weights for a model of this name; raises a
            MultirateError where there are none. Called before a model is loaded.
        reads_gguf: whether it runs GGUF files instead of the engine's weights; it is then measured
            once for each file.
        batches: whether it decodes several prompts together.
    """

    make: Callable[[Engine, SpeculativeOptions], Method]
    needs_accelerator: bool = False
    check: Callable[[SpeculativeOptions], None] = lambda settings: None
    find_weights: Callable[[str], object] = lambda model: None
    reads_gguf: bool = False
    batches: bool = True
