"""What streams cost by formula: parameters, FLOPs, and bytes read per decoded token.

A multiplication and an addition count as two FLOPs; norms, activations, softmax and rotary embeddings
are left out, as in `torch.utils.flop_counter`, against which the layers' formulas are tested.

Notation: D hidden size, H query heads, K key-value heads, d head dimension, V vocabulary, L tokens in
the context, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from multirate.models.base import BaseModel

EAGLE3_DRAFT_VOCABULARY = 32_000


@dataclass(frozen=True)
class Cost:
    """Of one decoded token.

    Attributes:
        flops: multiplications and additions.
        weight_bytes: weights read.
        kv_bytes: keys and values read.
        kv_written_bytes: keys and values written.
    """

    flops: float = 0.0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    kv_written_bytes: float = 0.0

    @property
    def bytes(self) -> float:
        """All bytes read."""
        return self.weight_bytes + self.kv_bytes

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.weight_bytes + other.weight_bytes,
            self.kv_bytes + other.kv_bytes,
            self.kv_written_bytes + other.kv_written_bytes,
        )

    def __mul__(self, times: float) -> Cost:
        return Cost(
            self.flops * times,
            self.weight_bytes * times,
            self.kv_bytes * times,
            self.kv_written_bytes * times,
        )


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a base model that costs depend on.

    Attributes:
        num_layers: N.
        hidden_size: D.
        num_heads: H.
        num_kv_heads: K.
        head_dim: d.
        intermediate_size: width of a dense gated MLP.
        vocab_size: V.
        layer_weights: per layer, the matrix entries that one token is multiplied with; of a mixture
            of experts only the chosen ones'.
        parameters: of the whole model.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    layer_weights: tuple[int, ...]
    parameters: int

    @classmethod
    def of(cls, base: BaseModel) -> ModelShape:
        """A loaded model's."""
        config = base.config
        heads = int(config.num_attention_heads)
        chosen = int(getattr(config, "num_experts_per_tok", 0) or 0)
        return cls(
            num_layers=base.num_layers,
            hidden_size=base.hidden_size,
            num_heads=heads,
            num_kv_heads=int(config.num_key_value_heads),
            head_dim=int(getattr(config, "head_dim", None) or base.hidden_size // heads),
            intermediate_size=int(config.intermediate_size),
            vocab_size=base.vocab_size,
            layer_weights=tuple(active_weights(layer, chosen) for layer in base.layers),
            parameters=sum(p.numel() for p in base.model.parameters()),
        )


def active_weights(layer: nn.Module, experts_per_token: int) -> int:
    """Matrix entries of a decoder layer that one token is multiplied with.

    Experts are stored as `[experts, out, in]`; a token meets `experts_per_token` of them.
    """
    total = 0
    for name, parameter in layer.named_parameters():
        if name.endswith("bias"):
            continue
        if parameter.dim() == 3:
            total += experts_per_token * parameter[0].numel()
        elif parameter.dim() == 2:
            total += parameter.numel()
    return total


# ------------------------------------------------------------------------------ one token's cost


def slow_layer(shape: ModelShape, index: int, *, context: int, number_bytes: int) -> Cost:
    """One decoder layer of the base for one token that sees `context` tokens, itself included."""
    return _attending_layer(shape, shape.layer_weights[index], context, number_bytes)


def tied_layer(
    shape: ModelShape, index: int, *, adapter_weights: int, context: int, number_bytes: int
) -> Cost:
    """A `tied` layer, adapters not folded: the base layer and `adapter_weights` more entries."""
    weights = shape.layer_weights[index] + adapter_weights
    return _attending_layer(shape, weights, context, number_bytes)


def _attending_layer(shape: ModelShape, weights: int, context: int, number_bytes: int) -> Cost:
    kv = 2 * shape.num_kv_heads * shape.head_dim * number_bytes
    return Cost(
        flops=2 * weights + 4 * shape.num_heads * shape.head_dim * context,
        weight_bytes=weights * number_bytes,
        kv_bytes=kv * context,
        kv_written_bytes=kv,
    )


def lean_layer(
    shape: ModelShape,
    *,
    rank: int,
    heads: int,
    scored: int,
    summed: int | None = None,
    number_bytes: int,
) -> Cost:
    """A `lean` layer for one token.

    2 (2 r (D + m d) + 3 r D) for the low-rank maps of m heads, 2 m d for each token whose key is
    scored and as much for each whose value is summed. Only key-value heads that some kept query head
    reads count as bytes. Nothing is written: it lives on the slow layer's keys and values.

    Args:
        shape: the base model's.
        rank: r.
        heads: m, query heads that are kept.
        scored: tokens whose keys are read.
        summed: tokens whose values are read; None = as many. Fewer is what a kernel that gathers the
            best-scoring tokens would read; `LeanLayer` masks the others instead.
        number_bytes: of one stored number.
    """
    summed = scored if summed is None else summed
    size, inner = shape.hidden_size, heads * shape.head_dim
    query_rank, mix_rank = min(rank, size, inner), rank
    weights = 2 * query_rank * (size + inner) + 3 * mix_rank * size
    kv_heads = len({head * shape.num_kv_heads // heads for head in range(heads)})
    return Cost(
        flops=2 * weights + 2 * inner * (scored + summed),
        weight_bytes=(weights + size) * number_bytes,
        kv_bytes=kv_heads * shape.head_dim * (scored + summed) * number_bytes,
    )


# ------------------------------------------------------------------------------ trained parameters


def linear_parameters(size: int, inputs: int = 1) -> int:
    """A linear map with bias of `inputs` states onto one."""
    return inputs * size * size + size


def medusa_parameters(shape: ModelShape, heads: int) -> int:
    """Medusa (arXiv 2401.10774) as published: a residual block and a vocabulary head of its own each."""
    size = shape.hidden_size
    return heads * (linear_parameters(size) + size * shape.vocab_size)


def _decoder_layer(shape: ModelShape, attention_inputs: int) -> int:
    """A dense gated decoder layer of the base's shape without its norms."""
    size, d = shape.hidden_size, shape.head_dim
    qkv = attention_inputs * size * d * (shape.num_heads + 2 * shape.num_kv_heads)
    return qkv + shape.num_heads * d * size + 3 * size * shape.intermediate_size


def eagle_parameters(shape: ModelShape) -> int:
    """EAGLE and EAGLE-2 (arXiv 2401.15077, 2406.16858): a map of (embedding, feature), one layer.

    The LM head is the base's. The layer has a norm before its MLP only.
    """
    size = shape.hidden_size
    return linear_parameters(size, inputs=2) + _decoder_layer(shape, 1) + size


def eagle3_parameters(shape: ModelShape, *, head: bool) -> int:
    """EAGLE-3 (arXiv 2503.01840): three layers' features fused, one layer over (embedding, feature).

    Args:
        shape: the base model's.
        head: count its own LM head over at most 32,000 draft tokens.
    """
    size = shape.hidden_size
    total = 3 * size * size + _decoder_layer(shape, 2) + 4 * size
    return total + head * size * min(EAGLE3_DRAFT_VOCABULARY, shape.vocab_size)
