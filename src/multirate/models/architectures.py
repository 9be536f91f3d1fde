"""The architecture table: what differs between supported models outside their own layers.

Every supported model keeps its maths in transformers' modelling code; the layer loop only needs to
know which attention window a layer uses, whether rotary embeddings depend on the layer type, and
what happens to the logits after the LM head.  A new architecture is one line here plus a row in the
parity tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedConfig

from multirate.config.errors import MultirateError

FULL = "full_attention"
SLIDING = "sliding_attention"


@dataclass(frozen=True)
class Architecture:
    """What the layer loop has to know about one `model_type`.

    Attributes:
        window: "never" (no sliding window), "always" (every layer, when the config sets a window) or
            "per_layer" (`config.layer_types` says).
        rotary_per_type: the rotary module takes the layer type as a third argument.
        softcap: the LM head's logits are squashed with `config.final_logit_softcapping`.
        experts: the layers hold a mixture of experts.
    """

    window: Literal["never", "always", "per_layer"] = "never"
    rotary_per_type: bool = False
    softcap: bool = False
    experts: bool = False


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(),
    "mistral": Architecture(window="always"),
    "qwen2": Architecture(window="per_layer"),
    "qwen3": Architecture(window="per_layer"),
    "phi3": Architecture(window="always"),
    "gemma2": Architecture(window="per_layer", softcap=True),
    "gemma3_text": Architecture(window="per_layer", rotary_per_type=True, softcap=True),
    "olmo2": Architecture(),
    "olmoe": Architecture(experts=True),
    "mixtral": Architecture(window="always", experts=True),
    "qwen3_moe": Architecture(window="always", experts=True),
    "gpt_oss": Architecture(window="per_layer", experts=True),
}

SUPPORTED_MODEL_TYPES: tuple[str, ...] = tuple(ARCHITECTURES)


def architecture_of(config: PreTrainedConfig) -> Architecture:
    """The table row of a model's config.

    Raises:
        MultirateError: the architecture is not supported; the message lists those that are.
    """
    try:
        return ARCHITECTURES[config.model_type]
    except KeyError:
        raise MultirateError(
            f"Architecture {config.model_type!r} is not supported. Supported model types: "
            f"{', '.join(SUPPORTED_MODEL_TYPES)}."
        ) from None


def layer_types(config: PreTrainedConfig) -> tuple[str, ...]:
    """The attention type of every layer, `FULL` or `SLIDING`, as transformers' own forward uses it."""
    window = architecture_of(config).window
    if window == "per_layer":
        return tuple(config.layer_types)
    sliding = window == "always" and config.sliding_window is not None
    return ((SLIDING if sliding else FULL),) * config.num_hidden_layers
