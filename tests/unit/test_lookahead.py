"""Lookahead decoding: the window, the pool, and that neither changes the output."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model

from multirate.config.errors import MultirateError
from multirate.config.generation import GenerationOptions
from multirate.decode.drafter import DraftRequest, Observation
from multirate.decode.engine import Engine
from multirate.decode.lookahead import LookaheadDrafter, Window
from multirate.decode.sampling import Sampler
from multirate.decode.tree import Tree
from multirate.models.base import BaseModel

BASE = BaseModel(tiny_model("llama"))
PROMPTS = [[5, 9, 11, 7, 5, 9, 11], [8, 3, 8], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29]]
PERIOD = [30, 31, 32, 33, 34, 35]  # a model that goes round and round these


def following(token: int) -> int:
    return PERIOD[(PERIOD.index(token) + 1) % len(PERIOD)] if token in PERIOD else PERIOD[0]


def request(texts: list[list[int]], count: int, width: int) -> DraftRequest:
    return DraftRequest(
        torch.tensor([t[-1] for t in texts]), [len(t) - 1 for t in texts], {},
        BASE.arena(rows=len(texts), max_len=0), texts, count=count, width=width,
        sampler=Sampler(GenerationOptions(), device="cpu"), go_on=lambda *_: True,
    )  # fmt: skip


def test_the_pool_fills_with_what_a_repeating_text_repeats() -> None:
    """By hand: the model's word after each entry, then what stays, as the loop does it."""
    n, texts = 4, [[30], [2, 33]]
    run = LookaheadDrafter(ngram=n, window=3, guesses=2).start(rows=2, max_len=99)
    accepted = []
    for _ in range(10):
        draft = run.draft(request(texts, n - 1, 2))
        assert draft.lengths is not None
        entries = torch.cat([torch.tensor([t[-1:] for t in texts]), draft.tokens], dim=1)
        scores = torch.zeros(*entries.shape, 64)
        for row, tokens in enumerate(entries.tolist()):
            for place, token in enumerate(tokens):
                scores[row, place, following(token)] = 1.0
        run.observe(Observation([len(t) - 1 for t in texts], {}, scores, [[0], [0]]))
        for row, (text, length) in enumerate(zip(texts, draft.lengths, strict=True)):
            drafted = draft.tokens[row, :length].tolist()
            right = []
            for token in drafted:  # here every n-gram of a token is the same one: a chain
                if token == following((text + right)[-1]):
                    right.append(token)
            accepted.append(len(right) if drafted else -1)
            text += right
            text.append(following(text[-1]))
    assert accepted[:4] == [-1, -1, -1, -1]  # two passes fill the window
    assert accepted[-6:] == [n - 1] * 6  # whole n-grams, all right
    for window in run.windows:
        for token in PERIOD:
            right = [token]
            while len(right) < n:
                right.append(following(right[-1]))
            assert tuple(right[1:]) in window.pool[token]


def test_what_each_guess_sees() -> None:
    window = Window(LookaheadDrafter(ngram=4, window=3), [50], seed=0)
    window.levels = [[1, 2], [10, 11, 12], [20, 21, 22]]
    tokens, parents, deepest = window.entries()
    tree = Tree.of([parents], torch.device("cpu"))
    names = [0, *tokens]  # 0: the last token
    sees = {
        name: {names[i] for i in tree.mask[0, entry].nonzero()[:, 0].tolist()}
        for entry, name in enumerate(names)
    }
    assert sees == {
        0: {0}, 1: {0, 1}, 2: {0, 1, 2},
        10: {0, 10}, 11: {0, 1, 11}, 12: {0, 1, 2, 12},
        20: {0, 10, 20}, 21: {0, 1, 11, 21}, 22: {0, 1, 2, 12, 22},
    }  # fmt: skip
    depths = dict(zip(names, tree.depths[0].tolist(), strict=True))
    assert depths == {0: 0, 1: 1, 2: 2, 10: 1, 11: 2, 12: 3, 20: 2, 21: 3, 22: 4}
    assert [tokens[i] for i in deepest] == [20, 21, 22]
    assert len(tokens) == LookaheadDrafter(ngram=4, window=3).extra_entries

    window.advance(7, [30, 31, 32])
    assert {key: list(grams) for key, grams in window.pool.items()} == {
        7: [(10, 20, 30)], 1: [(11, 21, 31)], 2: [(12, 22, 32)]
    }  # fmt: skip
    assert window.levels == [[11, 12], [20, 21, 22], [30, 31, 32]]


def test_the_pool_keeps_the_latest() -> None:
    window = Window(LookaheadDrafter(ngram=3, window=1, guesses=2), [50], seed=0)
    for gram in ((1, 10, 11), (1, 10, 12), (1, 10, 11), (1, 13, 14)):
        window._remember(gram)
    assert list(window.pool[1]) == [(10, 11), (13, 14)]
    assert window.candidates(1, depth=2, most=9) == ([13, 14, 10, 11], [-1, 0, -1, 2])
    assert window.candidates(1, depth=1, most=9) == ([13, 10], [-1, -1])
    assert window.candidates(1, depth=2, most=3) == ([13, 14, 10], [-1, 0, -1])
    assert window.candidates(9, depth=2, most=9) == ([], [])
    window._remember((1, 13, 15))  # what they share is drafted once
    assert window.candidates(1, depth=2, most=9) == ([13, 15, 14], [-1, 0, 0])


@pytest.mark.parametrize("settings", [{}, {"ngram": 2, "window": 1}, {"ngram": 3, "window": 4}])
def test_greedy_output_is_the_plain_one(settings: dict[str, int]) -> None:
    engine = Engine(BASE, drafter=LookaheadDrafter(**settings))
    options = GenerationOptions(max_new_tokens=40, ignore_eos=True)
    plain = [engine.generate(p, options, strategy="plain").token_ids for p in PROMPTS]
    for prompts in (PROMPTS[:1], PROMPTS):
        for width in (1, 7):
            results = engine.generate(prompts, options, num_draft_tokens=4, draft_width=width)
            assert [r.token_ids for r in results] == plain[: len(prompts)]
            # Guesses that nobody accepts are no drafts.
            counts = [r.speculation for r in results]
            assert all(c.num_draft_tokens <= c.num_drafts * 4 * width for c in counts)
    if not settings:
        assert sum(c.num_accepted_tokens for c in counts) > 10  # tiny models repeat themselves


def test_rows_that_end_early_and_measured_costs() -> None:
    engine = Engine(BASE, drafter=LookaheadDrafter(ngram=3, window=3))
    plain = [engine.generate(p, max_new_tokens=24, strategy="plain") for p in PROMPTS]
    eos = BASE.model.generation_config.eos_token_id
    BASE.model.generation_config.eos_token_id = sorted(
        {r.token_ids[place] for r, place in zip(plain, (4, 9, 15), strict=True)}
    )
    try:
        wanted = [engine.generate(p, max_new_tokens=24, strategy="plain") for p in PROMPTS]
        fixed = engine.generate(PROMPTS, max_new_tokens=24, num_draft_tokens=2, draft_width=3)
        chosen = engine.generate(PROMPTS, max_new_tokens=24)
    finally:
        BASE.model.generation_config.eos_token_id = eos
    assert [r.token_ids for r in fixed] == [r.token_ids for r in wanted]
    assert [r.token_ids for r in chosen] == [r.token_ids for r in wanted]


def test_mistakes_and_a_draft_from_nothing() -> None:
    for settings in ({"ngram": 1}, {"window": 0}, {"guesses": 0}):
        with pytest.raises(MultirateError, match="ngram at least 2"):
            LookaheadDrafter(**settings)
    draft = LookaheadDrafter(window=3).draft(request([[4, 5]], 4, 7))
    assert draft.lengths == [0]
    assert set(draft.tokens[0].tolist()) <= {4, 5} and draft.tokens.shape == (1, 2)
