"""The accelerated stream's cost against pruned heads and attended tokens (M2R2, Fig. 12), by formula."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

from multirate.analyze.costs import Cost, lean_layer, slow_layer, tied_layer
from multirate.analyze.stacks import Stack
from multirate.analyze.tasks import Study, span_targets

RANK = 8  # the paper's
CONTEXT = 1024
ATTENDED = (16, 32, 64, 128, 256, 512, 1024)


def stream_costs(study: Study) -> dict[str, Any]:
    """Costs of one token of a k-layer stream, JSON-ready.

    Attended tokens are counted in two ways, since the best-scoring ones must be found first: `scored`
    reads every key and the chosen values (exact, what `LeanLayer` attends to, if a kernel gathered
    the values; it masks them instead and so costs what all tokens cost), `known` reads only the chosen
    keys and values (a lower bound, where the choice is taken over from elsewhere).
    """
    shape, k = study.shape, study.stack_layers
    number = study.base.dtype.itemsize
    context = min(CONTEXT, study.base.context_length)
    targets = span_targets(study.num_layers, 0, k)

    def lean(heads: int, scored: int, summed: int) -> dict[str, float]:
        cost = lean_layer(
            shape, rank=RANK, heads=heads, scored=scored, summed=summed, number_bytes=number
        )
        return _numbers(cost * k)

    every = range(1, shape.num_heads + 1)
    attended = sorted({min(a, context) for a in ATTENDED})
    heads = study.lean_heads
    tied = Stack("tied", 0, targets, study.rank).layers(study.base)
    tied_costs = [
        tied_layer(
            shape, target - 1, context=context, number_bytes=number,
            adapter_weights=sum(p.numel() for p in layer.parameters()),
        )
        for target, layer in zip(targets, tied, strict=True)
    ]  # fmt: skip
    slow = [
        slow_layer(shape, i, context=context, number_bytes=number) for i in range(shape.num_layers)
    ]
    return {
        "layers": k,
        "lean_rank": RANK,
        "tied_rank": study.rank,
        "context": context,
        "number_bytes": number,
        "left_out": "LM head, norms, activations, softmax, rotary embeddings, carry entry",
        "heads": [{"heads": m, **lean(m, context, context)} for m in every],
        "attended_at_heads": heads,
        "attended": [
            {"attended": a, "scored": lean(heads, context, a), "known": lean(heads, a, a)}
            for a in attended
        ],
        "tied": _numbers(reduce(add, tied_costs)),
        "slow_stream": _numbers(reduce(add, slow)),
        "lm_head_flops": 2 * shape.hidden_size * shape.vocab_size,
        "lm_head_bytes": shape.hidden_size * shape.vocab_size * number,
    }


def _numbers(cost: Cost) -> dict[str, float]:
    return {
        "flops": cost.flops,
        "bytes": cost.bytes,
        "weight_bytes": cost.weight_bytes,
        "kv_bytes": cost.kv_bytes,
        "kv_written_bytes": cost.kv_written_bytes,
    }
