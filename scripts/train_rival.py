"""Train the heads of a rival method, to be measured beside an accelerator: Medusa or DEED.

    python scripts/train_rival.py medusa smollm2-135m --data answers.jsonl --data invented.jsonl \
        --heldout-data heldout.jsonl --output data/rivals/smollm2-135m-medusa

Minutes on one core. An EAGLE-style drafter is made by `multirate train --preset eagle`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import fields

from multirate.models.base import BaseModel
from multirate.models.forms import batch_dtype
from multirate.models.loading import load_pretrained
from multirate.train.batches import split_rows
from multirate.train.data import read_rows
from multirate.train.heads import HeadOptions, train_deed, train_medusa

METHODS = {"medusa": train_medusa, "deed": train_deed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("model")
    parser.add_argument("--data", action="append", required=True, help="text that the model wrote")
    parser.add_argument(
        "--heldout-data", help="greedy answers to judge on; default: some of the data"
    )
    parser.add_argument("--output", required=True, help="folder to save to")
    parser.add_argument("--device", default="cpu")
    for field in fields(HeadOptions):
        name = field.name.replace("_", "-")
        parser.add_argument(f"--{name}", type=type(field.default), default=field.default)
    args = parser.parse_args()

    started = time.monotonic()

    def report(line: str) -> None:
        seconds = int(time.monotonic() - started)
        print(f"[{seconds // 60}:{seconds % 60:02d}] {line}", flush=True)

    loaded = load_pretrained(args.model, dtype=batch_dtype(args.device), device=args.device)
    base = BaseModel(loaded.model)
    base.model.requires_grad_(False)
    rows = [row for path in args.data for row in read_rows(path, loaded.tokenizer)]
    if args.heldout_data:
        heldout = read_rows(args.heldout_data, loaded.tokenizer)
    else:
        heldout, rows = split_rows(rows, heldout=48, seed=args.seed)
    options = HeadOptions(
        **{field.name: getattr(args, field.name) for field in fields(HeadOptions)}
    )
    drafter = METHODS[args.method](base, rows, heldout, options, report)
    report(f"saved {drafter.save(args.output)}")


if __name__ == "__main__":
    main()
