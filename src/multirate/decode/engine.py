"""The engine: one base model, at most one accelerator, text in and text out.

A thin consumer of the generation loop: it turns prompts into ids, options into a sampler, checkers and
a draft-length policy, and steps into results or a stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from multirate.config.errors import MultirateError
from multirate.config.generation import GenerationOptions
from multirate.decode.costs import StepCosts
from multirate.decode.draft_length import MAX_ENTRIES, MAX_WIDTH, DraftLength
from multirate.decode.drafter import Drafter
from multirate.decode.lookup import NgramTreeDrafter
from multirate.decode.loop import RowStep, SpeculationCounts, decode
from multirate.decode.measuring import measure_steps
from multirate.decode.results import GenerationResult, Speculation
from multirate.decode.sampling import Processor, Sampler
from multirate.decode.stopping import StopChecker
from multirate.decode.stream import AcceleratorDrafter
from multirate.models.attention import group_queries
from multirate.models.base import BaseModel
from multirate.models.compiled import require_compile_mode
from multirate.models.forms import choose_form
from multirate.models.loading import end_token_ids, load_pretrained, render_chat
from multirate.models.packed import PACKED
from multirate.models.quantized import BITS
from multirate.models.words import pack_kept
from multirate.streams.accelerator import Accelerator

# A prompt: text (through the chat template unless raw), chat messages, or token ids.
Prompt = str | Sequence[Mapping[str, str]] | Sequence[int] | Tensor


class Engine:
    """Generates with one base model; made by `multirate.load`.

    Args:
        base: the model.
        tokenizer: None leaves token ids as the only way in and out.
        accelerator: its stream drafts, together with lookups in the text.
        drafter: drafts in their place; `AcceleratorDrafter(accelerator)` is the stream alone. Without
            either there is plain decoding only.
        stock: loads the model as transformers itself would run it, where the base's is not that.
    """

    def __init__(
        self,
        base: BaseModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        accelerator: Accelerator | None = None,
        drafter: Drafter | None = None,
        stock: Callable[[], PreTrainedModel] | None = None,
    ) -> None:
        self.base, self.tokenizer, self.accelerator = base, tokenizer, accelerator
        self._stock = stock
        self.drafter = drafter
        if drafter is None and accelerator is not None:
            self.drafter = NgramTreeDrafter(AcceleratorDrafter(accelerator), min_ngram=None)
        self._costs: dict[tuple[int, int, int, bool], StepCosts] = {}
        self._lengths: dict[tuple[int | None, ...], DraftLength] = {}

    # ---------------------------------------------------------------- generating

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        options: GenerationOptions | None = None,
        *,
        raw: bool = False,
        processors: Sequence[Processor] = (),
        streamer: Any = None,
        **settings: Any,
    ) -> Any:
        """Generate for one prompt or a batch.

        Args:
            prompts: a string, a list of chat messages, token ids, or a list of several of these. Rows
                of a batch may differ in length and in how many drafts they accept.
            options: all settings at once; `settings` override single ones.
            raw: give strings to the model as they are, without the chat template.
            processors: logits processors `(ids [1, length], scores [1, V]) -> scores`.
            streamer: a transformers streamer (`TextStreamer`, ...); one prompt only.
            settings: fields of `GenerationOptions`, e.g. `max_new_tokens=64, temperature=0.7`.

        Returns:
            GenerationResult, or a list of them for a batch.

        Raises:
            MultirateError: an empty prompt, one that is longer than the context, a setting that is
                not allowed.
        """
        options = _options(options, settings)
        single, ids = self._prompts(prompts, raw=raw)
        if streamer is not None and len(ids) != 1:
            raise MultirateError(f"A streamer serves one prompt, got {len(ids)}. Use generate().")
        run = _Run(self, ids, options, processors)
        started = time.perf_counter()
        if streamer is not None:
            streamer.put(torch.tensor(ids))
        for steps in run.steps():
            for step in steps:
                if streamer is not None and step.tokens:
                    for token in step.tokens:
                        streamer.put(torch.tensor([token]))
            run.note_finished(steps, time.perf_counter() - started)
        if streamer is not None:
            streamer.end()
        results = run.results()
        return results[0] if single else results

    def stream(
        self,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        *,
        raw: bool = False,
        processors: Sequence[Processor] = (),
        **settings: Any,
    ) -> Iterator[str | GenerationResult]:
        """Generate for one prompt, piece by piece.

        Yields:
            Text as it becomes certain; the pieces joined are the result's text exactly. The last item
            is the GenerationResult.

        Raises:
            MultirateError: as `generate`.
        """
        options = _options(options, settings)
        _, ids = self._prompts([prompt], raw=raw)
        if self.tokenizer is None:
            raise MultirateError("Streaming text needs a tokenizer, and this model has none.")
        return self._stream(ids, options, processors)

    def _stream(
        self, ids: list[list[int]], options: GenerationOptions, processors: Sequence[Processor]
    ) -> Iterator[str | GenerationResult]:
        run = _Run(self, ids, options, processors)
        started = time.perf_counter()
        for steps in run.steps():
            run.note_finished(steps, time.perf_counter() - started)
            piece = run.checkers[0].stream_text()
            if piece:
                yield piece
        yield run.results()[0]

    # ---------------------------------------------------------------- prompts

    def _prompts(
        self, prompts: Prompt | Sequence[Prompt], *, raw: bool
    ) -> tuple[bool, list[list[int]]]:
        single = _is_one(prompts)
        rows = [prompts] if single else list(cast(Sequence[Prompt], prompts))
        if not rows:
            raise MultirateError("No prompt was given. Pass a string, messages or token ids.")
        return single, [self.encode(cast(Prompt, row), raw=raw) for row in rows]

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """A prompt's token ids.

        Raises:
            MultirateError: an empty prompt, an id outside the vocabulary, or a prompt that leaves no
                room in the context for a single new token.
        """
        if isinstance(prompt, Tensor):
            ids = [int(i) for i in prompt.flatten().tolist()]
        elif isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], Mapping)):
            ids = self._tokenize(cast("str | Sequence[Mapping[str, str]]", prompt), raw=raw)
        else:
            ids = [int(cast(int, i)) for i in prompt]
        if not ids:
            raise MultirateError("The prompt is empty. Give at least one token of text.")
        vocabulary = self.base.config.vocab_size
        outside = next((i for i in ids if not 0 <= i < vocabulary), None)
        if outside is not None:
            raise MultirateError(
                f"Token id {outside} is not in the model's vocabulary of {vocabulary} (0 to "
                f"{vocabulary - 1})."
            )
        if len(ids) >= self.base.context_length:
            raise MultirateError(
                f"The prompt has {len(ids)} tokens, but the model's context holds "
                f"{self.base.context_length}, and at least one must be left for the answer. Shorten "
                f"the prompt."
            )
        return ids

    def _tokenize(self, prompt: str | Sequence[Mapping[str, str]], *, raw: bool) -> list[int]:
        if self.tokenizer is None:
            raise MultirateError(
                "This model has no tokenizer, so prompts must be lists of token ids."
            )
        if isinstance(prompt, str):
            if not prompt.strip():
                raise MultirateError("The prompt is empty. Give at least one word.")
            if raw:
                return list(self.tokenizer(prompt).input_ids)
            prompt = [{"role": "user", "content": prompt}]
        return list(render_chat(self.tokenizer, prompt, add_generation_prompt=True))

    # ---------------------------------------------------------------- model facts

    def stock_model(self) -> PreTrainedModel:
        """The model for transformers' own `generate`: the base's, unless its weights are packed."""
        return self.base.model if self._stock is None else self._stock()

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a text: the generation config's, and the tokenizer's."""
        return end_token_ids(self.base.model.generation_config, self.base.config, self.tokenizer)

    def draft_length(
        self, prompts: Sequence[Sequence[int]], options: GenerationOptions
    ) -> DraftLength:
        """How many tokens to draft for these prompts: a fixed number, or what step costs suggest.

        What greedy decoding learns of its cycles is kept for later calls. What is drawn with a seed may
        depend on neither the clock nor earlier calls.

        Args:
            prompts: of the batch.
            options: how they are decoded.
        """
        assert self.drafter is not None
        max_width = self.drafter.max_width
        width = options.draft_width or (1 if options.num_draft_tokens else None)
        if width is not None:
            width = min(width, max_width)
        fixed = options.num_draft_tokens
        rows, context = len(prompts), max(len(prompt) for prompt in prompts)
        most = max(options.max_draft_tokens, MAX_ENTRIES if max_width > 1 else 0)
        adapts = fixed is None and (options.greedy or options.seed is None)
        key = (*_sizes(rows, context), options.max_draft_tokens, width, options.greedy)
        if adapts and key in self._lengths:
            return self._lengths[key]
        costs = None
        if fixed is None:
            costs = self.step_costs(
                rows=rows, context=context, max_drafts=most, greedy=options.greedy
            )
        length = DraftLength(
            costs,
            max_drafts=fixed or options.max_draft_tokens,
            prior=self.drafter.expected_acceptance,
            fixed=fixed,
            width=width,
            max_width=min(max_width, MAX_WIDTH),
            drawn=not options.greedy,
            clock=time.perf_counter if adapts else None,
        )
        if adapts:
            self._lengths[key] = length
        return length

    def step_costs(
        self, *, rows: int, context: int, max_drafts: int, greedy: bool = True
    ) -> StepCosts:
        """Measured seconds of draft and verify steps on this device; kept for later calls.

        Args:
            rows: batch rows, rounded up to a power of two.
            context: valid slots of each row, rounded up to a power of two of at least 256.
            max_drafts: longest draft that is timed.
            greedy: or sampled, which takes longer.
        """
        assert self.drafter is not None
        key = (*_sizes(rows, context), max_drafts, greedy)
        if key not in self._costs:
            self._costs[key] = self._measure(*key)
        return self._costs[key]

    def _measure(self, rows: int, context: int, max_drafts: int, greedy: bool) -> StepCosts:
        return measure_steps(
            self.base, cast(Drafter, self.drafter), rows, context, max_drafts, greedy
        )


class _Run:
    """One call of the loop: its checkers, counts and outputs."""

    def __init__(
        self,
        engine: Engine,
        prompts: list[list[int]],
        options: GenerationOptions,
        processors: Sequence[Processor],
    ) -> None:
        self.engine, self.prompts, self.options = engine, prompts, options
        self.strategy = _strategy(options, engine)
        self.sampler = Sampler(options, processors=processors, device=engine.base.device)
        eos = engine.eos_token_ids
        self.checkers = [
            StopChecker(
                eos,
                stop=options.stop,
                tokenizer=engine.tokenizer,
                max_new_tokens=options.max_new_tokens,
                context_length=engine.base.context_length,
                prompt_tokens=len(prompt),
                ignore_eos=options.ignore_eos,
            )
            for prompt in prompts
        ]
        self.counts = [SpeculationCounts() for _ in prompts]
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.seconds = [0.0] * len(prompts)
        # The first of its kind compiles and measures step costs, once; that is no part of generating.
        engine.base.warm_up(len(prompts))
        self.draft_length = None
        if self.strategy == "speculative":
            assert engine.drafter is not None
            engine.drafter.warm_up(len(prompts))
            self.draft_length = engine.draft_length(prompts, options)

    def steps(self) -> Iterator[list[RowStep]]:
        engine = self.engine
        speculative = self.strategy == "speculative"
        return decode(
            engine.base,
            self.prompts,
            self.checkers,
            self.sampler,
            drafter=engine.drafter if speculative else None,
            draft_length=self.draft_length,
            counts=self.counts,
        )

    def note_finished(self, steps: list[RowStep], seconds: float) -> None:
        for step in steps:
            self.tokens[step.row].extend(step.tokens)
            self.seconds[step.row] = seconds

    def results(self) -> list[GenerationResult]:
        base = self.engine.base
        return [
            GenerationResult(
                text=checker.text if self.engine.tokenizer is not None else None,
                token_ids=tokens,
                prompt_tokens=len(prompt),
                seconds=seconds,
                strategy=self.strategy,
                dtype=base.dtype_name,
                device=str(base.device),
                finish_reason=str(checker.finish_reason),
                speculation=Speculation.of([counts]) if self.strategy != "plain" else None,
            )
            for checker, tokens, prompt, seconds, counts in zip(
                self.checkers, self.tokens, self.prompts, self.seconds, self.counts, strict=True
            )
        ]


def _options(options: GenerationOptions | None, settings: dict[str, Any]) -> GenerationOptions:
    options = options or GenerationOptions()
    try:
        return replace(options, **settings)
    except TypeError:
        names = sorted(GenerationOptions.__dataclass_fields__)
        unknown = sorted(set(settings) - set(names))
        raise MultirateError(f"Unknown settings {unknown}. Allowed: {', '.join(names)}.") from None


def _strategy(options: GenerationOptions, engine: Engine) -> str:
    if options.strategy == "auto":
        return "speculative" if engine.drafter is not None else "plain"
    if options.strategy == "speculative" and engine.drafter is None:
        raise MultirateError(
            "strategy='speculative' needs an accelerator, and none is loaded. Load one with "
            "multirate.load(model, accelerator=...) or --accelerator, make one with `multirate train`, "
            "or use strategy='plain'."
        )
    return options.strategy


def _is_one(prompts: Any) -> bool:
    """Whether this is a single prompt rather than a list of prompts."""
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, Tensor):
        return prompts.ndim == 1
    return len(prompts) > 0 and isinstance(prompts[0], int | Mapping)


def _sizes(rows: int, context: int) -> tuple[int, int]:
    """Rows and slots for which steps are measured: powers of two."""
    return 1 << (rows - 1).bit_length(), max(256, 1 << (context - 1).bit_length())


def load(
    model: str | Path,
    accelerator: str | Path | None = None,
    *,
    dtype: str | torch.dtype | None = None,
    quantize: str | None = None,
    device: str | None = None,
    compile: str | None = None,
) -> Engine:
    """Load a model, with an accelerator if one is given, ready to generate.

    Args:
        model: a hub id, a local folder, a `.gguf` file, or `smollm2-135m` (the embedded model).
        accelerator: an accelerator folder or hub id; "default" = the one that ships with multirate
            for the embedded model.
        dtype: "float32", "bfloat16", "float16", "auto" (as stored) or "packed": float16 weights packed
            for the CPU, float32 arithmetic (`models.packed`). Default: 4-bit weights where the model
            came as such (`models.quantized`; the same numbers, a quarter of the bytes), else packed
            where that is possible, else bfloat16.
        quantize: "int8" or "int4": weights of so many bits instead of a dtype (`models.quantized`).
        device: "cpu", "cuda", ...; default the GPU if there is one.
        compile: "layers" or "model": run compiled layers (`models.compiled`), which takes some seconds
            the first time on a machine; "auto": "layers" on a CPU that has a C++ compiler.

    Raises:
        MultirateError: anything that is wrong with the names, files or values; the message says what
            to do.
    """
    require_compile_mode(compile)
    form = choose_form(model, dtype=dtype, quantize=quantize, device=device)
    loaded = load_pretrained(form.place, dtype=form.stored, device=device)
    group_queries(loaded.model)
    base, packing = BaseModel(loaded.model), form.packing
    if packing and form.if_exact and not base.is_exact(BITS[packing]):
        packing = PACKED
        loaded.model.half()
    stream = None
    if accelerator is not None:
        stream = Accelerator.from_pretrained(accelerator, base)
    if packing:
        base.require_packable(packing)
        if stream is not None:
            stream.pack(packing)
        if packing in BITS and form.place.converted and base.device.type == "cpu":
            pack_kept(loaded.model, packing, Path(form.place.location))
        base.pack(packing)
    base.compile(compile)

    def stock() -> PreTrainedModel:
        return load_pretrained(model, dtype=None if packing else form.stored, device=device).model

    return Engine(
        base,
        tokenizer=loaded.tokenizer,
        accelerator=stream,
        stock=stock,
    )
