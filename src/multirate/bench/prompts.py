"""Prompt sets: what a benchmark decodes, from a file or from the sets that ship.

One JSON object a line, in one of these shapes; of a conversation only the first turn is used, unless
`PromptSet.with_turns` makes prompts of later ones.

    {"turns": ["...", ...]}                          a user's turns, through the chat template
    {"messages": [{"role", "content"}, ...]}         up to the first user message, the same way
    {"prompt": "..."}                                one user message, the same way
    {"text": "..."}                                  given to the model as it is

Data sets of any other shape become prompts through a template that names their fields:
"Write a sentence about this restaurant.\\n\\n{mr}".

A field `category`, where a row has one, sorts the prompts into groups that can be told apart.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from multirate.config.errors import MultirateError
from multirate.decode.engine import Engine
from multirate.models.loading import require_chat_template

PROMPT_SETS = ("mt_bench", "gsm8k", "humaneval")

# Of Spec-Bench's question.jsonl (Xia et al. 2024, arXiv:2401.07851), all but the MT-Bench part.
SPEC_BENCH_TASKS = {"translation", "summarization", "qa", "math_reasoning", "rag"}

_SHAPES = "'turns', 'messages', 'prompt' or 'text'"


@dataclass(frozen=True)
class PromptRow:
    """One prompt.

    Attributes:
        content: chat messages, or text that goes to the model as it is.
        line: its line in the file, from 1.
        category: what kind of prompt it is, where the row says so.
        later: what the user says after the model's answers.
    """

    content: str | list[dict[str, str]]
    line: int
    category: str | None = None
    later: tuple[str, ...] = ()

    @property
    def raw(self) -> bool:
        """Whether the chat template is left out."""
        return isinstance(self.content, str)


@dataclass(frozen=True)
class PromptSet:
    """Prompts and where they came from.

    Attributes:
        name: of the set, or of the file without its folder.
        sha256: of the whole file, in hex.
        rows: the prompts, in the file's order.
    """

    name: str
    sha256: str
    rows: tuple[PromptRow, ...]

    def require_categories(self) -> None:
        """Check that prompts have categories.

        Raises:
            MultirateError: no row has one.
        """
        if all(row.category is None for row in self.rows):
            raise MultirateError(
                f"No row of {self.name} has a category. Give each line a field 'category' with a "
                f"string, or measure all prompts together (leave --by-category out)."
            )

    def require_turns(self, turns: int) -> None:
        """Check that prompts have so many turns.

        Raises:
            MultirateError: more than one was asked for, and no row has a second.
        """
        if turns > 1 and not any(row.later for row in self.rows):
            raise MultirateError(
                f"No row of {self.name} has a second turn. Give rows with 'turns': [first, second], "
                f"or measure first turns only (--turns 1)."
            )

    def with_turns(self, engine: Engine, turns: int, *, new: int) -> PromptSet:
        """The same set with later turns as prompts of their own, each behind the turn before it.

        What the model says in between is plain greedy decoding's, so that every method of a benchmark
        gets the same prompts.

        Args:
            engine: answers.
            turns: at most so many turns of a row.
            new: most tokens of an answer.

        Raises:
            MultirateError: as `encode`.
        """
        rows: list[PromptRow] = []
        for row in self.rows:
            rows.append(row)
            for text in row.later[: turns - 1]:
                (ids,) = replace(self, rows=(rows[-1],)).encode(engine)
                answer = engine.generate(ids, strategy="plain", max_new_tokens=new).text
                said = [{"role": "assistant", "content": answer}, *_user(text, "a turn")]
                rows.append(replace(row, content=[*rows[-1].content, *said], later=()))
        return replace(self, rows=tuple(rows))

    def encode(self, engine: Engine, *, context: int | None = None) -> list[list[int]]:
        """Every prompt's token ids.

        Args:
            engine: tokenizes.
            context: tokens that a prompt gets by text in front of what the user says first; a
                prompt that is longer already stays as it is. None for prompts alone.

        Raises:
            MultirateError: a prompt that the engine refuses, or a conversation for a model without
                a chat template; the line is named. A context that is longer than the text.
        """
        ids = []
        for row in self.rows:
            try:
                if not row.raw:
                    _require_template(engine)
                ids.append(_ids(engine, row, context))
            except MultirateError as error:
                raise MultirateError(f"{self.name}, line {row.line}: {error}") from None
        return ids


def _ids(engine: Engine, row: PromptRow, context: int | None) -> list[int]:
    """A row's token ids, lengthened to `context` or just below: tokens merge where texts meet."""
    ids = engine.encode(row.content, raw=row.raw)
    if context is None or len(ids) >= context:
        return ids
    assert engine.tokenizer is not None  # or there were no ids
    text = engine.tokenizer(context_text(), add_special_tokens=False, verbose=False).input_ids
    if len(text) < context:
        raise MultirateError(
            f"context={context} is longer than the text that comes before prompts: {len(text)} tokens. "
            f"Give less (--context)."
        )
    fill = context - len(ids)
    while fill > 0:
        before = engine.tokenizer.decode(text[:fill])
        longer = engine.encode(_behind(before, row.content), raw=row.raw)
        if len(longer) <= context:
            return longer
        fill -= len(longer) - context
    return ids


def _behind(text: str, content: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
    """A prompt with a text in front of what the user says first."""
    if isinstance(content, str):
        return f"{text}\n\n{content}"
    at = next(i for i, message in enumerate(content) if message["role"] == "user")
    first = {**content[at], "content": f"{text}\n\n{content[at]['content']}"}
    return [*content[:at], first, *content[at + 1 :]]


@cache
def context_text() -> str:
    """English prose, about 10,000 tokens of it, to stand in front of prompts."""
    return files("multirate.bench").joinpath("data", "context.txt").read_text(encoding="utf-8")


def read_prompts(
    source: str | Path,
    *,
    limit: int | None = None,
    per_category: int | None = None,
    template: str | None = None,
) -> PromptSet:
    """Read a prompt set.

    Args:
        source: the name of a set that ships, or a JSONL file (`./name` for one with a set's name).
        limit: only the first so many prompts; None for all.
        per_category: of these, only the first so many of each category; None for all.
        template: makes one user message of each line, whatever its shape: `{name}` stands for a field,
            the items of a list separated by commas, and `\\n` for a new line.

    Raises:
        MultirateError: no such set or file, a line of no known shape or without a field that the
            template names (the line's number is named), a file without prompts, or a number below 1.
    """
    for option, value in (("limit", limit), ("per_category", per_category)):
        if value is not None and value < 1:
            raise MultirateError(
                f"{option}={value} is not allowed; give at least 1, or leave it out for all."
            )
    name = str(source)
    known = name.replace("-", "_").lower()
    try:
        if known in PROMPT_SETS:
            name, data = (
                known,
                files("multirate.bench").joinpath("data", f"{known}.jsonl").read_bytes(),
            )
        else:
            name, data = Path(source).name, _require_file(source).read_bytes()
        text = data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise MultirateError(f"Cannot read {source} as UTF-8 text: {error}") from None
    # Not splitlines: JSON strings may hold U+2028 and the like as they are.
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    rows = tuple(_row(line, i, source=source, template=template) for i, line in lines[:limit])
    if not rows:
        raise MultirateError(
            f"{source} holds no prompts. Give one JSON object a line with {_SHAPES}."
        )
    rows = _spec_bench_tasks(rows)
    if per_category is not None:
        seen: Counter[str | None] = Counter()
        kept = []
        for row in rows:
            seen[row.category] += 1
            if seen[row.category] <= per_category:
                kept.append(row)
        rows = tuple(kept)
    return PromptSet(name, hashlib.sha256(data).hexdigest(), rows)


def _spec_bench_tasks(rows: tuple[PromptRow, ...]) -> tuple[PromptRow, ...]:
    """Spec-Bench counts the eight categories of its MT-Bench part as one of its six tasks."""
    if not {row.category for row in rows} >= SPEC_BENCH_TASKS:
        return rows
    return tuple(
        row if row.category in SPEC_BENCH_TASKS else replace(row, category="multi_turn")
        for row in rows
    )


def _require_file(source: str | Path) -> Path:
    path = Path(source)
    if not path.is_file():
        raise MultirateError(
            f"There is no prompt set and no file {str(source)!r}. Sets: {', '.join(PROMPT_SETS)}; or "
            f"give a .jsonl file with {_SHAPES} on each line."
        )
    return path


def _require_template(engine: Engine) -> None:
    try:
        require_chat_template(engine.tokenizer)
    except MultirateError:
        raise MultirateError(
            'this model has no chat template. Use a chat model, or prompts of the form {"text": ...}, '
            "which go to the model as they are."
        ) from None


def _row(line: str, number: int, *, source: str | Path, template: str | None) -> PromptRow:
    try:
        data = json.loads(line)
        if not isinstance(data, dict):
            raise ValueError("is not a JSON object")
        category = data.get("category")
        if category is not None:
            category = _text(category, "'category'")
        if template is not None:
            return PromptRow(
                _user(_fill(template, data), "what the template makes"), number, category
            )
        return PromptRow(_content(data), number, category, _later(data))
    except json.JSONDecodeError as error:
        problem = f"is not JSON ({error.msg})"
    except ValueError as error:
        problem = str(error)
    needed = "a row that the template fits" if template is not None else _SHAPES
    raise MultirateError(f"{source}, line {number}: {problem}. Needed: {needed}.")


def _fill(template: str, data: dict[str, Any]) -> str:
    """The template with a row's fields in place of their names."""
    fields = {
        name: ", ".join(map(str, value)) if isinstance(value, list) else value
        for name, value in data.items()
    }
    try:
        return template.replace("\\n", "\n").format_map(fields)
    except KeyError as error:
        raise ValueError(f"has no field {error}; it has {', '.join(fields)}") from None
    except (ValueError, IndexError, AttributeError, TypeError, MemoryError) as error:
        raise ValueError(
            f"does not fit the template ({error}); write {{name}} for a field and {{{{ for a brace"
        ) from None


def _content(data: dict[str, Any]) -> str | list[dict[str, str]]:
    if "turns" in data:
        turns = data["turns"]
        if not isinstance(turns, list) or not turns:
            raise ValueError("'turns' is not a list of strings")
        return _user(turns[0], "the first turn")
    if "messages" in data:
        return _first_turn(data["messages"])
    if "prompt" in data:
        return _user(data["prompt"], "'prompt'")
    if "text" in data:
        return _text(data["text"], "'text'")
    raise ValueError("has no prompt")


def _later(data: dict[str, Any]) -> tuple[str, ...]:
    """Turns after the first; those of `messages` would be answers to somebody else's."""
    return tuple(_text(turn, "a turn") for turn in data.get("turns", ())[1:])


def _first_turn(messages: Any) -> list[dict[str, str]]:
    """The messages up to the first one of the user."""
    kept: list[dict[str, str]] = []
    for message in messages if isinstance(messages, list) else []:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError("a message is not an object with 'role' and 'content'")
        kept.append(
            {"role": message["role"], "content": _text(message.get("content"), "a message")}
        )
        if message["role"] == "user":
            return kept
    raise ValueError("'messages' holds no user message")


def _user(value: Any, what: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": _text(value, what)}]


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{what} is empty or not a string")
    value.encode()  # half a surrogate pair is an error that says so
    return value
