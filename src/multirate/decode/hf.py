"""The seam to transformers' `generate`: speculative decoding behind its own arguments and result.

    model.generate(**inputs, custom_generate=FOLDER_OR_HUB_ID, trust_remote_code=True)

transformers prepares everything as it does for its own decoding methods (generation config, logits
processors, stopping criteria); here only the loop is another. Prompts come left-padded in a
rectangle and leave in one; in between each row is a prompt of its own length. Arguments that would
be ignored are refused.

Shapes: B rows, P width of the padded prompts, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import LongTensor, Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import (
    LogitsProcessorList,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from multirate.config.errors import MultirateError
from multirate.decode.engine import Engine
from multirate.decode.hf_rows import RowSampler, row_checkers, sampling
from multirate.decode.loop import decode
from multirate.models.base import BaseModel
from multirate.streams.accelerator import Accelerator
from multirate.streams.folder import WEIGHTS_FILE, load_accelerator

# Arguments with which transformers finds a folder on the hub; they come along with the others.
_HUB_ARGUMENTS = ("revision", "token", "cache_dir", "force_download", "local_files_only", "proxies")

# What transformers prepares for every decoding method. The arena replaces the cache.
_MODEL_ARGUMENTS = ("attention_mask", "position_ids", "cache", "use_cache", "logits_to_keep")

_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")

# They keep a state from step to step, which drafts that are rejected would spoil.
_STATEFUL = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)


def generate_from_folder(
    model: PreTrainedModel,
    *,
    accelerator: str | Path | None = None,
    tokenizer: Any = None,
    streamer: Any = None,
    **kwargs: Any,
) -> LongTensor | GenerateDecoderOnlyOutput:
    """What `custom_generate/generate.py` of an accelerator folder runs.

    Args:
        model: the model whose `generate` was called.
        accelerator: folder or hub id; None for the one that `generate` was told to run.
        tokenizer: needed for `stop_strings`.
        streamer: gets the prompt and every new token; one prompt only.
        kwargs: the other arguments of `generate`, and `num_assistant_tokens` for a fixed number of
            drafts instead of the one that the measured step costs suggest.

    Returns:
        What `model.generate` returns without the accelerator.

    Raises:
        MultirateError: the accelerator cannot be loaded or is for another model, or there is an
            argument that speculative decoding has no use for.
    """
    source = accelerator if accelerator is not None else _calling_source()
    hub = {name: kwargs.pop(name) for name in _HUB_ARGUMENTS if name in kwargs}
    if kwargs.get("assistant_model") is not None:
        raise MultirateError("The accelerator is the assistant: leave out assistant_model.")
    _take_stop_strings(kwargs, tokenizer)
    method = partial(_generate, engine=_engine(model, source, **hub), streamer=streamer)
    return GenerationMixin.generate(model, custom_generate=method, streamer=streamer, **kwargs)


def generate_with_accelerator(
    model: PreTrainedModel,
    input_ids: LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    accelerator: Accelerator | str | Path,
    num_assistant_tokens: int | None = None,
    streamer: Any = None,
    **model_kwargs: Any,
) -> LongTensor | GenerateDecoderOnlyOutput:
    """A decoding method for `generate`, which prepares all but the accelerator:

        model.generate(**inputs, custom_generate=generate_with_accelerator, accelerator=accelerator)

    A streamer has to be bound as well (`functools.partial`): `generate` gives functions none.

    Args:
        model: the base model.
        input_ids: `[B, P]`, padded on the left where `attention_mask` is 0.
        logits_processor: as `generate` built it. A processor sees one row, padded as `input_ids`
            is, and must depend on its two arguments only: it is also asked about drafts.
        stopping_criteria: as `generate` built them; asked about each row after every single token.
        generation_config: as `generate` prepared it.
        accelerator: a loaded accelerator of this very model, or a folder or hub id.
        num_assistant_tokens: drafts a step; chosen from measured step costs if not given.
        streamer: as in `generate`, which has given it the prompt already.
        model_kwargs: `attention_mask` and what else `generate` prepares.

    Returns:
        LongTensor `[B, P + longest output]`, shorter rows filled with the pad token; in a
        `GenerateDecoderOnlyOutput` where the config asks for it.

    Raises:
        MultirateError: as `generate_from_folder`.
    """
    return _generate(
        model,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        engine=_engine(model, accelerator),
        num_assistant_tokens=num_assistant_tokens,
        streamer=streamer,
        **model_kwargs,
    )


def _generate(
    model: PreTrainedModel,
    input_ids: LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    engine: Engine,
    num_assistant_tokens: int | None = None,
    streamer: Any = None,
    **model_kwargs: Any,
) -> LongTensor | GenerateDecoderOnlyOutput:
    """Rectangle in, loop, rectangle out.

    `generate` takes every argument named here out of its own, so `attention_mask` must not be one.
    """
    _require_supported(input_ids, logits_processor, generation_config, streamer, model_kwargs)
    base, mask = engine.base, model_kwargs.get("attention_mask")
    padded = input_ids.tolist()
    prompts = padded
    if mask is not None:
        prompts = [ids[seen].tolist() for ids, seen in zip(input_ids, mask != 0, strict=True)]
    prompts = [engine.encode(prompt) for prompt in prompts]  # checks them
    options, processors = sampling(
        logits_processor, generation_config, num_draft_tokens=num_assistant_tokens
    )
    checkers = row_checkers(
        stopping_criteria,
        padded,
        prompts,
        context_length=base.context_length,
        device=input_ids.device,
    )
    sampler = RowSampler(
        options,
        processors,
        padded=padded,
        prompts=prompts,
        checkers=checkers,
        device=base.device,
    )
    length = engine.draft_length(prompts, options)
    outputs: list[list[int]] = [[] for _ in prompts]
    for steps in decode(
        base, prompts, checkers, sampler, drafter=engine.drafter, draft_length=length
    ):
        for step in steps:
            outputs[step.row].extend(step.tokens)
            if streamer is not None:
                for token in step.tokens:
                    streamer.put(torch.tensor([token]))
    if streamer is not None:
        streamer.end()
    sequences = _rectangle(input_ids, outputs, generation_config)
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)
    return sequences


def _calling_source() -> str:
    """The folder or hub id that the running `model.generate(custom_generate=...)` was given.

    `generate` hands its custom function every argument but this one, and runs a copy of
    `generate.py` that lies in a cache by its content and the folder's last name only. So the one
    place that says which folder is meant is the caller's own variable. A path baked into the file
    would break when the folder moves.
    """
    frame = inspect.currentframe()
    while frame is not None:
        in_transformers = frame.f_globals.get("__name__") == GenerationMixin.__module__
        if in_transformers and frame.f_code.co_name == "generate":
            source = frame.f_locals.get("custom_generate")
            if isinstance(source, str):
                return source
        frame = frame.f_back
    raise MultirateError(
        "Could not find out which accelerator folder is meant, because generate.py was not run by "
        "model.generate(custom_generate=...). Pass accelerator=<folder or hub id> too."
    )


class _Engines(dict[Any, tuple[Any, Engine]]):
    """Engines kept on the object they belong to: a global table would keep that alive for ever.

    A copy of the object starts without: an engine reads the weights it was made for.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> _Engines:
        return _Engines()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Engines, ())


def _engine(model: PreTrainedModel, source: Accelerator | str | Path, **hub: Any) -> Engine:
    """An engine of this model and accelerator, made again only when one of them has changed."""
    weight = cast(Tensor, model.get_input_embeddings().weight)
    state: tuple[Any, ...] = (weight.dtype, weight.device)
    owner: Any = model
    if isinstance(source, Accelerator):
        owner = source
        if source.base.model is not model:
            raise MultirateError(
                "The accelerator was loaded for another model object than the one that generates. "
                "Load it with Accelerator.from_pretrained(..., BaseModel(model)), or give its "
                "folder."
            )
    elif (weights := Path(source) / WEIGHTS_FILE).is_file():
        source = str(weights.parent.resolve())
        state += (weights.stat().st_mtime_ns, weights.stat().st_size)
    engines = owner.__dict__.setdefault("_multirate_engines", _Engines())
    key = (source if owner is model else None, hub.get("revision"))
    if key not in engines or engines[key][0] != state:
        accelerator = source
        if not isinstance(accelerator, Accelerator):
            accelerator = load_accelerator(accelerator, BaseModel(model), **hub)
        engines[key] = (state, Engine(accelerator.base, accelerator=accelerator))
    return engines[key][1]


def _take_stop_strings(kwargs: dict[str, Any], tokenizer: Any) -> None:
    """Turn stop strings into a criterion, since `generate` drops the tokenizer that they need."""
    strings, config = kwargs.pop("stop_strings", None), kwargs.get("generation_config")
    if strings is None and config is not None and config.stop_strings is not None:
        kwargs["generation_config"] = config = copy.deepcopy(config)
        strings, config.stop_strings = config.stop_strings, None
    if strings is None:
        return
    if tokenizer is None:
        raise MultirateError(f"stop_strings={strings!r} needs the tokenizer: pass tokenizer= too.")
    criterion = StopStringCriteria(tokenizer, strings)
    given = kwargs.get("stopping_criteria") or []
    kwargs["stopping_criteria"] = StoppingCriteriaList([*given, criterion])


def _require_supported(
    input_ids: Tensor,
    processors: LogitsProcessorList,
    config: GenerationConfig,
    streamer: Any,
    model_kwargs: dict[str, Any],
) -> None:
    """Refuse what would silently be ignored or come out wrong."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise MultirateError(
            f"Generation mode {mode.value} cannot be combined with an accelerator. Use greedy "
            f"decoding or sampling: num_beams=1, and no other kind of assistance."
        )
    wanted = [name for name in _OUTPUTS if config.return_dict_in_generate and getattr(config, name)]
    if wanted:
        raise MultirateError(
            f"Speculative decoding does not keep {', '.join(wanted)}. Leave it out, or generate "
            f"without custom_generate."
        )
    stateful = [type(p).__name__ for p in processors if isinstance(p, _STATEFUL)]
    if stateful:
        raise MultirateError(
            f"{', '.join(stateful)} keeps a state that rejected drafts would spoil. Leave out "
            f"guidance_scale and watermarking_config, or generate without custom_generate."
        )
    if streamer is not None and len(input_ids) != 1:
        raise MultirateError(f"A streamer serves one prompt, but there are {len(input_ids)}.")
    unknown = [k for k, v in model_kwargs.items() if v is not None and k not in _MODEL_ARGUMENTS]
    if unknown or input_ids.shape[1] == 0:
        what = ", ".join(unknown) or "no input_ids"
        raise MultirateError(f"Prompts must be input_ids with an attention_mask; got {what}.")
    if getattr(model_kwargs.get("cache"), "_is_user_defined", False):
        raise MultirateError(
            "An accelerator keeps keys and values in its own arena and cannot continue a cache. "
            "Leave out cache / past_key_values; input_ids must hold the whole prompt."
        )
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if positions is not None:
        seen = torch.ones_like(input_ids) if mask is None else mask
        usual = seen.long().cumsum(-1) - 1
        if bool(((positions != usual) & (seen != 0)).any()):
            raise MultirateError(
                "position_ids must count each row's tokens from 0; leave them out."
            )


def _rectangle(
    input_ids: Tensor, outputs: Sequence[Sequence[int]], config: GenerationConfig
) -> LongTensor:
    """Prompts `[B, P]` and outputs side by side, `[B, P + longest]`."""
    longest = max(len(output) for output in outputs)
    pad = config._pad_token_tensor
    if pad is None and any(len(output) < longest for output in outputs):
        raise MultirateError("The outputs differ in length: pass pad_token_id to fill them up.")
    new = input_ids.new_full((len(outputs), longest), 0 if pad is None else int(pad))
    for row, output in enumerate(outputs):
        new[row, : len(output)] = torch.tensor(output)
    return cast(LongTensor, torch.cat([input_ids, new], dim=1))
