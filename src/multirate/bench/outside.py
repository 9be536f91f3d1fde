"""Engines that are not ours: transformers' `generate`, and llama.cpp through llama-cpp-python.

They get the same token ids, stop at the same end-of-sequence tokens and use as many threads.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from multirate.bench.registry import Entry, Method, Output
from multirate.bench.statistics import SEED
from multirate.config.errors import MultirateError
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


def _generate(engine: Engine, settings: SpeculativeOptions, **drafting: Any) -> Method:
    model, context = engine.stock_model(), engine.base.context_length
    stock = None if model is engine.base.model else model.dtype
    sampling: dict[str, Any] = {"do_sample": False}
    if settings.temperature:  # without the limits that transformers sets by itself
        sampling = {
            "do_sample": True, "temperature": settings.temperature, "top_k": 0, "top_p": 1.0,
        }  # fmt: skip
    cuda = [engine.base.device] if engine.base.device.type == "cuda" else []

    def run(ids: list[int], new: int) -> Output:
        eos = sorted(engine.eos_token_ids)
        input_ids = torch.tensor([ids], device=engine.base.device)
        config = GenerationConfig(
            **sampling,
            max_new_tokens=min(new, context - len(ids)),
            eos_token_id=eos or None,
            pad_token_id=eos[0] if eos else 0,  # never written: a batch of one needs no padding
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
                    input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config
                )
        finally:
            model.generation_config = own
        return Output(output[0, len(ids) :].tolist())

    return Method(run, dtype=stock)


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

    def prepare(self, prompts: Sequence[list[int]]) -> None:
        """Load the model, with a context that holds the longest prompt and its new tokens."""
        base, path, threads = self.engine.base, self.settings.gguf, torch.get_num_threads()
        longest = max(map(len, prompts)) + self.settings.max_new_tokens
        drafting = {}
        if self.lookup:
            speculative = importlib.import_module("llama_cpp.llama_speculative")
            drafting["draft_model"] = speculative.LlamaPromptLookupDecoding(
                num_pred_tokens=LOOKUP_TOKENS
            )
        try:
            self.llama = self.library.Llama(
                str(path),
                n_ctx=min(base.context_length, longest),
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

    def run(self, ids: list[int], new: int) -> Output:
        self.llama.reset()  # or it would keep what two prompts begin with in common
        eos, tokens = self.engine.eos_token_ids, []
        room = min(new, self.engine.base.context_length - len(ids))
        for token in islice(self.llama.generate(ids, **self.sampling), room):
            tokens.append(token)
            if token in eos:
                break
        return Output(tokens)


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
    if settings.gguf is None:
        raise MultirateError(
            "The llama.cpp methods need the model as a GGUF file; give its path (--gguf FILE)."
        )
    if not settings.gguf.is_file():
        raise MultirateError(f"There is no GGUF file {settings.gguf}; give its path (--gguf FILE).")


def _llama_cpp(lookup: bool) -> Entry:
    def make(engine: Engine, settings: SpeculativeOptions) -> Method:
        llama = _LlamaCpp(engine, settings, lookup=lookup)
        return Method(llama.run, llama.prepare)

    return Entry(make, check=_require_gguf, reads_gguf=True)


OUTSIDE: dict[str, Entry] = {
    "transformers": Entry(_transformers),
    "transformers-lookup": Entry(_transformers_lookup),
    "llama.cpp": _llama_cpp(lookup=False),
    "llama.cpp-lookup": _llama_cpp(lookup=True),
}
