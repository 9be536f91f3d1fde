"""The text that is analysed: whose it is, how it is split, and what kind of token a position reads."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from multirate.bench.prompts import read_prompts
from multirate.config.errors import MultirateError
from multirate.decode.engine import Engine
from multirate.models.loading import require_chat_template
from multirate.train.data import read_rows

MIN_TOKENS = 256
HELDOUT_SHARE = 0.25
PROMPTS = "mt_bench"
MAX_NEW_TOKENS = 192
_PROMPTS_AT_ONCE = 16
_READ_MORE = 25

PROMPT, WORD_START, WORD_PIECE, DIGITS, PUNCTUATION, OTHER = range(6)
TOKEN_CLASSES = (
    "prompt",
    "word start",
    "word piece",
    "digits",
    "punctuation",
    "line breaks, special",
)


@dataclass(frozen=True)
class Text:
    """One text.

    Attributes:
        ids: its tokens.
        answers: half-open ranges of the tokens that the model wrote itself; all but the first token
            of raw text.
    """

    ids: list[int]
    answers: tuple[tuple[int, int], ...]

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens before the first answer."""
        return tuple(self.ids[: self.answers[0][0]])

    @property
    def positions(self) -> int:
        """Positions whose next token is one of an answer's."""
        return sum(stop - start for start, stop in self.answers)


@dataclass(frozen=True)
class Corpus:
    """Texts and where they are from.

    Attributes:
        source: in words.
        sha256: of the file; None for text that was written just now.
        train: what is fitted on.
        heldout: what is judged on; it shares no prompt with `train`.
    """

    source: str
    sha256: str | None
    train: list[Text]
    heldout: list[Text]


def file_corpus(
    source: str,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    tokens: int,
    seed: int,
    max_length: int,
) -> Corpus:
    """About `tokens` positions of a file or data set; see `multirate.train.data` for its forms.

    Raises:
        MultirateError: no such file or data set, a line that is not understood, a model without a
            tokenizer, or too little text.
    """
    if tokenizer is None:
        raise MultirateError("This model has no tokenizer, so no text can be read for it.")
    # Far more than is used, so that what is used is drawn from many texts.
    rows = read_rows(source, tokenizer, max_length=max_length, max_tokens=_READ_MORE * tokens)
    texts = [Text(row.ids.tolist(), row.spans) for row in rows]
    path = Path(source)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    return _corpus(texts, source=path.name, sha256=sha256, tokens=tokens, seed=seed)


def require_own_text(tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Check that a model can answer prompts.

    Raises:
        MultirateError: it has no tokenizer or no chat template; the fix is --data.
    """
    try:
        require_chat_template(tokenizer)
    except MultirateError:
        missing = "tokenizer" if tokenizer is None else "chat template"
        raise MultirateError(
            f"This model has no {missing}, so it cannot answer prompts to make the text that is "
            f"analysed. Give text with --data FILE (.jsonl, .jsonl.gz or plain text)."
        ) from None


def own_corpus(
    engine: Engine, *, tokens: int, seed: int, tick: Callable[[int], None] = lambda new: None
) -> Corpus:
    """The model's greedy answers to the MT-Bench first turns.

    Args:
        engine: its plain decoding is used.
        tokens: positions wanted; answers are cut at `MAX_NEW_TOKENS`, so there may be fewer.
        seed: of the split.
        tick: called with the number of prompts that have just been answered.

    Raises:
        MultirateError: a prompt that does not fit the model's context, or too little text.
    """
    prompts = read_prompts(PROMPTS).encode(engine)
    length = min(MAX_NEW_TOKENS, -(-tokens // len(prompts)))
    texts = []
    for start in range(0, len(prompts), _PROMPTS_AT_ONCE):
        some = prompts[start : start + _PROMPTS_AT_ONCE]
        results = engine.generate(some, strategy="plain", max_new_tokens=length)
        texts += [
            Text(
                [*prompt, *result.token_ids], ((len(prompt), len(prompt) + len(result.token_ids)),)
            )
            for prompt, result in zip(some, results, strict=True)
        ]
        tick(len(some))
    what = f"greedy answers to {len(prompts)} {PROMPTS} first turns"
    source = f"the model's {what}, at most {length} tokens each"
    return _corpus(texts, source=source, sha256=None, tokens=tokens, seed=seed)


def _corpus(
    texts: Sequence[Text], *, source: str, sha256: str | None, tokens: int, seed: int
) -> Corpus:
    """Shuffle, take about `tokens` positions, and split by prompt."""
    groups: dict[tuple[int, ...], list[Text]] = {}
    for index, text in enumerate(texts):
        if text.positions > 0:
            key = text.prompt if len(text.prompt) > 1 else (-1, index)
            groups.setdefault(key, []).append(text)
    order = list(groups.values())
    random.Random(seed).shuffle(order)
    found = sum(text.positions for group in order for text in group)
    total = min(tokens, found)
    if found < MIN_TOKENS or len(order) < 2:
        raise MultirateError(
            f"{source} holds {found} positions in {len(order)} texts with a prompt of their own, too "
            f"few to analyse: give at least {MIN_TOKENS} positions in 2 texts."
        )
    heldout = list(_enough(order, total * HELDOUT_SHARE))
    # At least one text stays to be fitted on, however few and long they are.
    heldout = heldout[: len(order) - 1]
    train = list(_enough(order[len(heldout) :], total * (1 - HELDOUT_SHARE)))
    return Corpus(source, sha256, _flat(train), _flat(heldout))


def _enough(groups: Sequence[list[Text]], positions: float) -> Iterator[list[Text]]:
    for group in groups:
        if positions <= 0:
            return
        yield group
        positions -= sum(text.positions for text in group)


def _flat(groups: Sequence[list[Text]]) -> list[Text]:
    return [text for group in groups for text in group]


def token_classes(text: Text, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """For every position, the index in `TOKEN_CLASSES` of the token that it reads.

    A token of letters starts a word when it carries the tokenizer's space mark or follows a token
    that does not end in a letter; otherwise it is a piece of one. Tokens outside of answers are
    "prompt", whatever they are.
    """
    special = set(tokenizer.all_special_ids)
    names = tokenizer.convert_ids_to_tokens(text.ids)
    answers = {i for start, stop in text.answers for i in range(start, stop)}
    classes, before = [], ""
    for position, (token, name) in enumerate(zip(text.ids, names, strict=True)):
        shown = str(name).replace("Ġ", " ").replace("▁", " ")
        if position not in answers:
            classes.append(PROMPT)
        elif token in special:
            classes.append(OTHER)
        else:
            classes.append(_kind(shown, before))
        before = shown
    return classes


def _kind(shown: str, before: str) -> int:
    bare = shown.strip()
    # Byte-level tokenizers show a line break as Ċ and a tab as ĉ, which count as letters.
    if not bare.strip("Ċĉč"):
        return OTHER
    if bare.isdigit():
        return DIGITS
    if not any(c.isalnum() for c in bare):
        return PUNCTUATION
    starts = shown[0] == " " or not before or not before[-1].isalpha() or before[-1] in "Ċĉč"
    return WORD_START if starts else WORD_PIECE
