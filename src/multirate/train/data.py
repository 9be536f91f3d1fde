"""Training text: files to token rows, with the answers marked.

Accepted lines: {"messages": [{"role", "content"}, ...]} (through the chat template),
{"prompt", "completion"}, {"text"}; a file that is not JSONL is raw text, one row a paragraph run.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from multirate.config.errors import MultirateError


@dataclass(frozen=True)
class Row:
    """One training text.

    Attributes:
        ids: its tokens.
        answer_start: index of the first token that the model itself wrote; 0 for raw text.
    """

    ids: list[int]
    answer_start: int


def read_rows(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, *, max_length: int = 512
) -> list[Row]:
    """Read and tokenise a text file (.jsonl, .jsonl.gz or plain text).

    Args:
        path: the file.
        tokenizer: the base model's.
        max_length: longer rows are cut (chats) or split (raw text), in tokens.

    Raises:
        MultirateError: no such file, a line that is not one of the accepted shapes (its number is
            named), or a file with no text in it.
    """
    path = Path(path)
    if not path.is_file():
        raise MultirateError(f"No such data file: {path}. Give a .jsonl, .jsonl.gz or text file.")
    opener: Any = gzip.open if path.suffix == ".gz" else open
    name = path.name.removesuffix(".gz")
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            text = file.read()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise MultirateError(f"Cannot read {path} as UTF-8 text: {error}") from None
    if name.endswith((".jsonl", ".json")):
        rows = [
            _json_row(line, number, path, tokenizer)
            for number, line in enumerate(text.splitlines(), 1)
            if line.strip()
        ]
        rows = [Row(row.ids[:max_length], row.answer_start) for row in rows]
    else:
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        rows = [Row(ids[i : i + max_length], 0) for i in range(0, len(ids), max_length)]
    rows = [row for row in rows if len(row.ids) > row.answer_start + 1]
    if not rows:
        raise MultirateError(f"{path} holds no usable text.")
    return rows


def _json_row(line: str, number: int, path: Path, tokenizer: PreTrainedTokenizerBase) -> Row:
    problem = "needs 'messages', 'prompt' and 'completion', or 'text'"
    try:
        data = json.loads(line)
        if "messages" in data:
            return _chat_row(data, tokenizer)
        if "prompt" in data and "completion" in data:
            prompt = tokenizer(data["prompt"]).input_ids
            answer = tokenizer(data["completion"], add_special_tokens=False).input_ids
            return Row(prompt + answer, len(prompt))
        if "text" in data:
            return Row(tokenizer(data["text"]).input_ids, 0)
    except json.JSONDecodeError as error:
        problem = f"is not JSON ({error.msg})"
    except (TypeError, KeyError, ValueError) as error:
        problem = f"cannot be used ({error})"
    raise MultirateError(f"{path}, line {number}: {problem}.")


def _chat_row(data: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Row:
    messages = data["messages"]
    if messages[-1]["role"] != "assistant":
        raise ValueError("the last message is not the assistant's")
    prompt = tokenizer.apply_chat_template(
        messages[:-1], add_generation_prompt=True, return_dict=False
    )
    answer = tokenizer(messages[-1]["content"], add_special_tokens=False).input_ids
    # An answer that was cut off by a token limit must not teach the model to stop there.
    if data.get("complete", True) and tokenizer.eos_token_id is not None:
        answer = [*answer, tokenizer.eos_token_id]
    return Row([*prompt, *answer], len(prompt))


def batches(
    rows: Sequence[Row], *, tokens: int, seed: int | None = None
) -> Iterator[tuple[Tensor, list[int], list[int]]]:
    """Right-padded batches of rows of similar length, at most about `tokens` positions each.

    Args:
        rows: the texts.
        tokens: positions in a batch, padding included.
        seed: shuffles batches and the rows of equal length; None keeps the file's order.

    Yields:
        (ids `[B, n]`, lengths, answer starts).
    """
    order = list(range(len(rows)))
    rng = random.Random(seed)
    if seed is not None:
        rng.shuffle(order)
        # Similar lengths share a batch (less padding), but only within a window, so that batches stay
        # mixed in content and the run can stop at any token count.
        window = 1024
        order = [
            i
            for start in range(0, len(order), window)
            for i in sorted(order[start : start + window], key=lambda i: len(rows[i].ids))
        ]
    groups: list[list[int]] = [[]]
    for i in order:
        width = max([len(rows[j].ids) for j in groups[-1]] + [len(rows[i].ids)])
        if groups[-1] and width * (len(groups[-1]) + 1) > tokens:
            groups.append([])
        groups[-1].append(i)
    if seed is not None:
        rng.shuffle(groups)
    for group in groups:
        lengths = [len(rows[i].ids) for i in group]
        ids = torch.zeros((len(group), max(lengths)), dtype=torch.long)
        for place, i in enumerate(group):
            ids[place, : lengths[place]] = torch.tensor(rows[i].ids)
        yield ids, lengths, [rows[i].answer_start for i in group]
