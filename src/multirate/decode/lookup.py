"""Drafts from the text itself: what followed the last time that the last tokens stood there.

Prompt lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding) costs no pass of a model and
is right where an answer repeats its prompt. Elsewhere it finds nothing, or guesses badly, and a drafter
that reads the model's states takes over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from multirate.config.errors import MultirateError
from multirate.decode.drafter import MODEL, TEXT, Draft, Drafter, DraftRequest, Growth, Observation

# How often a token is right that followed a match of 1, 2, ... tokens: a first guess.
CLAIMS = (0.2, 0.35, 0.5, 0.65, 0.8)


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

    def start(self, *, rows: int, max_len: int) -> PromptLookupDrafter:
        return _Run(self, rows)

    def find(self, ids: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that a text is expected to go on with; empty without a match."""
        return _Text(self).look_up(ids, count)[0]

    @property
    def grows(self) -> bool:
        return True

    def look_up(self, texts: Sequence[Sequence[int]], count: int) -> list[tuple[list[int], int]]:
        """For each row what `find` gives, and how many tokens matched."""
        return [_Text(self).look_up(ids, count) for ids in texts]

    def draft(self, request: DraftRequest) -> Draft:
        count = min(request.count, self.num_tokens)
        if request.growth is None:
            # A fixed number, or drafts beside those drawn at random: what was accepted so far decides.
            count = next((n for n in range(1, count) if not request.go_on(n, None)), count)
        return self.as_draft(self.look_up(request.ids, count), request.last.device)

    @staticmethod
    def as_draft(found: Sequence[tuple[list[int], int]], device: torch.device) -> Draft:
        """Chains of what was looked up."""
        return Draft.of_rows(
            [tokens for tokens, _ in found],
            [list(range(-1, len(tokens) - 1)) for tokens, _ in found],
            device=device,
            chances=[
                [_claim(matched + i) for i in range(len(tokens))] for tokens, matched in found
            ],
            kinds=[[TEXT] * len(tokens) for tokens, _ in found],
            steps=() if any(tokens for tokens, _ in found) else None,
        )


class _Text:
    """Where the tokens of one text stand; read on as it grows, so that a long text costs nothing.

    Args:
        settings: shortest and longest match.
    """

    def __init__(self, settings: PromptLookupDrafter) -> None:
        self.shortest, self.longest = settings.min_ngram, settings.max_ngram
        self.read = 0  # tokens that are entered
        self.latest: dict[int, int] = {}  # of each token
        self.pairs: dict[tuple[int, int], list[int]] = {}  # of each two tokens, of the second one

    def look_up(self, ids: Sequence[int], count: int) -> tuple[list[int], int]:
        """What followed the best match of the last tokens, and how many matched."""
        end = len(ids) - 1
        for place in range(self.read, end):
            self.latest[ids[place]] = place
            if place > 0:
                self.pairs.setdefault((ids[place - 1], ids[place]), []).append(place)
        self.read = max(self.read, end)
        best, after = 0, 0
        if self.longest > 1 and end > 0:
            for place in reversed(self.pairs.get((ids[-2], ids[-1]), ())):
                n = self._match(ids, place)
                if n > best:
                    best, after = n, place + 1
                if best == self.longest:
                    break
        if best == 0 and ids[-1] in self.latest:
            best, after = 1, self.latest[ids[-1]] + 1
        if best < self.shortest:
            return [], 0
        text = list(ids[after : after + count])
        for i in range(count - len(text)):
            text.append(text[i])
        return text, best

    def _match(self, ids: Sequence[int], end: int) -> int:
        """How many tokens up to and with place `end` equal the last ones, as many as are looked for."""
        longest = min(self.longest, end + 1)
        return next((n for n in range(2, longest) if ids[end - n] != ids[-1 - n]), longest)


class _Run(PromptLookupDrafter):
    """The lookups of one generation."""

    def __init__(self, settings: PromptLookupDrafter, rows: int) -> None:
        super().__init__(
            max_ngram=settings.max_ngram,
            min_ngram=settings.min_ngram,
            num_tokens=settings.num_tokens,
        )
        self.texts = [_Text(self) for _ in range(rows)]

    def keep(self, rows: Sequence[int]) -> None:
        self.texts = [self.texts[row] for row in rows]

    def look_up(self, texts: Sequence[Sequence[int]], count: int) -> list[tuple[list[int], int]]:
        return [text.look_up(ids, count) for text, ids in zip(self.texts, texts, strict=True)]


def _claim(matched: int) -> float:
    """The chance of a token after a match of so many, before anything is known of this text."""
    return CLAIMS[min(matched, len(CLAIMS)) - 1]


class NgramTreeDrafter(Drafter):
    """Prompt lookup and another drafter in one tree.

    What stood in the text is a branch of its own from the root, where the other drafter has not drafted
    the same. Lookups cost next to nothing, so they go on where the other drafter does not pay, and that
    one rests where a lookup is nearly sure. Where trees are not grown (a fixed number of drafts,
    sampling), a row with a match of `min_ngram` is drafted from the text, the others by the other.

    Args:
        other: the drafter beside the lookup.
        lookup: None for matches of up to 5 tokens.
        min_ngram: shortest match that is trusted alone; None: no match is.
    """

    def __init__(
        self,
        other: Drafter,
        lookup: PromptLookupDrafter | None = None,
        *,
        min_ngram: int | None = 3,
    ) -> None:
        self.other, self.min_ngram = other, min_ngram
        self.lookup = lookup or PromptLookupDrafter(max_ngram=5, num_tokens=16)

    @property
    def carry_layers(self) -> Sequence[int]:
        return self.other.carry_layers

    @property
    def expected_acceptance(self) -> Sequence[float]:
        return self.other.expected_acceptance

    @property
    def extra_entries(self) -> int:
        return self.other.extra_entries

    @property
    def max_width(self) -> int:
        return self.other.max_width

    @property
    def max_beam(self) -> int:
        return self.other.max_beam

    @property
    def grows(self) -> bool:
        return True

    def warm_up(self, rows: int) -> None:
        self.other.warm_up(rows)

    def start(self, *, rows: int, max_len: int) -> Drafter:
        other = self.other.start(rows=rows, max_len=max_len)
        lookup = self.lookup.start(rows=rows, max_len=max_len)
        return NgramTreeDrafter(other, lookup, min_ngram=self.min_ngram)

    def keep(self, rows: Sequence[int]) -> None:
        self.other.keep(rows)
        self.lookup.keep(rows)

    def observe(self, seen: Observation) -> None:
        self.other.observe(seen)

    def draft(self, request: DraftRequest) -> Draft:
        if request.growth is None:
            return self._first(request)
        growth = request.growth
        looked_up = self.lookup.look_up(request.ids, min(request.count, self.lookup.num_tokens))
        if not any(tokens for tokens, _ in looked_up):
            if growth.pays():
                return self.other.draft(request)
            return Draft(request.last.new_empty((len(looked_up), 0)), steps=())
        found = self.lookup.as_draft(looked_up, request.last.device)
        assert found.chances is not None
        missed = [1 - growth.chance(row[0], TEXT) if row else 1.0 for row in found.chances]
        beside = _Beside(growth, missed)
        if beside.pays():
            return _join(self.other.draft(replace(request, growth=beside)), found, growth)
        return found

    def _first(self, request: DraftRequest) -> Draft:
        """Rows with a long match from the text, the others by the other drafter."""
        trusted = self.min_ngram
        if trusted is None:
            return self.other.draft(request)
        found = self.lookup.draft(request)
        assert found.lengths is not None
        matched = self.lookup.look_up(request.ids, 1)
        lengths = [
            n if m >= trusted else 0 for n, (_, m) in zip(found.lengths, matched, strict=True)
        ]
        found = Draft(found.tokens, lengths=lengths, steps=())
        if all(lengths):
            return found
        if not any(lengths):
            return self.other.draft(request)
        return _merge(found, self.other.draft(replace(request, width=1)))


@dataclass(frozen=True)
class _Beside:
    """The growth of a tree beside lookups, which leave it these chances (one a row)."""

    growth: Growth
    left: Sequence[float]

    def chance(self, claimed: float, kind: int = MODEL) -> float:
        return self.growth.chance(claimed, kind)

    def pays(self, chance: float = 1.0) -> bool:
        return self.growth.pays(chance * sum(self.left) / len(self.left))

    def beam(self, depth: int, chances: Sequence[Sequence[float]], limit: int) -> int:
        if depth == 0:
            chances = [[row[0] * left] for row, left in zip(chances, self.left, strict=True)]
        return self.growth.beam(depth, chances, limit)


def _join(tree: Draft, found: Draft, growth: Growth) -> Draft:
    """Each row's looked-up chain as one more branch of its tree; what both hold stands there once."""
    assert found.chances is not None
    rows, n = tree.tokens.shape
    claims = [list(row) for row in tree.chances or [[0.0] * n] * rows]
    kinds = [list(row) for row in tree.kinds or [[MODEL] * len(row) for row in claims]]
    tokens, parents = [], []
    lengths = tree.lengths or [n] * rows
    looked_up = found.token_lists()
    for row, (drafts, above) in enumerate(
        zip(tree.token_lists(), tree.parent_lists(), strict=True)
    ):
        drafts, above = drafts[: lengths[row]], above[: lengths[row]]
        place = {
            (parent, token): i for i, (parent, token) in enumerate(zip(above, drafts, strict=True))
        }
        node = -1
        for token, claim in zip(looked_up[row], found.chances[row], strict=False):
            known = place.get((node, token))
            if known is None:
                known = len(drafts)
                drafts.append(token)
                above.append(node)
                claims[row].append(claim)
                kinds[row].append(TEXT)
            elif growth.chance(claim, TEXT) > growth.chance(claims[row][known], kinds[row][known]):
                claims[row][known], kinds[row][known] = claim, TEXT
            node = known
        tokens.append(drafts)
        parents.append(above)
    return Draft.of_rows(
        tokens,
        parents,
        device=tree.tokens.device,
        chances=claims,
        kinds=kinds,
        steps=tree.steps,
    )


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
        return Draft(tokens, lengths=lengths, steps=other.steps)
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
    return Draft(tokens, probs=probs, ids=ids, lengths=lengths, steps=other.steps)
