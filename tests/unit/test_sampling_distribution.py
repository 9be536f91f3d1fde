"""Sampling through the whole engine: speculative output has exactly the model's distribution.

A model of 16 tokens is small enough to write the distribution of its continuations down. 20,000
continuations of one prompt are drawn speculatively and held against it with a chi-square test; the
test itself is tested by breaking acceptance on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency, chisquare
from test_stream_steps import shaken
from tiny_models import tiny_model

from multirate.config.generation import GenerationOptions
from multirate.decode import loop
from multirate.decode.acceptance import Acceptance, accept_sampled
from multirate.decode.engine import Engine
from multirate.decode.sampling import Sampler
from multirate.models.base import BaseModel

VOCABULARY = 16
SAMPLES = 20_000
BATCH = 2_500
PROMPT = [3, 7, 3, 11]
# The first new token comes from the prefill; drafts can only distort the two after it.
NEW_TOKENS = 3

CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "top_k": {"temperature": 1.3, "top_k": 5},
    "min_p": {"temperature": 1.0, "min_p": 0.15},
    "repetition_penalty": {"temperature": 1.0, "repetition_penalty": 1.7},
}


@cache
def engine() -> Engine:
    base = BaseModel(tiny_model("llama", vocab_size=VOCABULARY, seed=3))
    # Drafts from a reduced vocabulary, by a drafter that is far from the target: many rejections.
    return Engine(base, accelerator=shaken(base, "carry", draft_vocab_size=12))


def exact(settings: dict[str, Any]) -> np.ndarray:
    """Probability of every pair (second, third new token), `[16, 16]`, by enumeration."""
    base = engine().base
    sampler = Sampler(GenerationOptions(**settings), device="cpu")

    def step(contexts: list[list[int]]) -> torch.Tensor:
        with torch.inference_mode():
            logits = base.model(torch.tensor(contexts)).logits[:, -1:]
            return sampler.probabilities(sampler.scores(logits, contexts))[:, 0].double()

    tokens = range(VOCABULARY)
    first = step([PROMPT])[0]
    second = step([[*PROMPT, a] for a in tokens])
    third = step([[*PROMPT, a, b] for a, b in product(tokens, tokens)])
    joint = (first[:, None] * second)[..., None] * third.view(VOCABULARY, VOCABULARY, VOCABULARY)
    return joint.sum(0).numpy()


def draw(settings: dict[str, Any], *, strategy: str, seed: int = 0, width: int = 1) -> np.ndarray:
    """Counts of the same pairs over 20,000 generated continuations."""
    counts = np.zeros((VOCABULARY, VOCABULARY))
    drafts = {}
    if strategy == "speculative":
        drafts = {"num_draft_tokens": 2, "draft_width": width}
    for batch in range(SAMPLES // BATCH):
        results = engine().generate(
            [PROMPT] * BATCH,
            max_new_tokens=NEW_TOKENS,
            ignore_eos=True,
            seed=seed + batch,
            strategy=strategy,
            **drafts,
            **settings,
        )
        for result in results:
            counts[result.token_ids[1], result.token_ids[2]] += 1
    return counts


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Chi-square goodness of fit; cells expected fewer than 10 times are pooled."""
    expected = probabilities / probabilities.sum() * counts.sum()
    assert counts[expected == 0].sum() == 0, "a token that the settings rule out was drawn"
    rare = expected < 10
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    keep = wanted > 0
    return float(chisquare(observed[keep], wanted[keep]).pvalue)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_speculative_sampling_has_the_target_distribution(case: str, width: int) -> None:
    counts = draw(CASES[case], strategy="speculative", width=width)
    assert counts.sum() == SAMPLES
    assert p_value(counts, exact(CASES[case])) > 0.01


def test_speculative_is_not_told_from_plain() -> None:
    settings = CASES["temperature"]
    plain = draw(settings, strategy="plain", seed=100).ravel()
    speculative = draw(settings, strategy="speculative").ravel()
    common = plain + speculative >= 20
    table = np.stack([
        np.append(c[common], c[~common].sum()) for c in (plain, speculative)
    ])  # fmt: skip
    assert chi2_contingency(table[:, table.sum(0) > 0]).pvalue > 0.01


def always_accept(
    drafts: torch.Tensor, lengths: torch.Tensor, target_probs: torch.Tensor, **kw: Any
) -> Acceptance:
    result = accept_sampled(drafts, lengths, target_probs, **kw)
    rows = torch.arange(len(drafts))
    bonus = target_probs[rows, lengths].argmax(-1)
    return Acceptance(lengths, torch.where(result.entry == lengths, result.next_token, bonus))


def correct_from_target(
    drafts: torch.Tensor, lengths: torch.Tensor, target_probs: torch.Tensor, **kw: Any
) -> Acceptance:
    """Rejects rightly, but draws the correction from p instead of the residual of p and q."""
    result = accept_sampled(drafts, lengths, target_probs, **kw)
    rows = torch.arange(len(drafts))
    p = target_probs[rows, result.entry]
    fresh = torch.multinomial(p, 1, generator=kw["generator"])[:, 0]
    corrected = torch.where(result.entry < lengths, fresh, result.next_token)
    return Acceptance(result.entry, corrected)


@pytest.mark.parametrize("broken", [always_accept, correct_from_target])
def test_the_test_notices_broken_acceptance(
    broken: Callable[..., Acceptance], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "accept_sampled", broken)
    counts = draw(CASES["temperature"], strategy="speculative")
    assert p_value(counts, exact(CASES["temperature"])) < 1e-6


def test_same_seed_same_output() -> None:
    settings = {"temperature": 1.0, "max_new_tokens": 20, "num_draft_tokens": 3}
    one, two, other = (engine().generate(PROMPT, seed=s, **settings) for s in (7, 7, 8))
    assert one.token_ids == two.token_ids != other.token_ids
