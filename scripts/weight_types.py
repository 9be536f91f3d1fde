"""What a type of weights costs in quality: perplexity and next tokens against float32 and bfloat16.

    python scripts/weight_types.py [--texts 20] [--model MODEL]

Texts: conversations whose answers the embedded model wrote itself (data/smollm2-135m-heldout.jsonl.gz).
"int4, 8-bit inputs" stands for llama.cpp on a Q4_1 file: it multiplies the same weights with inputs that
it rounds to 8 bits, with one scale for 32 of them (Q8_1).
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import multirate
from multirate.decode.engine import Engine
from multirate.models.loading import render_chat
from multirate.models.quantized import GROUP, QUANTIZATIONS, QuantizedLinear

DATA = Path(__file__).parents[1] / "data" / "smollm2-135m-heldout.jsonl.gz"
REFERENCES = ("float32", "bfloat16")
TYPES: dict[str, dict[str, Any]] = {
    **{name: {"dtype": name} for name in (*REFERENCES, "packed")},
    **{name: {"quantize": name} for name in QUANTIZATIONS},
    "int4, 8-bit inputs": {"quantize": "int4"},
}


def round_inputs(model: nn.Module) -> None:
    """Round the inputs of all quantised layers to 8 bits, one scale for 32 of them."""

    def rounded(module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        groups = inputs[0].unflatten(-1, (-1, GROUP))
        scale = groups.abs().amax(-1, keepdim=True) / 127
        return ((groups / scale.clamp_min(1e-30)).round() * scale).flatten(-2)

    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.register_forward_pre_hook(rounded)


def encode(engine: Engine, messages: list[dict[str, str]]) -> Tensor:
    """A conversation's token ids `[1, n]`; as plain text for a model without a chat template."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    if tokenizer.chat_template:
        return torch.tensor([list(render_chat(tokenizer, messages))])
    text = "\n\n".join(message["content"] for message in messages)
    return torch.tensor([tokenizer(text).input_ids])


@torch.inference_mode()
def log_probabilities(engine: Engine, ids: Tensor) -> Tensor:
    """`[n, V]` float32 for token ids `[1, n]`."""
    base, n = engine.base, ids.shape[1]
    block, arena = base.block([0], n), base.arena(rows=1, max_len=n)
    h = base.run_layers(base.embed(ids), 0, base.num_layers, block, arena)
    return base.head(h)[0].float().log_softmax(-1)


def agreement(found: list[Tensor], reference: list[Tensor]) -> tuple[float, float]:
    """Share of positions with the same likeliest next token, and mean KL to the reference."""
    pairs = list(zip(found, reference, strict=True))
    same = torch.cat([(p.argmax(-1) == r.argmax(-1)).float() for p, r in pairs])
    distance = torch.cat([(r.exp() * (r - p)).sum(-1) for p, r in pairs])
    return same.mean().item(), distance.mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    with gzip.open(DATA, "rt", encoding="utf-8") as file:
        rows = [json.loads(line)["messages"] for line in file][: args.texts]
    texts: list[Tensor] = []
    references: dict[str, list[Tensor]] = {}
    columns = "".join(f"  {f'same as {name}':>16}  {'KL':>8}" for name in REFERENCES)
    print(f"{'weights':18}  perplexity{columns}")
    for name, settings in TYPES.items():
        engine = multirate.load(args.model, device="cpu", **settings)
        if name.endswith("inputs"):
            round_inputs(engine.base.model)
        if not texts:
            texts = [encode(engine, row) for row in rows]
        found = [log_probabilities(engine, ids) for ids in texts]
        if name in REFERENCES:
            references[name] = found
        loss = [-p[:-1].gather(1, ids[0, 1:, None]) for p, ids in zip(found, texts, strict=True)]
        line = f"{name:18}  {torch.cat(loss).mean().exp():10.4f}"
        for reference in references.values():
            same, distance = agreement(found, reference)
            line += f"  {same:16.4f}  {max(distance, 0):8.1e}"
        print(line, flush=True)
    print(f"{len(texts)} texts, {sum(ids.shape[1] for ids in texts)} tokens")


if __name__ == "__main__":
    main()
