"""Drafts from the text itself: what followed the last time that the last tokens stood there.

Prompt lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding) costs no pass of a model and
is right where an answer repeats its prompt. Elsewhere it finds nothing, or guesses badly, and a drafter
that reads the model's states takes over.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from multirate.config.errors import MultirateError
from multirate.decode.drafter import Draft, Drafter, DraftRequest, Observation


class PromptLookupDrafter(Drafter):
    """Finds a row's last tokens earlier in its prompt and output, and drafts what came after them.

    The longest match wins, among equals the most recent. A draft that reaches the end of the text goes
    on with itself, so a text that repeats itself is continued however short its period is. A row
    without a match gets no drafts.

    Args:
        max_ngram: the longest run of last tokens that is looked for.
        min_ngram: the shortest.
        num_tokens: most drafts a step.

    Raises:
        MultirateError: a number below 1, or min_ngram above max_ngram.
    """

    def __init__(self, *, max_ngram: int = 3, min_ngram: int = 1, num_tokens: int = 10) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise MultirateError(
                f"min_ngram={min_ngram} and max_ngram={max_ngram} are not allowed; give 1 <= min_ngram "
                f"<= max_ngram."
            )
        if num_tokens < 1:
            raise MultirateError(f"num_tokens={num_tokens} is not allowed; give at least 1.")
        self.max_ngram, self.min_ngram, self.num_tokens = max_ngram, min_ngram, num_tokens

    def find(self, ids: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that a text is expected to go on with; empty without a match."""
        best, after = 0, 0
        for end in range(len(ids) - 2, -1, -1):
            if ids[end] != ids[-1]:  # by far most places
                continue
            n = self._match(ids, end)
            if n > best:
                best, after = n, end + 1
            if best == self.max_ngram:
                break
        if best < self.min_ngram:
            return []
        text = list(ids[after:])
        for i in range(count):
            text.append(text[i])
        return text[len(text) - count :]

    def _match(self, ids: Sequence[int], end: int) -> int:
        """How many tokens up to and with place `end` equal the last ones, `max_ngram` at most."""
        longest = min(self.max_ngram, end + 1)
        return next((n for n in range(1, longest) if ids[end - n] != ids[-1 - n]), longest)

    def draft(self, request: DraftRequest) -> Draft:
        count = min(request.count, self.num_tokens)
        # A match says nothing of how sure it is: what was accepted so far decides.
        count = next((n for n in range(1, count) if not request.go_on(n, None)), count)
        found = [self.find(row, count) for row in request.ids]
        return Draft(
            tokens=_rectangle(found, request.last.device), lengths=[len(row) for row in found]
        )


class NgramFirstDrafter(Drafter):
    """Prompt lookup where the match is long enough to be trusted, another drafter elsewhere.

    Args:
        other: drafts for the rows without a match; it does not run if all rows have one.
        lookup: None for matches of 3 to 5 tokens.
    """

    def __init__(self, other: Drafter, lookup: PromptLookupDrafter | None = None) -> None:
        self.other = other
        self.lookup = lookup or PromptLookupDrafter(max_ngram=5, min_ngram=3)

    @property
    def carry_layers(self) -> Sequence[int]:
        return self.other.carry_layers

    @property
    def expected_acceptance(self) -> Sequence[float]:
        return self.other.expected_acceptance

    @property
    def max_width(self) -> int:
        return self.other.max_width

    def start(self, *, rows: int, max_len: int) -> Drafter:
        return NgramFirstDrafter(self.other.start(rows=rows, max_len=max_len), self.lookup)

    def keep(self, rows: Sequence[int]) -> None:
        self.other.keep(rows)

    def observe(self, seen: Observation) -> None:
        self.other.observe(seen)

    def draft(self, request: DraftRequest) -> Draft:
        found = self.lookup.draft(request)
        assert found.lengths is not None
        if all(found.lengths):
            return found
        other = self.other.draft(request)
        return _merge(found, other) if any(found.lengths) else other


def _merge(found: Draft, other: Draft) -> Draft:
    """The rows of `found` that have drafts, those of `other` elsewhere."""
    assert found.lengths is not None
    made = other.tokens.shape[1]
    width = max(found.tokens.shape[1], made)
    from_text = torch.tensor([n > 0 for n in found.lengths], device=found.tokens.device)
    tokens = torch.where(
        from_text[:, None],
        pad(found.tokens, (0, width - found.tokens.shape[1])),
        pad(other.tokens, (0, width - made)),
    )
    elsewhere = other.lengths or [made] * len(found.lengths)
    lengths = [n or m for n, m in zip(found.lengths, elsewhere, strict=True)]
    if other.probs is None:
        return Draft(tokens, lengths=lengths)
    # One batch has one kind of q: a draft from the text gets the point mass that it came from.
    probs, ids, columns = other.probs, other.ids, tokens
    if ids is not None:  # which may need columns that a reduced vocabulary lacks
        looked_up = found.tokens.unique()
        extra = looked_up[~torch.isin(looked_up, ids)]
        ids = torch.cat([ids, extra])
        probs = pad(probs, (0, len(extra)))
        columns = (tokens[..., None] == ids).to(torch.uint8).argmax(-1)
    probs = pad(probs, (0, 0, 0, width - made))
    certain = torch.zeros_like(probs).scatter_(2, columns[..., None], 1.0)
    probs = torch.where(from_text[:, None, None], certain, probs)
    return Draft(tokens, probs=probs, ids=ids, lengths=lengths)


def _rectangle(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Rows of different lengths as a LongTensor `[R, longest]`, filled up with zeros."""
    width = max(len(row) for row in rows)
    return torch.tensor(
        [[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.long, device=device
    ).view(len(rows), width)
