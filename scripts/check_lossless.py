"""Speculative against plain decoding, greedy, over a whole prompt set in batches.

    python scripts/check_lossless.py [--model smollm2-135m] [--dtype float32] [--prompts mt_bench]
    python scripts/check_lossless.py --quantize int4 --compile layers --draft-width 3

Prints how many prompts give the same token ids, and the mean acceptance length at a fixed number of
drafts. Batches make it several times faster than `multirate bench`, which times one prompt at a time;
rows of a batch differ in length and in how many drafts they accept.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import multirate
from multirate.bench.prompts import read_prompts
from multirate.decode.compare import compare_outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--accelerator", default="default", help="folder; default: what ships")
    parser.add_argument("--dtype", help="default: float32")
    parser.add_argument("--quantize", help="int8 or int4, in place of a dtype")
    parser.add_argument("--compile", help="layers or model; default: none")
    parser.add_argument("--prompts", default="mt_bench")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument(
        "--draft-width", type=int, default=1, help="candidates a position; 1: chains"
    )
    parser.add_argument("--limit", type=int, help="only the first so many prompts")
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    dtype = args.dtype or (None if args.quantize else "float32")
    engine = multirate.load(
        args.model,
        args.accelerator,
        dtype=dtype,
        quantize=args.quantize,
        compile=args.compile,
    )
    prompts = [
        engine.encode(row.content, raw=row.raw)
        for row in read_prompts(args.prompts, limit=args.limit).rows
    ]
    # Prompts of similar length share a batch: less padding in its prefill.
    prompts.sort(key=len)
    counts = {"identical": 0, "near-ties": 0, "differences": 0}
    drafts = accepted = 0
    at = [0.0] * args.num_draft_tokens
    for start in range(0, len(prompts), args.batch):
        batch = prompts[start : start + args.batch]
        options = {"max_new_tokens": args.max_new_tokens}
        plain = engine.generate(batch, strategy="plain", **options)
        other = engine.generate(
            batch,
            num_draft_tokens=args.num_draft_tokens,
            draft_width=args.draft_width,
            **options,
        )
        for ids, one, two in zip(batch, plain, other, strict=True):
            result = compare_outputs(engine.base, ids, one.token_ids, two.token_ids)
            kind = "near-ties" if result.near_tie else "differences"
            counts["identical" if result.identical else kind] += 1
            if kind == "differences" and not result.identical:
                print(f"difference at token {result.first_difference}, gap {result.gap}")
            spec = two.speculation
            drafts += spec.num_drafts
            accepted += spec.num_accepted_tokens
            for i, rate in enumerate(spec.per_position_acceptance_rate):
                at[i] += rate * spec.num_drafts
        done = start + len(batch)
        print(
            f"{done} of {len(prompts)} prompts: {counts}, length {1 + accepted / drafts:.3f}",
            flush=True,
        )
    rates = ", ".join(f"{a / drafts:.3f}" for a in at)
    print(
        f"{Path(args.model).name}, {engine.base.dtype_name}, greedy, {args.max_new_tokens} new tokens, "
        f"{args.num_draft_tokens} drafts, width {args.draft_width}: "
        f"mean acceptance length {1 + accepted / drafts:.3f}; "
        f"accepted up to position 1, 2, ...: {rates}"
    )


if __name__ == "__main__":
    main()
