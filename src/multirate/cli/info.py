"""`multirate info`: what is installed, and the facts of a model and of an accelerator.

No weights are loaded: a model's facts come from its config, an accelerator's from the header of its
file. Only of what came in a GGUF file a few rows are looked at, to tell whether 4 bits hold them.
"""

from __future__ import annotations

import platform
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from multirate.cli.options import MODEL_HELP, AcceleratorChoice, Json, accelerator_for, write_json
from multirate.config.errors import MultirateError
from multirate.models.embedded import EMBEDDED_NAME, embedded_gguf
from multirate.streams.defaults import shipped_accelerators

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from multirate.models.forms import Form

# Bits of a weight with its share of scales (`models.quantized`); an LM head has at least 8.
_BITS = {"packed": 16.0, "int8": 8.5, "int4": 5.0}
_BUFFERS = ("draft_ids", "scale")  # of the weights file's tensors, those that are not trained


def info(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = None,
    accelerator: AcceleratorChoice = None,
    as_json: Json = False,
) -> None:
    """Show versions and device, and the facts of a model and of an accelerator."""
    sections: dict[str, dict[str, Any]] = {"system": system_facts()}
    if model is None and accelerator is None:
        sections["available"] = available()
    config = None
    if model is not None:
        from multirate.models.forms import choose_form
        from multirate.models.loading import read_config

        form = choose_form(model)
        config = read_config(form.place)
        sections["model"] = model_facts(form)
    chosen = accelerator_for(model or "", accelerator)
    if chosen is not None:
        sections["accelerator"] = accelerator_facts(
            chosen, config, base_parameters=sections.get("model", {}).get("parameters")
        )
    if as_json:
        write_json(sections)
    else:
        _print(Console(highlight=False), sections)


def system_facts() -> dict[str, Any]:
    """Versions, the device that models are loaded to, and threads."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "multirate": version("multirate"),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "device": f"cuda ({torch.cuda.get_device_name()})" if cuda else "cpu",
        "threads": torch.get_num_threads(),
    }


def available() -> dict[str, Any]:
    """What can be used without naming a path: model types, the embedded model, accelerators."""
    from multirate.models.architectures import SUPPORTED_MODEL_TYPES

    try:
        embedded_gguf()
        embedded = "installed"
    except MultirateError as error:
        embedded = str(error)
    return {
        "model_types": list(SUPPORTED_MODEL_TYPES),
        EMBEDDED_NAME: embedded,
        "accelerators": list(shipped_accelerators()),
    }


def model_facts(form: Form) -> dict[str, Any]:
    """Shape and sizes of a model in the form that it is used in unless another is asked for.

    None for what a model of an unsupported type does not tell. `weight_bytes` is what all weights take,
    `step_weight_bytes` what a decoding step reads of them: embeddings that are looked up are none.
    """
    from multirate.models.architectures import ARCHITECTURES
    from multirate.models.loading import config_fingerprint

    config = form.place.config
    supported = config.model_type in ARCHITECTURES
    layers = getattr(config, "num_hidden_layers", None)
    size = getattr(config, "hidden_size", None)
    heads = getattr(config, "num_attention_heads", None)
    facts: dict[str, Any] = {
        "name": config.name_or_path,
        "model_type": config.model_type,
        "supported": supported,
        "num_layers": layers,
        "hidden_size": size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", heads),
        "vocab_size": getattr(config, "vocab_size", None),
        "context_length": getattr(config, "max_position_embeddings", None),
        "parameters": None,
        "weight_bytes": None,
        "step_weight_bytes": None,
        "kv_bytes_per_token": None,
        "dtype": None,
        "fingerprint": None,
    }
    if supported:
        head_size = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        model = _without_storage(config)
        packing = _packing(form, model)
        stored: Any = config.dtype if form.stored == "auto" else form.stored
        item = stored.itemsize
        total, step = _weight_bytes(model, packing, item)
        facts |= {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "weight_bytes": total,
            "step_weight_bytes": step,
            "kv_bytes_per_token": 2
            * config.num_hidden_layers
            * config.num_key_value_heads
            * head_size
            * (4 if packing else item),
            "dtype": packing or str(stored).removeprefix("torch."),
            "fingerprint": config_fingerprint(config),
        }
    return facts


def _without_storage(config: PreTrainedConfig) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM

    from multirate.models import hf

    with hf.quiet(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _packing(form: Form, model: PreTrainedModel) -> str | None:
    """What linear layers are packed as; rows of the converted weights tell whether that is exact."""
    from multirate.models.packed import PACKED
    from multirate.models.quantized import BITS

    if form.packing is None or not form.if_exact:
        return form.packing
    names = [f"{name}.weight" for name in _layers_linears(model)]
    folder = Path(form.place.location)
    return form.packing if _are_exact(folder, names, BITS[form.packing]) else PACKED


def _layers_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Linear layers by name, without the head."""
    from torch import nn

    head = model.get_output_embeddings()
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    return {name: module for name, module in linears.items() if module is not head}


def _are_exact(folder: Path, names: list[str], bits: int) -> bool:
    """Whether matrices of a folder's safetensors are numbers of so many bits, by their first rows."""
    from safetensors import safe_open

    from multirate.models import hf
    from multirate.models.quantized import GROUP, is_exact

    wanted = set(names)
    for file in sorted(folder.glob("*.safetensors")):
        with (
            hf.reading(f"Could not read {file}", fix="Delete the folder: it is made again."),
            safe_open(file, framework="pt") as tensors,
        ):
            for name in wanted & set(tensors.keys()):
                if not is_exact(tensors.get_slice(name)[:GROUP], bits):
                    return False
    return True


def _weight_bytes(model: PreTrainedModel, packing: str | None, item: int) -> tuple[int, int]:
    """Bytes of all weights, and of those that a step reads.

    Args:
        model: without storage.
        packing: of its linear layers; None for none.
        item: bytes of a number that is not packed.
    """
    embeddings = model.get_input_embeddings().weight.numel() * item
    head = model.get_output_embeddings()
    if packing is None:
        total = sum(parameter.numel() for parameter in model.parameters()) * item
        tied = head.weight is model.get_input_embeddings().weight
        return total, total if tied else total - embeddings
    linears = sum(module.weight.numel() for module in _layers_linears(model).values())
    head_numbers = head.weight.numel()
    others = {p for p in model.parameters() if p.dim() == 1}  # norms, biases: float32
    bits = linears * _BITS[packing] + head_numbers * max(_BITS[packing], _BITS["int8"])
    step = int(bits) // 8 + 4 * sum(p.numel() for p in others)
    return embeddings + step, step


def accelerator_facts(
    name: str | Path, config: PreTrainedConfig | None, *, base_parameters: int | None
) -> dict[str, Any]:
    """Shape, size and expected acceptance of an accelerator.

    Args:
        name: folder, hub id or "default".
        config: of the base model, if one was named.
        base_parameters: of the base model, if they are known.

    Raises:
        MultirateError: no such accelerator, or its files are damaged.
    """
    from multirate.models.loading import config_fingerprint
    from multirate.streams.folder import WEIGHTS_FILE, find_folder, read_config
    from multirate.train.acceptance import mean_acceptance_length

    folder = find_folder(name, model=config.name_or_path if config is not None else "")
    accelerator = read_config(folder)
    schedule = accelerator.schedule
    parameters = _count_trained(folder / WEIGHTS_FILE)
    fits = None
    if config is not None and accelerator.base_fingerprint:
        fits = accelerator.base_fingerprint == config_fingerprint(config)
    acceptance = accelerator.expected_acceptance
    return {
        "folder": str(folder),
        "base_model": accelerator.base_model_name_or_path or None,
        "fits_model": fits,
        "preset": accelerator.preset,
        "entry": accelerator.entry,
        "layer_kind": accelerator.layer_kind,
        "num_layers": len(schedule.layers),
        "rank": accelerator.rank,
        "gates": list(accelerator.gates),
        "rates": [schedule.rate(j) for j in range(schedule.num_intervals)],
        "draft_vocab_size": accelerator.draft_vocab_size or accelerator.vocab_size,
        "parameters": parameters,
        "share_of_base": parameters / base_parameters if base_parameters else None,
        "expected_acceptance": list(acceptance),
        "expected_acceptance_length": mean_acceptance_length(acceptance) if acceptance else None,
        "multirate": accelerator.library_version,
    }


def _count_trained(file: Path) -> int:
    """Trained numbers in an accelerator's weights file, from its header."""
    from safetensors import safe_open

    from multirate.models import hf

    with (
        hf.reading(f"Could not read {file}", fix="Copy or download the folder again."),
        safe_open(file, framework="pt") as tensors,
    ):
        return sum(
            prod(tensors.get_slice(name).get_shape())
            for name in tensors.keys()  # noqa: SIM118  # not iterable by itself
            if name.rpartition(".")[2] not in _BUFFERS
        )


def _print(console: Console, sections: dict[str, dict[str, Any]]) -> None:
    for title, facts in sections.items():
        table = Table(title=title, title_justify="left", title_style="bold", show_header=False,
                      box=None, padding=(0, 2, 0, 0))  # fmt: skip
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in facts.items():
            table.add_row(name.removeprefix("num_").replace("_", " "), Text(_shown(name, value)))
        console.print(table)
        console.print()


def _shown(name: str, value: Any) -> str:
    """A fact as a person reads it."""
    if value is None or value == []:
        return "unknown" if value is None else "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_shown(name, item) for item in value)
    if name == "share_of_base":
        return f"{value:.2%}"
    if name.endswith("weight_bytes"):
        return f"{value / 1e6:,.1f} MB"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
