"""Attention for decoding on a CPU: grouped queries read their keys and values where they lie.

For a block of several positions transformers' `sdpa` repeats keys and values for every query head first,
all attended slots, layer by layer. Where three heads share one, that triples what attention reads and
writes, and at 2,000 tokens a verify pass spends more time on copies than on matrices. torch's CPU kernel
takes grouped queries as they are, and computes the same numbers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "sdpa_grouped"


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention in transformers' form: query `[B, m, n, d]`, key and value `[B, kv_heads, L, d]`.

    Returns:
        `[B, n, m, d]`, and no attention weights.
    """
    if attention_mask is None or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    grouped = getattr(module, "num_key_value_groups", 1) > 1  # a size is no bool when compiled
    seen = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=grouped,
    )
    return seen.transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


def group_queries(model: PreTrainedModel) -> None:
    """Use it in a model that has `sdpa` attention and is on a CPU; elsewhere there is no such kernel."""
    if model.device.type == "cpu" and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(GROUPED)
