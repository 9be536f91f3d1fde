"""Training text: files and data sets to token rows, with the model's own words marked.

Accepted: {"messages": [{"role", "content"}, ...]} (through the chat template), {"prompt",
"completion"} and {"text"}, in .jsonl, .jsonl.gz, .json or .parquet files; any other file is plain text;
anything that is no file is the name of a data set on the Hugging Face hub, read as a stream. Only int32
token ids are kept of what is read.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from transformers import PreTrainedTokenizerBase

from multirate.config.errors import MultirateError
from multirate.models.loading import render_chat, special_tokens
from multirate.streams.fit import FIRST_POSITION

LossOn = Literal["answers", "all"]
Span = tuple[int, int]

_TEXT_CHUNK = 1 << 16  # characters of raw text that are tokenised at a time
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<config>[^@]+))?(@(?P<split>.+))?")


@dataclass(frozen=True, eq=False)
class Row:
    """One training text.

    Attributes:
        ids: int32 `[n]`, its tokens.
        spans: half-open, increasing ranges of the tokens that are learned: those that the model
            itself wrote (all answers of a chat), or all but the first of raw text.
    """

    ids: np.ndarray
    spans: tuple[Span, ...]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def prompt(self) -> bytes:
        """The tokens before the first span, as bytes: equal for answers to the same prompt."""
        return self.ids[: self.spans[0][0]].tobytes()

    @property
    def learned(self) -> int:
        """Number of tokens in the spans."""
        return sum(stop - start for start, stop in self.spans)


def read_rows(
    source: str | Path,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    max_length: int = 512,
    loss_on: LossOn = "answers",
    max_tokens: int | None = None,
) -> list[Row]:
    """Read and tokenise text.

    Args:
        source: a file (.jsonl, .jsonl.gz, .json, .parquet; any other is plain text), or a data set
            on the hub as `name[:config][@split]`; without a split, `train`.
        tokenizer: the base model's.
        max_length: longer rows are cut (chats) or split (text), in tokens.
        loss_on: `answers` marks what the model wrote, `all` every token.
        max_tokens: stop at about so many tokens; None for all.

    Raises:
        MultirateError: no tokenizer, no such file or data set, a row of no accepted shape (its number
            is named), a package that is missing, or no text at all.
    """
    if loss_on not in get_args(LossOn):
        raise MultirateError(f"loss_on={loss_on!r} is not known. Allowed: answers, all.")
    if max_length < 8:
        raise MultirateError(f"max_length={max_length} must be at least 8.")
    if max_tokens is not None and max_tokens < 1:
        raise MultirateError(f"max_tokens={max_tokens} must be at least 1; leave it out for all.")
    if tokenizer is None:
        raise MultirateError(
            "This model has no tokenizer, so no text can be read for it. Add its tokenizer files "
            "(tokenizer.json, tokenizer_config.json) to the model's folder."
        )
    rows: list[Row] = []
    tokens = 0
    for row in _read(source, tokenizer, max_length):
        if loss_on == "all":
            row = Row(row.ids, ((1, len(row)),))
        if not row.spans or row.spans[-1][1] <= FIRST_POSITION + 1:  # nothing that can be learned
            continue
        rows.append(row)
        tokens += len(row)
        if max_tokens is not None and tokens >= max_tokens:
            break
    if not rows:
        raise MultirateError(
            f"{source} holds no usable text: no answer that begins within {max_length} tokens (the "
            f"longest text; see --max-length), or nothing but texts of a word or two."
        )
    return rows


def digest(rows: Iterable[Row]) -> str:
    """A hash of rows: equal for the same tokens and spans in the same order."""
    sha = hashlib.sha256()
    for row in rows:
        sha.update(row.ids.tobytes())
        sha.update(repr(row.spans).encode())
    return sha.hexdigest()[:16]


# ------------------------------------------------------------------------------------- sources


def _read(source: str | Path, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Iterator[Row]:
    path, name = Path(source), str(source)
    ending = name.lower()
    values: Iterable[tuple[int, Any]]
    if not path.is_file():
        values = enumerate(_hub_values(name), 1)
    elif ending.endswith(".parquet"):
        with _reading(name):
            found = _datasets(name).load_dataset(
                "parquet", data_files=name, split="train", streaming=True
            )
        values = enumerate(found, 1)
    elif ending.removesuffix(".gz").endswith((".jsonl", ".json")):
        values = _json_values(path)
    else:
        yield from _raw_rows(path, tokenizer, max_length)
        return
    for number, value in values:
        ids, spans = _tokenised(value, f"{name}, row {number}", tokenizer)
        if spans is None:  # raw text
            yield from _split(ids, max_length)
        else:
            ids = ids[:max_length]
            cut = tuple((a, min(b, len(ids))) for a, b in spans if a < min(b, len(ids)))
            yield Row(np.array(ids, dtype=np.int32), cut)


def _split(ids: Sequence[int], max_length: int) -> Iterator[Row]:
    for start in range(0, len(ids), max_length):
        part = np.array(ids[start : start + max_length], dtype=np.int32)
        yield Row(part, ((1, len(part)),))


def _lines(path: Path) -> Iterator[str]:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig") as file:  # -sig: without a byte order mark
            yield from file
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise MultirateError(f"Cannot read {path} as UTF-8 text: {error}") from None


def _json_values(path: Path) -> Iterator[tuple[int, Any]]:
    """One value a line with the line's number, or the items of one JSON array with theirs."""
    lines = enumerate(_lines(path), 1)
    for number, line in lines:
        try:
            if number == 1 and line.lstrip().startswith("["):
                yield from enumerate(json.loads(line + "".join(rest for _, rest in lines)), 1)
            elif line.strip():
                yield number, json.loads(line)
        except json.JSONDecodeError as error:
            raise MultirateError(f"{path}, row {number}: is not JSON ({error.msg}).") from None


def _raw_rows(path: Path, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Iterator[Row]:
    pending: list[int] = []
    text = ""

    def tokens() -> list[int]:
        return _ids(text, tokenizer)

    for line in _lines(path):
        text += line
        if len(text) >= _TEXT_CHUNK:
            pending, text = pending + tokens(), ""
            whole = len(pending) // max_length * max_length
            yield from _split(pending[:whole], max_length)
            pending = pending[whole:]
    yield from _split(pending + tokens(), max_length)


def _datasets(wanted: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise MultirateError(
            f"Reading {wanted} needs the package `datasets`: pip install 'multirate[data]'. Files "
            f"named .jsonl, .jsonl.gz, .json or .txt are read without it."
        ) from None
    return datasets


class _reading:
    """Turns whatever `datasets` raises into a MultirateError; it raises errors of many kinds."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, MultirateError):
            raise MultirateError(
                f"Cannot read the data set {self.name}: {error}. Check its name, configuration and "
                f"split (name[:config][@split]) and the connection, or give a file."
            ) from error


def _hub_values(name: str) -> Iterator[Any]:
    match = _HUB_NAME.fullmatch(name)
    looks_like_file = name.endswith((".jsonl", ".gz", ".json", ".txt", ".parquet", ".md"))
    if match is None or looks_like_file or name.startswith((".", "/", "~")):
        raise MultirateError(
            f"No such data file: {name}. Give a .jsonl, .jsonl.gz, .json, .parquet or text file, or a "
            f"data set on the hub as name[:config][@split]."
        )
    datasets = _datasets(f"the data set {name}")
    with _reading(name):
        yield from datasets.load_dataset(
            match["name"], match["config"], split=match["split"] or "train", streaming=True
        )


# ---------------------------------------------------------------------------------------- rows


def _tokenised(
    data: Any, place: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[Span] | None]:
    """Tokens and spans of one row; spans None for raw text."""
    try:
        if "messages" in data:
            if not tokenizer.chat_template:
                raise ValueError(
                    "this model has no chat template; give 'prompt' and 'completion', or 'text'"
                )
            return _chat(data["messages"], tokenizer, complete=data.get("complete", True))
        if "prompt" in data and "completion" in data:
            prompt = _ids(data["prompt"], tokenizer, add_special_tokens=True)
            answer = _ids(data["completion"], tokenizer)
            return prompt + answer, [(len(prompt), len(prompt) + len(answer))]
        if "text" in data:
            return _ids(data["text"], tokenizer, add_special_tokens=True), None
    except (TypeError, KeyError, ValueError, AttributeError, IndexError) as error:
        raise MultirateError(f"{place}: cannot be used ({error}).") from None
    raise MultirateError(f"{place}: needs 'messages', 'prompt' and 'completion', or 'text'.")


def _ids(
    text: str, tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool = False
) -> list[int]:
    if not isinstance(text, str):  # a tokenizer takes a list for many texts
        raise ValueError(f"a text is {type(text).__name__}, not a string")
    text.encode()  # half a surrogate pair is an error that says so
    return list(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).input_ids)


def _chat(
    messages: Sequence[dict[str, str]], tokenizer: PreTrainedTokenizerBase, *, complete: bool
) -> tuple[list[int], list[Span]]:
    """A chat as the model sees it while it writes each answer: prompt, answer, prompt, answer, ...

    Every answer is tokenised by itself, since that is how it comes into being, and ends with the token
    that ends a turn in the template. An answer that was cut off (`complete` false, the last one) does
    not: it must not teach the model to stop there.
    """

    def rendered(count: int, *, prompt: bool) -> str:
        return str(
            render_chat(tokenizer, messages[:count], add_generation_prompt=prompt, tokenize=False)
        )

    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers or answers[-1] != len(messages) - 1:
        raise ValueError("the last message is not the assistant's")
    ids: list[int] = []
    spans: list[Span] = []
    so_far = ""
    for i in answers:
        prompt, content = rendered(i, prompt=True), messages[i]["content"]
        if not prompt.startswith(so_far):
            # The template rewrites earlier turns (it drops their reasoning, say), so they are not
            # what the model saw when it wrote them: only what follows is learned.
            ids, spans, so_far = [], [], ""
        ids += _ids(prompt[len(so_far) :], tokenizer)
        end = _end_of_turn(rendered(i + 1, prompt=False), prompt + content, tokenizer)
        answer = _ids(content, tokenizer)
        if complete or i != answers[-1]:
            answer += _ids(end, tokenizer)
        spans.append((len(ids), len(ids) + len(answer)))
        ids += answer
        so_far = prompt + content + end
    return ids, spans


def _end_of_turn(rendered: str, prompt_and_answer: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The special token that the template puts after an answer, as text."""
    if rendered.startswith(prompt_and_answer):
        rest = rendered[len(prompt_and_answer) :].lstrip()
        special = [token for token in special_tokens(tokenizer) if rest.startswith(token)]
        if special:
            return max(special, key=len)
    return str(tokenizer.eos_token or "")
