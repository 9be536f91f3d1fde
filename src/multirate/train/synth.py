"""Training text that the model writes itself.

A drafter is as good as it matches its model, so it learns from the model's own words and needs no data
of anyone else. The user turns are given, or the model invents them: it is given its own chat template
up to the place where a user would speak, and goes on from there (Magpie, arXiv 2406.08464). It then
answers, in some rows greedily and in others by sampling.

The file grows by whole batches and each line is whole, so a run may be killed and started again: it
reads what is there and goes on until the file holds as many answer tokens as were asked for.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from multirate.config.errors import MultirateError
from multirate.models.loading import render_chat, special_tokens
from multirate.train.lock import exclusive
from multirate.train.writers import Request, Writer

Messages = list[dict[str, str]]

_MARK = "\u241eturn\u241e"  # stands for the user's words while the template is taken apart
_SHORTEST_PROMPT = 5  # tokens, the end included; below it an invented turn is a greeting or noise
# Invented batches in a row without one new prompt: this model has no more to say.
_PATIENCE = 5
_LINE_START = '{"messages": ['  # of every line that is written here
_WINDOW = 8  # batches of given prompts that are sorted by length together


@dataclass(frozen=True)
class SynthOptions:
    """How much the model writes, and how.

    Raises:
        MultirateError: a value outside its range.
    """

    tokens: int = field(metadata={"help": "answer tokens that the file shall hold"})
    batch_rows: int = field(default=96, metadata={"help": "texts written side by side"})
    answers: int = field(default=1, metadata={"help": "answers to each prompt"})
    greedy_share: float = field(default=0.5, metadata={"help": "share of answers without sampling"})
    temperature: float = field(default=0.8, metadata={"help": "of sampled answers and prompts"})
    max_prompt_tokens: int = field(default=64, metadata={"help": "longest user turn"})
    max_answer_tokens: int = field(default=192, metadata={"help": "longest answer; cut there"})
    seed: int = field(default=0, metadata={"help": "of all draws"})

    def __post_init__(self) -> None:
        for name in ("tokens", "batch_rows", "answers", "max_answer_tokens"):
            if getattr(self, name) < 1:
                raise MultirateError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.max_prompt_tokens < _SHORTEST_PROMPT:
            raise MultirateError(
                f"max_prompt_tokens={self.max_prompt_tokens} must be at least {_SHORTEST_PROMPT}."
            )
        if not 0 <= self.greedy_share <= 1:
            raise MultirateError(f"greedy_share={self.greedy_share} must be from 0 to 1.")
        if not 0 < self.temperature <= 10:
            raise MultirateError(
                f"temperature={self.temperature} must be above 0 and at most 10. For greedy answers "
                f"only, set the greedy share to 1."
            )
        if self.greedy_share == 1 and self.answers > 1:
            raise MultirateError(
                f"answers={self.answers} with greedy_share=1: greedy answers to one prompt are all the "
                f"same. Ask for one answer, or set the greedy share below 1."
            )
        if not 0 <= self.seed < 2**40:
            raise MultirateError(f"seed={self.seed} must be from 0 to {2**40 - 1}.")


@dataclass(frozen=True)
class SynthProgress:
    """Where a run stands, after each batch.

    Attributes:
        tokens: answer tokens in the file.
        new_tokens: of which this run wrote.
        rows: lines in the file.
        duplicates: answers that this run left out because the file has them.
        too_long: given prompts that this run left out, longer than asked for or than the context.
    """

    tokens: int
    new_tokens: int
    rows: int
    duplicates: int
    too_long: int = 0


def synthesize(
    output: Path,
    writer: Writer,
    tokenizer: PreTrainedTokenizerBase,
    options: SynthOptions,
    *,
    prompts: Sequence[Messages] | None = None,
) -> Iterator[SynthProgress]:
    """Write training text to a JSONL file, or go on with one.

    Each line is `{"messages": [..., {"role": "assistant", ...}], "greedy": bool, "complete": bool,
    "tokens": int}`; an answer that the token limit cut off is not complete.

    Args:
        output: the file; whole lines that are there are kept, and count.
        writer: what completes token rows.
        tokenizer: the model's, with a chat template.
        options: how much and how.
        prompts: conversations that end with a user's turn; None lets the model invent user turns.

    Yields:
        SynthProgress: the first before anything is written, one a batch, and one at an early end: when
            the prompts are used up, or the model invents nothing new, before the file holds
            `options.tokens` answer tokens.

    Raises:
        MultirateError: no chat template, a file that holds something else, one that cannot be written,
            or one that another run is writing.
    """
    require_chat(tokenizer, writer.ends)
    require_output(output)
    with exclusive(output.with_name(f"{output.name}.lock"), output=output):
        yield from _synthesize(output, writer, tokenizer, options, prompts)


def _synthesize(
    output: Path,
    writer: Writer,
    tokenizer: PreTrainedTokenizerBase,
    options: SynthOptions,
    prompts: Sequence[Messages] | None,
) -> Iterator[SynthProgress]:
    memory = _Memory.read(output, tokenizer)
    yield SynthProgress(memory.tokens, 0, memory.rows, 0)
    source, window = iter(prompts or ()), _WINDOW
    if prompts is None:  # invented turns are all short, and waiting for more of them loses more
        source, window = _invent(writer, tokenizer, options, memory), 1
    todo = _batches(
        _requests(source, tokenizer, options, memory, context_length=writer.context_length),
        options,
        window=window,
    )
    new = duplicates = 0
    while memory.tokens < options.tokens:
        batch = next(todo, None)
        if batch is None:
            yield SynthProgress(memory.tokens, new, memory.rows, duplicates, memory.too_long)
            return
        answers = writer.complete([request for _, request in batch])
        lines = []
        for (job, _), ids in zip(batch, answers, strict=True):
            row = _row(job, ids, tokenizer, writer.ends)
            if row is None or memory.add_answer(row):
                duplicates += row is not None
                continue
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
            new += len(ids)
        _append(output, "".join(lines))
        yield SynthProgress(memory.tokens, new, memory.rows, duplicates, memory.too_long)


def require_chat(tokenizer: PreTrainedTokenizerBase | None, ends: Collection[int]) -> None:
    """Check that a model can be asked to answer, and ends its answers.

    Raises:
        MultirateError: it has no tokenizer, no chat template or no end token.
    """
    if tokenizer is None or not tokenizer.chat_template or not ends:
        raise MultirateError(
            "This model has no chat template or no end token, so it cannot be asked to answer. Train "
            "on raw text of its domain instead (`multirate train --data FILE.txt`)."
        )


def require_output(path: Path) -> None:
    """Check that a file can be appended to, before any work is done for it.

    Raises:
        MultirateError: it cannot.
    """
    if path.exists() and not path.is_file():  # a device's content may have no end
        raise MultirateError(
            f"{path} is not a file that text can be appended to. Give another file."
        )
    _append(path, "")


@dataclass(frozen=True)
class _Job:
    """One answer to write."""

    messages: Messages
    greedy: bool
    number: int  # of the answer to this prompt, from 0


class _Memory:
    """What the file holds already: enough to leave out duplicates and to go on."""

    def __init__(self) -> None:
        self.tokens = self.rows = self.too_long = 0
        self.prompts: dict[bytes, int] = {}  # answers of each
        self.answers: set[bytes] = set()

    @classmethod
    def read(cls, path: Path, tokenizer: PreTrainedTokenizerBase) -> _Memory:
        memory = cls()
        try:
            data = path.read_bytes()
            *lines, last = data.decode("utf-8-sig", errors="surrogateescape").split("\n")
            # Not splitlines: JSON strings may hold U+2028 and the like as they are.
            for number, line in enumerate(lines, 1):
                if line.strip():
                    memory._read_line(line, number, path, tokenizer)
            if last.strip():
                memory._read_last(last, len(lines) + 1, path, tokenizer)
        except OSError as error:
            raise MultirateError(f"Cannot go on with {path}: {error}") from None
        return memory

    def _read_last(
        self, line: str, number: int, path: Path, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """A line without its end: cut away if it is one of ours that a kill cut short."""
        try:
            json.loads(line)
        except ValueError:
            if line.startswith(_LINE_START[: len(line)]):
                cut = len(line.encode(errors="surrogateescape"))
                with path.open("r+b") as file:
                    file.truncate(path.stat().st_size - cut)
                return
        self._read_line(line, number, path, tokenizer)
        _append(path, "\n")

    def _read_line(
        self, line: str, number: int, path: Path, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        try:
            row = json.loads(line)
            *before, last = row["messages"]
            if last["role"] != "assistant" or not before:
                raise ValueError
            # Files of other makers do not count their tokens.
            if "tokens" not in row:
                row["tokens"] = len(tokenizer(last["content"], add_special_tokens=False).input_ids)
            self.add_answer(row)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise MultirateError(
                f"{path}, line {number} is not a line of self-written text; synth only goes on with "
                f"its own files. Give another output file."
            ) from None

    def add_answer(self, row: dict[str, Any]) -> bool:
        """Count a line. True if the same answer to the same prompt is there already."""
        *before, last = row["messages"]
        prompt, answer = _key(before), _key([*before, last])
        self.prompts[prompt] = self.prompts.get(prompt, 0) + 1
        if answer in self.answers:
            return True
        self.answers.add(answer)
        self.tokens += row["tokens"]
        self.rows += 1
        return False


def _key(messages: Messages) -> bytes:
    """The same for conversations that differ in case and white space only."""
    text = "\0".join(" ".join(m["content"].casefold().split()) for m in messages)
    return blake2b(text.encode(), digest_size=16).digest()


def _requests(
    source: Iterator[Messages],
    tokenizer: PreTrainedTokenizerBase,
    options: SynthOptions,
    memory: _Memory,
    *,
    context_length: int,
) -> Iterator[tuple[_Job, Request]]:
    """The answers that are still to be written, those of one prompt together."""
    seen: set[bytes] = set()
    for messages in source:
        key = _key(messages)
        if key in seen:
            continue
        seen.add(key)
        last = tokenizer(messages[-1]["content"], add_special_tokens=False).input_ids
        ids = render_chat(tokenizer, messages, add_generation_prompt=True)
        if len(last) > options.max_prompt_tokens or len(ids) >= context_length:
            memory.too_long += 1
            continue
        for number in range(memory.prompts.get(key, 0), options.answers):
            # By the prompt, not by its place: a run that goes on, or another mix of prompts, must
            # not turn the same answer from greedy to sampled. The second answer is of the other kind,
            # all further ones are sampled: a prompt has one greedy answer only.
            share = int.from_bytes(key[:4], "big") / 2**32
            greedy = share < options.greedy_share
            if number:
                greedy = number == 1 and not greedy and options.greedy_share > 0
            request = Request(
                ids=ids,
                max_new_tokens=min(options.max_answer_tokens, context_length - len(ids)),
                temperature=0.0 if greedy else options.temperature,
                seed=int.from_bytes(key[:7], "big") + 7919 * number + options.seed,
            )
            yield _Job(messages, greedy, number), request


def _batches(
    requests: Iterator[tuple[_Job, Request]], options: SynthOptions, *, window: int
) -> Iterator[list[tuple[_Job, Request]]]:
    """Batches of prompts of similar length, since a short one is padded to the longest."""
    while pairs := list(islice(requests, window * options.batch_rows)):
        pairs.sort(key=lambda pair: len(pair[1].ids))
        for start in range(0, len(pairs), options.batch_rows):
            yield pairs[start : start + options.batch_rows]


def _row(
    job: _Job, ids: list[int], tokenizer: PreTrainedTokenizerBase, ends: Collection[int]
) -> dict[str, Any] | None:
    complete = bool(ids) and ids[-1] in ends
    content = str(tokenizer.decode(ids[:-1] if complete else ids))
    if not complete:  # a character may have been cut in two
        content = content.rstrip("\ufffd")
    if not content.strip():
        return None
    return {
        "messages": [*job.messages, {"role": "assistant", "content": content}],
        "greedy": job.greedy,
        "complete": complete,
        "tokens": len(ids),
    }


def _invent(
    writer: Writer, tokenizer: PreTrainedTokenizerBase, options: SynthOptions, memory: _Memory
) -> Iterator[Messages]:
    """User turns that the model says after its own chat template's user header."""
    template = render_chat(tokenizer, [{"role": "user", "content": _MARK}], tokenize=False)
    header = tokenizer(template.split(_MARK)[0], add_special_tokens=False).input_ids
    if not header:
        raise MultirateError(
            "The chat template puts nothing before a user's turn, so the model cannot be made to "
            "invent one. Give prompts (--prompts FILE)."
        )
    special, longest = special_tokens(tokenizer), writer.context_length - len(header)
    barren, draws = 0, memory.rows
    seen = set(memory.prompts)
    while barren < _PATIENCE:
        requests = []
        for _ in range(options.batch_rows):
            draws += 1
            seed = options.seed * 1_000_003 + draws
            limit = min(options.max_prompt_tokens, longest)
            requests.append(Request(header, limit, options.temperature, seed))
        barren += 1
        for ids in writer.complete(requests):
            text = tokenizer.decode(ids[:-1]).strip()
            usable = len(ids) >= _SHORTEST_PROMPT and ids[-1] in writer.ends
            if not usable or not text or any(token in text for token in special):
                continue
            messages = [{"role": "user", "content": text}]
            if (key := _key(messages)) not in seen:
                seen.add(key)
                barren = 0
                yield messages


def _append(path: Path, text: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise MultirateError(
            f"Cannot write {path}: {error.strerror or error}. Give a file in a folder that you may "
            f"write to, on a disk with room; run again to go on with what is in it."
        ) from None
