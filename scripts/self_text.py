"""Let a chat model write its own training text: it invents instructions, then answers them.

Distilling on text that the model itself wrote is what makes a drafter match it, and needs no data of
anyone else. The user turns are sampled from the model after its own chat template's user header (the
Magpie idea, arXiv 2406.08464); each is then answered twice, greedily and by sampling. One JSON object
a line: {"messages": [{"role": "user", ...}, {"role": "assistant", ...}], "greedy", "complete"}.

    python scripts/self_text.py smollm2-135m OUT.jsonl --tokens 600000

It appends to OUT.jsonl and stops when the file holds that many answer tokens, so it can be interrupted
and run again.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from torch import Tensor

from multirate.models.base import BaseModel

MARK = "\u241eturn\u241e"  # stands for the user's words when the template is taken apart


@torch.inference_mode()
def complete(
    base: BaseModel,
    prompts: list[list[int]],
    *,
    max_new: int,
    end: int,
    temperature: Tensor,
    generator: torch.Generator,
    straggler_share: float = 0.25,
) -> list[list[int]]:
    """Complete a batch; rows at temperature 0 are greedy. Stops once few rows are left unfinished."""
    outputs: list[list[int]] = [[] for _ in prompts]
    alive = list(range(len(prompts)))
    lengths = [len(p) for p in prompts]
    width = max(lengths)
    ids = torch.zeros((len(prompts), width), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    arena = base.arena(rows=len(prompts), max_len=width + max_new)
    block = base.block([0] * len(prompts), width)
    h = base.run_layers(base.embed(ids), 0, base.num_layers, block, arena)
    h = h[torch.arange(len(prompts)), torch.tensor(lengths) - 1][:, None]
    for step in range(max_new):
        logits = base.head(h)[:, 0].float()
        greedy = logits.argmax(-1)
        heat = temperature[alive]
        probs = torch.softmax(logits / heat.clamp(min=0.01)[:, None], dim=-1)
        mass = probs.cumsum(-1)
        pick = torch.rand((len(alive), 1), generator=generator) * mass[:, -1:]
        sampled = torch.searchsorted(mass, pick, right=True)[:, 0]
        tokens = torch.where(heat > 0, sampled, greedy).tolist()
        going = []
        for place, (row, token) in enumerate(zip(alive, tokens, strict=True)):
            outputs[row].append(token)
            if token != end:
                going.append(place)
        if len(going) <= straggler_share * len(prompts) or step == max_new - 1:
            break
        if len(going) < 0.8 * len(alive):  # compacting copies the arena: not at every end
            arena.keep(torch.tensor(going))
            alive = [alive[p] for p in going]
            lengths = [lengths[p] for p in going]
            tokens = [tokens[p] for p in going]
        block = base.block(lengths, 1)
        h = base.run_layers(
            base.embed(torch.tensor(tokens)[:, None]), 0, base.num_layers, block, arena
        )
        lengths = [n + 1 for n in lengths]
    return [out[: out.index(end) + 1] if end in out else out for out in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("output", type=Path)
    parser.add_argument("--tokens", type=int, default=600_000)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--max-answer-tokens", type=int, default=192)
    parser.add_argument("--max-prompt-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    from multirate.models.loading import load_pretrained

    loaded = load_pretrained(args.model, dtype="bfloat16")
    base, tokenizer = BaseModel(loaded.model), loaded.tokenizer
    end = tokenizer.eos_token_id
    turn = [{"role": "user", "content": MARK}]
    header = tokenizer.apply_chat_template(turn, tokenize=False).split(MARK)[0]
    header_ids = tokenizer(header, add_special_tokens=False).input_ids

    done, seen = 0, set()
    if args.output.exists():
        for line in args.output.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            seen.add(row["messages"][0]["content"])
            done += len(tokenizer(row["messages"][1]["content"]).input_ids) + 1
    random.seed(args.seed + done)
    generator = torch.Generator().manual_seed(args.seed + done)
    started, first = time.monotonic(), done
    pool: list[str] = []
    with args.output.open("a", encoding="utf-8") as out:
        while done < args.tokens:
            while len(pool) < args.rows // 2:
                hot = torch.full((args.rows,), 0.8)
                prompts = complete(
                    base, [header_ids] * args.rows, max_new=args.max_prompt_tokens, end=end,
                    temperature=hot, generator=generator,
                )  # fmt: skip
                for ids in prompts:
                    text = tokenizer.decode(ids[:-1]).strip()
                    if ids[-1] == end and len(ids) >= 5 and "<|" not in text and text not in seen:
                        seen.add(text)
                        pool.append(text)
            texts, pool = pool[: args.rows // 2], pool[args.rows // 2 :]
            greedy = [True] * len(texts) + [False] * len(texts)
            heat = [0.0 if g else random.choice([0.5, 0.7, 0.9]) for g in greedy]
            texts = texts + texts
            chats = [
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": t}], add_generation_prompt=True, return_dict=False
                )
                for t in texts
            ]
            answers = complete(
                base, chats, max_new=args.max_answer_tokens, end=end,
                temperature=torch.tensor(heat), generator=generator,
            )  # fmt: skip
            for text, answer, is_greedy in zip(texts, answers, greedy, strict=True):
                ended = answer[-1] == end
                content = tokenizer.decode(answer[:-1] if ended else answer)
                messages = [
                    {"role": "user", "content": text},
                    {"role": "assistant", "content": content},
                ]
                row = {"messages": messages, "greedy": is_greedy, "complete": ended}
                out.write(json.dumps(row, ensure_ascii=False) + "\n")
                done += len(answer)
            out.flush()
            rate = (done - first) / (time.monotonic() - started)
            left = (args.tokens - done) / rate
            print(
                f"{done:,} of {args.tokens:,} tokens, {rate:.0f} tok/s, {left / 60:.0f} min left",
                flush=True,
            )


if __name__ == "__main__":
    main()
