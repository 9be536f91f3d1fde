"""Load a frozen causal language model and its tokenizer from wherever they are.

A model is named by a Hugging Face hub id, a local folder, a `.gguf` file, or `smollm2-135m` (the
embedded model). Whatever is wrong with the name, the files or the arguments is a `MultirateError`
that says what to do. Loading never runs code that comes with a model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from multirate.config.errors import MultirateError
from multirate.models import hf
from multirate.models.forms import parse_device, parse_dtype
from multirate.models.places import Place, locate

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
)

# What makes a base model the function that an accelerator was trained for. Token ids, dtype, paths,
# versions, quantisation and the attention implementation are left out on purpose.
_FUNCTION_FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "hidden_act",
    "hidden_activation",
    "attention_bias",
    "mlp_bias",
    "rms_norm_eps",
    "rope_parameters",
    "original_max_position_embeddings",
    "layer_types",
    "sliding_window",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "clip_qkv",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
    "swiglu_alpha",
    "swiglu_limit",
)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for inference.

    Attributes:
        model: in eval mode, no parameter requires a gradient.
        tokenizer: None where the model's folder has none.
        source: the model as it was named.
        revision: hub commit, or content key of a GGUF file; None for a plain folder.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    source: str
    revision: str | None


def load_pretrained(
    model: str | Path | Place,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    attn_implementation: str | None = None,
) -> LoadedModel:
    """Load a model for inference.

    Args:
        model: hub id, folder, `.gguf` file or `smollm2-135m`, or what `locate` found. A folder that has
            one of the other forms as its name is reached as `./name`.
        dtype: of the weights: float32, bfloat16, float16 (or fp32, bf16, fp16), a `torch.dtype`, or
            "auto" for the type the weights are stored in. Default: bfloat16.
        device: such as "cpu" or "cuda:1". Default: CUDA when there is some, else the CPU.
        attn_implementation: transformers' name of an attention; None for its default.

    Returns:
        LoadedModel: the model, its tokenizer and where they came from.

    Raises:
        MultirateError: no such model, unreadable or incomplete files, not a causal language model,
            an unsupported architecture, or an unknown dtype, device or attention.
    """
    torch_dtype = parse_dtype(dtype)
    torch_device = parse_device(device)
    place = locate(model)
    config = place.config
    hf.require_supported(config, source=place.source)
    with hf.quiet(progress_bars=place.folder is None):
        tokenizer = _read_tokenizer(place)
        network = _read_model(
            place,
            config=config,
            dtype=torch_dtype,
            device=torch_device,
            attn_implementation=attn_implementation,
        )
    return LoadedModel(network, tokenizer, source=place.source, revision=place.revision)


def read_config(model: str | Path | Place) -> PreTrainedConfig:
    """A model's config without its weights; its architecture need not be a supported one.

    Args:
        model: as for `load_pretrained`.

    Raises:
        MultirateError: no such model, or its config cannot be read.
    """
    place = locate(model)
    config = place.config
    config.name_or_path = place.source
    return config


def load_tokenizer(model: str | Path) -> tuple[PreTrainedTokenizerBase | None, str]:
    """A model's tokenizer without its weights, and where other libraries find the model.

    Args:
        model: as for `load_pretrained`.

    Returns:
        The tokenizer, None where the model has none; and a hub id or a folder in transformers' format.

    Raises:
        MultirateError: no such model, or its tokenizer cannot be read.
    """
    place = locate(model)
    with hf.quiet(progress_bars=place.folder is None):
        return _read_tokenizer(place), place.location


def require_chat_template(tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Check that messages can be turned into a prompt.

    Raises:
        MultirateError: there is no tokenizer, or it has no chat template.
    """
    if tokenizer is None or not tokenizer.chat_template:
        missing = "tokenizer" if tokenizer is None else "chat template"
        raise MultirateError(
            f"This model has no {missing}, so a conversation cannot be turned into a prompt. "
            "Give the prompt as plain text (--raw), or use a chat model."
        )


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], **options: Any
) -> Any:
    """Messages through the model's chat template, as transformers' `apply_chat_template` gives them.

    Raises:
        MultirateError: no chat template, or one that refuses these messages (a system turn, say).
    """
    require_chat_template(tokenizer)
    try:
        return tokenizer.apply_chat_template(
            [dict(message) for message in messages], return_dict=False, **options
        )
    except TemplateError as error:
        raise MultirateError(
            f"The model's chat template refuses the messages: {error}. Change their roles or order."
        ) from None


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """All special tokens: those with a role, and added ones such as a chat's end of turn."""
    added = (t.content for t in tokenizer.added_tokens_decoder.values() if t.special)
    return {token for token in (*tokenizer.all_special_tokens, *added) if token}


def end_token_ids(*sources: Any) -> frozenset[int]:
    """Ids that end a text, of configs and tokenizers; a source may be None or name none.

    A model may have several: that of documents, which its tokenizer names, and that of a chat's turn,
    which only its generation config does (Gemma, Phi-3).
    """
    found: set[int] = set()
    for source in sources:
        eos = getattr(source, "eos_token_id", None)
        if eos is not None:
            found.update(eos if isinstance(eos, list | tuple) else [eos])
    return frozenset(found)


def read_end_token_ids(model: str | Path) -> frozenset[int]:
    """Ids that end a model's text, without its weights.

    Args:
        model: as for `load_pretrained`.

    Raises:
        MultirateError: no such model, or its config or tokenizer cannot be read.
    """
    place = locate(model)
    with hf.quiet(progress_bars=place.folder is None):
        try:
            generation = GenerationConfig.from_pretrained(
                place.location, revision=place.hub_revision
            )
        except OSError:  # it has none
            generation = None
        return end_token_ids(generation, place.config, _read_tokenizer(place))


def config_fingerprint(config: PreTrainedConfig) -> str:
    """16 hex digits for a base model's shape and function, the same wherever it was loaded from.

    Equal for the same architecture and hyper-parameters, whatever its dtype, path, library version,
    quantisation or attention implementation; numbers count to six digits, since file formats round.
    It says nothing about the weights' values.
    """
    fields = {name: getattr(config, name, None) for name in _FUNCTION_FIELDS}
    if fields["head_dim"] is None:
        fields["head_dim"] = config.hidden_size // config.num_attention_heads
    text = json.dumps(_canonical(fields), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _canonical(value: Any) -> Any:
    """JSON-ready and rounded; entries that are None count as absent."""
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    if isinstance(value, float):
        rounded = float(f"{value:.6g}")
        return int(rounded) if rounded.is_integer() else rounded
    return value


def _read_model(
    place: Place,
    *,
    config: PreTrainedConfig,
    dtype: torch.dtype | str,
    device: torch.device,
    attn_implementation: str | None,
) -> PreTrainedModel:
    with hf.reading(
        f"Could not load {place.source}",
        fix="Check its files, the options given and the free memory.",
    ):
        try:
            model, loading_info = AutoModelForCausalLM.from_pretrained(
                place.location,
                config=config,
                revision=place.hub_revision,
                dtype=dtype,
                attn_implementation=attn_implementation,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # listed by require_complete, by name
            )
        except SafetensorError as error:
            file = _broken_safetensors(place.folder) if place.folder else None
            raise MultirateError(
                f"The weights in {file or place.source} are truncated or corrupt ({error}). "
                "Copy or download the file again."
            ) from error
        hf.require_complete(loading_info, source=place.source)
        model = model.to(device)
    model.name_or_path = model.config.name_or_path = place.source
    return model.eval().requires_grad_(False)


def _broken_safetensors(folder: Path) -> Path | None:
    """The first weights file of a folder that is unreadable or shorter than its header says."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError:
            return file
    return None


def _read_tokenizer(place: Place) -> PreTrainedTokenizerBase | None:
    folder = place.folder
    if folder is not None and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    with hf.reading(
        f"Could not read the tokenizer of {place.source}",
        fix="Copy or download its tokenizer files again.",
    ):
        tokenizer = AutoTokenizer.from_pretrained(
            place.location, revision=place.hub_revision, trust_remote_code=False
        )
    tokenizer.name_or_path = place.source
    return tokenizer
