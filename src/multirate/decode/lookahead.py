"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057): n-grams that the model guesses in parallel.

No training and no second model. Every pass of the model also carries a window of W columns and N - 1
levels of guesses: level 0 stands behind the last token, and the guess of level l in column j sees
level 0 up to its column and its own column's lower levels, so it stands l + j places behind the last
token. What the model makes of the deepest level is the next level, and each column with it an N-gram
(a Jacobi iteration in two dimensions). A pool keeps the last G of them for every first token; those
that begin with the last token are what is drafted, verified in the same pass.

    last ── 0,1 ── 0,2 ── ···     level 0; `last` is its column 0
     │       │      │
    1,0     1,1    1,2            level 1
     │       │      │
    2,0     2,1    2,2            level 2 = N - 2: what the model says here becomes the next level
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from multirate.config.errors import MultirateError
from multirate.decode.drafter import Draft, Drafter, DraftRequest, Observation

Gram = tuple[int, ...]


class LookaheadDrafter(Drafter):
    """Drafts n-grams that the model guessed before, and lets it guess more.

    Args:
        ngram: N, tokens of an n-gram, the first being the one it is found by.
        window: W, columns.
        guesses: G, most n-grams kept for a first token; the least recently guessed go.
        seed: of the first guesses, drawn from the text.

    Raises:
        MultirateError: an n-gram of fewer than 2 tokens, or a number below 1.
    """

    def __init__(self, *, ngram: int = 5, window: int = 7, guesses: int = 7, seed: int = 0) -> None:
        if ngram < 2 or window < 1 or guesses < 1:
            raise MultirateError(
                f"ngram={ngram}, window={window} and guesses={guesses} are not allowed; give ngram at "
                f"least 2, the others at least 1."
            )
        self.ngram, self.window, self.guesses, self.seed = ngram, window, guesses, seed

    @property
    def max_width(self) -> int:
        return self.guesses

    @property
    def extra_entries(self) -> int:
        return (self.ngram - 1) * self.window - 1

    def start(self, *, rows: int, max_len: int) -> Drafter:
        return _Run(self, rows)

    def draft(self, request: DraftRequest) -> Draft:
        """One draft from nothing: `start` gives the drafter that remembers what was guessed."""
        return self.start(rows=len(request.ids), max_len=0).draft(request)


class Window:
    """Guesses and n-grams of one text.

    Args:
        settings: N, W and G.
        text: the first guesses are drawn from it.
        seed: of that.
    """

    def __init__(self, settings: LookaheadDrafter, text: Sequence[int], seed: int) -> None:
        self.settings = settings
        guesses = random.Random(seed).choices(text, k=settings.window - 1)
        self.levels = [guesses]  # level 0 lacks column 0; one level more each pass, up to N - 1
        self.pool: dict[int, dict[Gram, None]] = {}  # by first token, oldest first

    def entries(self) -> tuple[list[int], list[int], list[int]]:
        """Tokens and parents, as in `Draft`, and the entries of the deepest level's W columns."""
        tokens: list[int] = []
        parents: list[int] = []
        deepest = [-1, *range(len(self.levels[0]))]
        for depth, level in enumerate(self.levels):
            above = deepest[:-1] if depth == 0 else deepest
            first = len(tokens)
            tokens += level
            parents += above
            if depth > 0:
                deepest = list(range(first, first + len(level)))
        return tokens, parents, deepest

    def advance(self, last: int, guessed: list[int]) -> None:
        """Take in what the model said at the deepest level in a pass whose last token was `last`."""
        self.levels.append(guessed)
        if len(self.levels) < self.settings.ngram:
            return
        level_0 = [last, *self.levels[0]]
        for gram in zip(level_0, *self.levels[1:], strict=True):
            self._remember(gram)
        self.levels = [self.levels[1][1:], *self.levels[2:]]

    def _remember(self, gram: Gram) -> None:
        known = self.pool.setdefault(gram[0], {})
        known.pop(gram[1:], None)
        known[gram[1:]] = None
        if len(known) > self.settings.guesses:
            del known[next(iter(known))]

    def candidates(self, last: int, *, depth: int, most: int) -> tuple[list[int], list[int]]:
        """A tree of the n-grams known for the last token, the latest first; tokens and parents."""
        tokens: list[int] = []
        parents: list[int] = []
        children: dict[tuple[int, int], int] = {}
        for gram in reversed(self.pool.get(last, {})):
            place = -1
            for token in gram[:depth]:
                if (place, token) not in children:
                    if len(tokens) == most:
                        break
                    children[place, token] = len(tokens)
                    tokens.append(token)
                    parents.append(place)
                place = children[place, token]
        return tokens, parents


class _Run(Drafter):
    """One generation."""

    def __init__(self, settings: LookaheadDrafter, rows: int) -> None:
        self.settings = settings
        self.windows: list[Window | None] = [None] * rows
        self.asked: list[tuple[int, list[int]]] = []  # of each row: last token, deepest entries

    def keep(self, rows: Sequence[int]) -> None:
        self.windows = [self.windows[row] for row in rows]

    def draft(self, request: DraftRequest) -> Draft:
        self.asked = []
        tokens, parents, lengths = [], [], []
        for row, text in enumerate(request.ids):
            window = self.windows[row] or Window(self.settings, text, self.settings.seed)
            self.windows[row] = window
            drafts, up = window.candidates(
                text[-1], depth=request.count, most=request.count * request.width
            )
            guesses, guess_parents, deepest = window.entries()
            n = len(drafts)
            tokens.append(drafts + guesses)
            parents.append(up + [place + n if place >= 0 else -1 for place in guess_parents])
            lengths.append(n)
            # Entry 0 of the verified block is the last token.
            self.asked.append((text[-1], [place + n + 1 if place >= 0 else 0 for place in deepest]))
        draft = Draft.of_rows(tokens, parents, device=request.last.device, steps=(1,))
        # Guesses stand beyond the drafts: the model runs them, nobody accepts them.
        return replace(draft, lengths=lengths)

    def observe(self, seen: Observation) -> None:
        if seen.scores is None or not self.asked:
            return
        best = seen.scores.argmax(-1).tolist()
        for window, (last, entries), said in zip(self.windows, self.asked, best, strict=True):
            assert window is not None
            window.advance(last, [said[entry] for entry in entries])
        self.asked = []
