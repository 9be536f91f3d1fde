"""Attention on a CPU: grouped queries read their keys and values where they lie.

For a block of several positions transformers' `sdpa` repeats keys and values for every query head first,
all attended slots, layer by layer. Where three heads share one, that triples what attention reads and
writes. `attention.cpp` has a kernel that reads them once for all heads and positions, in float32 on x86
CPUs with AVX2; it is built on first use. A query's result then depends neither on the queries beside it
nor on slots that it does not see, and slots that none sees cost nothing: a causal block over itself
takes half. Elsewhere torch's own kernel takes grouped queries as they are; it needs at least twice as
long.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from multirate.models import kernels

GROUPED = "sdpa_grouped"
_ALTERING = (
    "position_bias",
    "softcap",
    "s_aux",
)  # they change scores; the kernel knows none of them


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
    altered = any(kwargs.get(name) is not None for name in _ALTERING)
    if attention_mask is None or altered:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    types = (query.dtype, key.dtype, value.dtype, attention_mask.dtype)
    floats = types == (torch.float32, torch.float32, torch.float32, torch.bool)
    # Inference only: the kernel has no backward pass.
    differentiates = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    if (
        getattr(module, "attends_by_kernel", False)
        and floats
        and dropout == 0
        and query.device.type == "cpu"
        and query.shape[-1] == value.shape[-1]
        and attention_mask.shape[1] == 1
        and not differentiates
    ):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out: Tensor = torch.ops.multirate.attend(query, key, value, attention_mask, scale)
        return out, None
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


def group_queries(model: PreTrainedModel, *, kernel: bool = True) -> None:
    """Use it in a model that has `sdpa` attention and is on a CPU; elsewhere there is no such kernel.

    Args:
        model: changed in place; layers that are copied from it later attend as it does.
        kernel: whether to use the kernel of `attention.cpp`, which is built if no earlier run has.
            Without a compiler, or on another CPU than it is for, torch's own is used; where it cannot be
            built a warning says why.
    """
    if model.device.type != "cpu" or model.config._attn_implementation != "sdpa":
        return
    model.set_attn_implementation(GROUPED)
    if kernel and has_kernel():
        for module in model.modules():
            if hasattr(module, "num_key_value_groups"):
                # A plain attribute: compiled layers are told apart by these.
                module.attends_by_kernel = True


def has_kernel() -> bool:
    """Whether `torch.ops.multirate.attend` can be used on this machine; builds and loads it if so."""
    return kernels.has_kernel(load_kernel, "Attention runs through torch's own kernel")


@cache
def load_kernel() -> None:
    """Make `torch.ops.multirate.attend` exist.

    `attend(query, keys, values, mask, scale)` takes `[B, H, n, d]`, twice `[B, KV, M, d]`, and a bool
    mask `[B or 1, 1, n, L]`, L <= M; it returns `[B, n, H, d]`. Query head h reads kv head
    h // (H / KV), and the slots in [0, L) where the mask is True; a query that sees none gives zeros.
    All is float32 but for the mask.

    Raises:
        MultirateError: no compiler, it fails, or the cache cannot be written.
    """
    kernels.load_library(Path(__file__).with_name("attention.cpp"), "the kernel for attention")

    def shape(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
        rows, heads, n, d = query.shape
        return query.new_empty((rows, n, heads, d))

    torch.library.register_fake("multirate::attend", shape)  # for torch.export
