"""What a type of weights costs in quality: perplexity and next tokens against float32.

    python scripts/weight_types.py [--texts 20]

Texts: conversations whose answers the model wrote itself (`data/smollm2-135m-heldout.jsonl.gz`).
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import torch
from torch import Tensor

import multirate
from multirate.decode.engine import Engine
from multirate.models.loading import render_chat

MODEL = "smollm2-135m"
DATA = Path(__file__).parents[1] / "data" / "smollm2-135m-heldout.jsonl.gz"
TYPES = ("float32", "packed", "bfloat16")


@torch.inference_mode()
def log_probabilities(engine: Engine, ids: Tensor) -> Tensor:
    """`[n, V]` float32 for token ids `[1, n]`."""
    base, n = engine.base, ids.shape[1]
    block, arena = base.block([0], n), base.arena(rows=1, max_len=n)
    h = base.run_layers(base.embed(ids), 0, base.num_layers, block, arena)
    return base.head(h)[0].float().log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=20)
    args = parser.parse_args()
    with gzip.open(DATA, "rt", encoding="utf-8") as file:
        rows = [json.loads(line)["messages"] for line in file][: args.texts]
    texts: list[Tensor] = []
    reference: list[Tensor] = []
    print("weights    perplexity  same next token  KL to float32")
    for name in TYPES:
        engine = multirate.load(MODEL, dtype=name, device="cpu")
        if not texts:
            texts = [torch.tensor([list(render_chat(engine.tokenizer, row))]) for row in rows]
        found = [log_probabilities(engine, ids) for ids in texts]
        reference = reference or found
        loss = [-p[:-1].gather(1, ids[0, 1:, None]) for p, ids in zip(found, texts, strict=True)]
        same, distance = [], []
        for p, r in zip(found, reference, strict=True):
            same.append((p.argmax(-1) == r.argmax(-1)).float())
            distance.append((r.exp() * (r - p)).sum(-1))
        print(
            f"{name:10} {torch.cat(loss).mean().exp():10.4f}  {torch.cat(same).mean():15.4f}  "
            f"{torch.cat(distance).mean():13.1e}",
            flush=True,
        )
    print(f"{len(texts)} texts, {sum(ids.shape[1] for ids in texts)} tokens")


if __name__ == "__main__":
    main()
