"""Load a frozen causal language model and its tokenizer from wherever they are.

A model is named by a Hugging Face hub id, a local folder, a `.gguf` file, or `smollm2-135m` (the
embedded model). Whatever is wrong with the name, the files or the arguments is a `MultirateError`
that says what to do. Loading never runs code that comes with a model.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from jinja2 import TemplateError
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import resolve_revision

from multirate.config.errors import MultirateError
from multirate.models import hf
from multirate.models.architectures import ARCHITECTURES, SUPPORTED_MODEL_TYPES
from multirate.models.embedded import EMBEDDED_NAME, embedded_gguf
from multirate.models.gguf import convert_gguf
from multirate.models.packed import PACKED, can_pack
from multirate.models.quantized import QUANTIZATIONS

SUPPORTED = f"Supported model types: {', '.join(SUPPORTED_MODEL_TYPES)}."

ACCEPTED = (
    "a Hugging Face hub id (owner/name), a local folder with config.json, a .gguf file, or "
    f"{EMBEDDED_NAME} (the embedded model)"
)

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}

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


@dataclass(frozen=True)
class _Place:
    """Where a named model is: in a folder, or without one on the hub."""

    source: str
    folder: Path | None = None
    revision: str | None = None

    @property
    def location(self) -> str:
        """What transformers is asked for."""
        return str(self.folder or self.source)

    @property
    def hub_revision(self) -> str:
        """The commit to read from the hub; folders have none."""
        return self.revision if self.revision and self.folder is None else "main"


def load_pretrained(
    model: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    attn_implementation: str | None = None,
) -> LoadedModel:
    """Load a model for inference.

    Args:
        model: hub id, folder, `.gguf` file or `smollm2-135m`. A folder that has one of the other
            forms as its name is reached as `./name`.
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
    torch_dtype = _parse_dtype(dtype)
    torch_device = _parse_device(device)
    place = _locate(model)
    with hf.quiet(progress_bars=place.folder is None):
        config = _read_config(place)
        hf.require_supported(config, source=place.source)
        tokenizer = _read_tokenizer(place)
        network = _read_model(
            place,
            config=config,
            dtype=torch_dtype,
            device=torch_device,
            attn_implementation=attn_implementation,
        )
    return LoadedModel(network, tokenizer, source=place.source, revision=place.revision)


def read_config(model: str | Path) -> PreTrainedConfig:
    """A model's config without its weights; its architecture need not be a supported one.

    Args:
        model: as for `load_pretrained`.

    Raises:
        MultirateError: no such model, or its config cannot be read.
    """
    place = _locate(model)
    with hf.quiet(progress_bars=place.folder is None):
        config = _read_config(place)
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
    place = _locate(model)
    with hf.quiet(progress_bars=place.folder is None):
        return _read_tokenizer(place), place.location


def batch_dtype(device: torch.device | str) -> torch.dtype:
    """The dtype whose matmuls of many rows are fastest: bfloat16 if the device has it, else float32.

    A CPU without bfloat16 instructions (AVX-512 BF16, AMX) emulates it, five times slower than
    float32 here, and no flag that torch shows tells all such CPUs: so it is measured, in 0.1 s.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    if device.type != "cpu":
        return torch.float32
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(256, 512, dtype=dtype)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            x @ x.T
            times.append(time.perf_counter() - start)
        seconds[dtype] = min(times)
    return min(seconds, key=lambda dtype: seconds[dtype])


def from_gguf(model: str | Path) -> bool:
    """Whether a model's name is a GGUF file's, or stands for one."""
    return model == EMBEDDED_NAME or Path(model).suffix == ".gguf"


def decode_dtype(model: str | Path, device: str | None) -> str:
    """What decodes a model fastest here: "packed" on an x86 CPU without experts, else "bfloat16".

    Args:
        model: as for `load_pretrained`.
        device: as for `load_pretrained`.

    Raises:
        MultirateError: no such model or device.
    """
    if not can_pack(_parse_device(device)):
        return "bfloat16"
    kind = ARCHITECTURES.get(read_config(model).model_type)
    return PACKED if kind is not None and not kind.experts else "bfloat16"


def quantized_dtype(
    quantize: str, dtype: str | torch.dtype | None, device: str | None
) -> str | torch.dtype:
    """The dtype to load a model in that is then quantised.

    On a CPU as it is stored, because weights out of a GGUF file are on a grid already; on a GPU
    bfloat16, the type of activations there.

    Args:
        quantize: "int8" or "int4".
        dtype: what else the user asked for.
        device: as for `load_pretrained`.

    Raises:
        MultirateError: an unknown quantisation or device, or both a quantisation and a dtype.
    """
    if quantize not in QUANTIZATIONS:
        raise MultirateError(
            f"Unknown quantisation {quantize!r}. Use one of: {', '.join(QUANTIZATIONS)}."
        )
    if dtype is not None:
        raise MultirateError(
            f"--quantize {quantize} and --dtype {str(dtype).removeprefix('torch.')} both name the "
            f"weights' type. Leave one of them out."
        )
    return "auto" if _parse_device(device).type == "cpu" else torch.bfloat16


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
    place = _locate(model)
    with hf.quiet(progress_bars=place.folder is None):
        try:
            generation = GenerationConfig.from_pretrained(
                place.location, revision=place.hub_revision
            )
        except OSError:  # it has none
            generation = None
        return end_token_ids(generation, _read_config(place), _read_tokenizer(place))


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


def _parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | str:
    if dtype is None:
        return torch.bfloat16
    name = str(dtype).removeprefix("torch.")
    if name != "auto" and name not in DTYPES:
        raise MultirateError(
            f"Unknown dtype {name!r}. Use one of: auto, {', '.join(DTYPES)}; `generate`, `bench` and "
            f"`demo` on a CPU also take {PACKED}. For {' and '.join(QUANTIZATIONS)} use --quantize."
        )
    return DTYPES.get(name, "auto")


def _parse_device(device: str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    available = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        available += [kind.type]
        available += [f"{kind.type}:{i}" for i in range(torch.accelerator.device_count())]
    if device not in available:
        raise MultirateError(
            f"No device {device!r} on this machine. Available: {', '.join(available)}."
        )
    return torch.device(device)


def _locate(model: str | Path) -> _Place:
    """Find out which of the accepted forms a model's name has."""
    source = str(model)
    if model == EMBEDDED_NAME:
        return _converted(source, convert_gguf(embedded_gguf(), name=EMBEDDED_NAME))
    path = Path(os.path.expanduser(source))  # Path.expanduser raises for an unknown ~user
    if path.is_dir() and source.strip():
        if not (path / "config.json").is_file():
            raise MultirateError(_no_config(path))
        return _Place(source, path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise MultirateError(f"{source} is a file, but not a .gguf file. Give {ACCEPTED}.")
        return _converted(source, convert_gguf(path))
    if isinstance(model, Path) or not _may_be_hub_id(source):
        raise MultirateError(f"There is no model at {source!r}. Give {ACCEPTED}.")
    # One commit for config, weights and tokenizer, even if the repository moves on meanwhile.
    return _Place(source, revision=getattr(resolve_revision(source), "resolved", None))


def _converted(source: str, folder: Path) -> _Place:
    return _Place(source, folder, revision=folder.name.rpartition("-")[2])


def _no_config(folder: Path) -> str:
    message = f"The folder {folder} has no config.json, so it is not a model folder."
    gguf = sorted(folder.glob("*.gguf"))
    if gguf:
        return f"{message} Did you mean {gguf[0]}?"
    return f"{message} Give {ACCEPTED}."


def _may_be_hub_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return Path(name).suffix not in {".gguf", ".safetensors", ".json", ".bin"}


def _read_config(place: _Place) -> PreTrainedConfig:
    if place.folder is not None:
        what = f"Could not read {place.folder / 'config.json'}"
        fix = f"Copy or download the model again. {SUPPORTED}"
    else:
        what = f"There is no file or folder {place.source!r}, and the hub did not give that model"
        fix = f"Check the name, the connection and your access rights. Give {ACCEPTED}."
    with hf.reading(what, fix=fix):
        return AutoConfig.from_pretrained(
            place.location, revision=place.hub_revision, trust_remote_code=False
        )


def _read_model(
    place: _Place,
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


def _read_tokenizer(place: _Place) -> PreTrainedTokenizerBase | None:
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
