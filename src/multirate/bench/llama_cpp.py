"""llama.cpp through llama-cpp-python, plain and with its prompt lookup, on GGUF files.

It gets the same token ids, stops at the same end-of-sequence tokens and uses as many threads.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gguf import GGUFReader, LlamaFileType

from multirate.bench.outside import LOOKUP_TOKENS
from multirate.bench.registry import Batch, Entry, Method, Output
from multirate.bench.statistics import SEED
from multirate.config.errors import MultirateError
from multirate.decode.engine import Engine

if TYPE_CHECKING:
    from multirate.bench.options import SpeculativeOptions

CONTEXT_STEP = 256  # llama.cpp's contexts are multiples of it


class _LlamaCpp:
    """llama.cpp on a GGUF file.

    Raises:
        MultirateError: llama-cpp-python is not installed; by `prepare`: the file is not one that
            llama.cpp reads, or another model's.
    """

    def __init__(self, engine: Engine, settings: SpeculativeOptions, *, lookup: bool) -> None:
        self.library = llama_cpp()
        self.engine, self.settings, self.lookup = engine, settings, lookup
        # Without the limits that it sets by itself; at temperature 0 it reads none of them.
        self.sampling = {
            "temp": settings.temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
        }  # fmt: skip

    def prepare(self, batches: Sequence[Batch]) -> None:
        """Load the model, with a context that holds the longest prompt and its new tokens."""
        base, (path,) = self.engine.base, self.settings.gguf
        threads = torch.get_num_threads()
        longest = max(len(ids) for batch in batches for ids in batch) + self.settings.max_new_tokens
        # llama.cpp rounds up; the library, which does not, would write drafts beyond its own room.
        room = -(-(longest + LOOKUP_TOKENS) // CONTEXT_STEP) * CONTEXT_STEP
        drafting: dict[str, Any] = {}
        if self.lookup:
            speculative = importlib.import_module("llama_cpp.llama_speculative")
            drafting["draft_model"] = speculative.LlamaPromptLookupDecoding(
                num_pred_tokens=LOOKUP_TOKENS
            )
            # It computes all logits then, and makes room for those of a whole text only if told so.
            drafting["logits_all"] = True
        try:
            self.llama = self.library.Llama(
                str(path),
                n_ctx=room,
                n_threads=threads,
                n_threads_batch=threads,
                n_gpu_layers=-1 if base.device.type == "cuda" else 0,
                seed=SEED,
                verbose=False,
                **drafting,
            )
        except ValueError as error:
            raise MultirateError(f"llama.cpp cannot load {path}: {error}") from None
        if self.llama.n_vocab() != base.vocab_size:
            raise MultirateError(
                f"{path} holds another model: its vocabulary has {self.llama.n_vocab()} tokens, this "
                f"model's {base.vocab_size}. Give a GGUF file of the same model (--gguf)."
            )

    def run(self, batch: Batch, new: int) -> list[Output]:
        (ids,) = batch
        self.llama.reset()  # or it would keep what two prompts begin with in common
        eos, tokens = self.engine.eos_token_ids, []
        room = min(new, self.engine.base.context_length - len(ids))
        for token in islice(self.llama.generate(ids, **self.sampling), room):
            tokens.append(token)
            if token in eos:
                break
        return [Output(tokens)]


def llama_cpp() -> Any:
    """The module of llama-cpp-python.

    Raises:
        MultirateError: it is not installed.
    """
    try:
        return importlib.import_module("llama_cpp")
    except ImportError as error:
        raise MultirateError(
            f"The llama.cpp methods need llama-cpp-python, which cannot be imported ({error}). Install "
            f"it with: pip install llama-cpp-python"
        ) from None


def _require_gguf(settings: SpeculativeOptions) -> None:
    llama_cpp()
    if not settings.gguf:
        raise MultirateError(
            "The llama.cpp methods need the model as a GGUF file; give its path (--gguf FILE)."
        )
    for path in settings.gguf:
        if not path.is_file():
            raise MultirateError(f"There is no GGUF file {path}; give its path (--gguf FILE).")


def _llama_cpp(lookup: bool) -> Entry:
    def make(engine: Engine, settings: SpeculativeOptions) -> Method:
        llama = _LlamaCpp(engine, settings, lookup=lookup)
        return Method(llama.run, llama.prepare, own_weights=True)

    return Entry(make, check=_require_gguf, reads_gguf=True, batches=False)


def file_labels(paths: Sequence[Path]) -> list[str]:
    """What tells GGUF files apart: their quantisation, or their names where that does not."""
    labels = [_quantization(path) for path in paths]
    return labels if len(set(labels)) == len(labels) else [path.stem for path in paths]


def _quantization(path: Path) -> str:
    """Of most of a file's tensors, such as "Q4_1", as its metadata has it; else the file's name."""
    try:
        field = GGUFReader(path).get_field("general.file_type")
        kind = LlamaFileType(field.contents())  # type: ignore[union-attr]
    except (
        AttributeError,
        IndexError,
        OSError,
        ValueError,
    ):  # not there, or no GGUF: told when it is loaded
        return path.stem
    return kind.name.removeprefix("MOSTLY_").removeprefix("ALL_")


LLAMA_CPP: dict[str, Entry] = {
    "llama.cpp": _llama_cpp(lookup=False),
    "llama.cpp-lookup": _llama_cpp(lookup=True),
}
