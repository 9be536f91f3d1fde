"""Tiny random float32 models, one or more for every supported architecture.

They are made so that a mistake shows: weights large enough that attention is far from uniform, no
bias, norm or sink at its neutral start, grouped heads, whose size is not D / heads where a config
allows that, and windows of `WINDOW` tokens, which a short prompt already overruns.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCABULARY = 97
NUM_LAYERS = 4
WINDOW = 6
MAX_POSITIONS = 64
GAIN = 0.7  # logits then spread by about 0.7, which leaves float32 rounding room below 1e-5

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_WINDOWED = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}
_GEMMA |= {"tie_word_embeddings": True, "final_logit_softcapping": 3.0}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0}
_YARN |= {"original_max_position_embeddings": MAX_POSITIONS // 4}
_ALTERNATING = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)

# name -> config class and what differs from the common shape. A name starts with its model_type.
TINY_MODELS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama-tied-head": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama-eager": (LlamaConfig, {"attn_implementation": "eager"}),
    "mistral": (MistralConfig, {"sliding_window": WINDOW, "head_dim": 16}),
    "mistral-eager": (MistralConfig, {"sliding_window": WINDOW, "attn_implementation": "eager"}),
    "mistral-no-window": (MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2Config, {}),
    "qwen2-windowed": (Qwen2Config, _WINDOWED),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen3-windowed": (Qwen3Config, {"head_dim": 16, **_WINDOWED}),
    "phi3": (Phi3Config, {"sliding_window": WINDOW}),
    "phi3-partial-rotary": (Phi3Config, {"partial_rotary_factor": 0.5}),
    "gemma2": (Gemma2Config, {**_GEMMA, "attn_logit_softcapping": 2.0}),
    "gemma3_text": (Gemma3TextConfig, {**_GEMMA, "layer_types": _ALTERNATING}),
    "olmo2": (Olmo2Config, {}),
    "olmoe": (OlmoeConfig, _EXPERTS),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "sliding_window": WINDOW}),
    "mixtral-no-window": (MixtralConfig, {"num_local_experts": 4}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {**_EXPERTS, "moe_intermediate_size": 24, "head_dim": 16, "mlp_only_layers": [1]},
    ),
    "qwen3_moe-windowed": (
        Qwen3MoeConfig,
        {**_EXPERTS, "moe_intermediate_size": 24, "head_dim": 16, **_WINDOWED},
    ),
    "gpt_oss": (
        GptOssConfig,
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "intermediate_size": 32,
            "rope_parameters": _YARN,
        },
    ),
}


def tiny_model(name: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A new model of `TINY_MODELS`, in eval mode.

    Args:
        name: a key of `TINY_MODELS`.
        seed: of the weights.
        changes: config fields that replace the model's; `attn_implementation` is one of them.
    """
    config_class, own = TINY_MODELS[name]
    fields = {**_SHAPE, **own, **changes}
    attention = fields.pop("attn_implementation", None)
    config = config_class(**fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:  # norms, biases, sinks: around what they start as
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(GAIN * parameter.shape[-1] ** -0.5 * noise)
    return model.eval()
