"""Sampler: the same scores as transformers' generate, and exact draws from them."""

from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.logits_process import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from multirate.config.errors import MultirateError
from multirate.config.generation import GenerationOptions
from multirate.decode import sampling
from multirate.decode.sampling import Sampler, best_token, draw_categorical

VOCABULARY = 24


def make_sampler(*, processors: Any = (), **options: Any) -> Sampler:
    return Sampler(GenerationOptions(**options), processors=processors, device="cpu")


def random_logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 0.9, "min_p": 0.1},
        {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.4},
        {"repetition_penalty": 1.7},
    ],
    ids=str,
)
@pytest.mark.parametrize("ngram", [None, 2], ids=["", "no-repeat-2"])
def test_scores_are_those_of_generate(
    model: LlamaForCausalLM, options: dict[str, Any], ngram: int | None
) -> None:
    """A block's scores equal, position by position, what `generate` sampled each token from."""
    prompt = [3, 7, 7, 1]
    n = 6
    processors = [] if ngram is None else [NoRepeatNGramLogitsProcessor(ngram)]
    sampled = "temperature" in options
    arguments = {"top_k": 0, **options} if sampled else options
    torch.manual_seed(1)
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=n,
        do_sample=sampled,
        logits_processor=LogitsProcessorList(processors),
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
        **arguments,
    )
    logits = torch.stack(output.logits, dim=1)  # [1, n, V]
    drafts = output.sequences[:, len(prompt) : -1]  # [1, n - 1]
    scores = make_sampler(processors=processors, **options).scores(logits, [prompt], drafts)
    torch.testing.assert_close(scores, torch.stack(output.scores, dim=1), rtol=0, atol=0)


def test_rows_of_different_lengths_do_not_see_each_other() -> None:
    sampler = make_sampler(temperature=0.8, top_k=6, repetition_penalty=1.5)
    logits = random_logits(3, 4, VOCABULARY)
    contexts: list[list[int] | torch.Tensor] = [[1, 2, 3], torch.tensor([5]), [7, 7, 8, 9, 0]]
    drafts = torch.tensor([[4, 5, 6], [1, 1, 2], [3, 0, 10]])
    together = sampler.scores(logits, contexts, drafts)
    for row, context in enumerate(contexts):
        prefix = torch.as_tensor(context).tolist()
        for i in range(4):
            alone = sampler.scores(logits[row : row + 1, i : i + 1], [prefix])
            assert torch.equal(together[row, i], alone[0, 0])
            prefix.append(int(drafts[row, i]) if i < 3 else -1)


def test_processors_see_exactly_their_prefix() -> None:
    seen: list[list[int]] = []

    def spy(prefix: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert prefix.shape[0] == 1 and prefix.dtype == torch.long
        assert scores.shape == (1, VOCABULARY)
        seen.append(prefix[0].tolist())
        scores[0, 0] = -7.0  # in place: the caller's logits must not change
        return scores

    logits = random_logits(2, 3, VOCABULARY)
    before = logits.clone()
    scores = make_sampler(processors=[spy]).scores(
        logits, [[9], [8, 8]], torch.tensor([[1, 2], [3, 4]])
    )
    assert seen == [[9], [9, 1], [9, 1, 2], [8, 8], [8, 8, 3], [8, 8, 3, 4]]
    assert (scores[..., 0] == -7.0).all()
    assert torch.equal(logits, before)


def test_user_processors_run_between_penalty_and_temperature() -> None:
    def halve(prefix: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.clamp(max=1.0)

    logits = torch.tensor([[[4.0, 3.0, 0.5]]])
    sampler = make_sampler(processors=[halve], temperature=0.5, repetition_penalty=8.0)
    # id 0: 4 / 8, then / 0.5; id 1: clamped to 1, then / 0.5
    assert sampler.scores(logits, [[0]]).tolist() == [[[1.0, 2.0, 1.0]]]


def test_processors_that_ignore_the_prefix_need_none() -> None:
    sampler = make_sampler(processors=[SuppressTokensLogitsProcessor([1, 3])], temperature=0.5)
    scores = sampler.scores(random_logits(2, 3, VOCABULARY), [])
    assert (scores[..., [1, 3]] == -torch.inf).all()
    assert scores[..., 4:].isfinite().all()


def test_nothing_set_copies_nothing() -> None:
    logits = random_logits(1, 3, VOCABULARY)
    assert make_sampler().scores(logits, []) is logits
    assert make_sampler(temperature=1.0).scores(logits, []) is logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_cast_before_any_arithmetic(dtype: torch.dtype) -> None:
    logits = random_logits(2, 2, VOCABULARY).to(dtype)
    sampler = make_sampler(temperature=0.3, top_p=0.9, repetition_penalty=1.1)
    contexts, drafts = [[1], [2, 3]], torch.tensor([[4], [5]])
    scores = sampler.scores(logits, contexts, drafts)
    assert scores.dtype == torch.float32
    assert torch.equal(scores, sampler.scores(logits.float(), contexts, drafts))
    assert sampler.warp_draft(logits[:, 0]).dtype == torch.float32


def test_greedy_applies_the_penalty_and_leaves_out_warpers() -> None:
    logits = torch.tensor([[[2.0, 1.5, 0.0]]])
    sampler = make_sampler(repetition_penalty=2.0)
    assert sampler.greedy
    assert sampler.choose(sampler.scores(logits, [[0]])).tolist() == [[1]]
    assert sampler.choose(sampler.scores(logits, [[2]])).tolist() == [[0]]


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    scores = torch.zeros(3, VOCABULARY)
    scores[1, [5, 17]] = 1.0
    scores[2, [23, 22]] = 1.0
    assert make_sampler().choose(scores).tolist() == [0, 5, 22]


@pytest.mark.parametrize("vocabulary", [64, 640, 100])
def test_the_best_token_is_the_first_of_the_largest(vocabulary: int) -> None:
    torch.manual_seed(0)
    scores = torch.randint(-3, 3, (2, 5, vocabulary)).float()
    scores[0, 0] = -torch.inf
    scores[0, 1, [70 % vocabulary, 12]] = torch.nan
    scores[1, 0, vocabulary - 1] = torch.inf
    for some in (scores, scores[:, :1], scores[0, :1], scores[1, 4], scores[..., ::2]):
        assert torch.equal(best_token(some), some.argmax(-1))


def test_warp_draft_is_the_targets_shape_without_the_penalty() -> None:
    logits = random_logits(3, 10)  # fewer columns than top_k
    warped = make_sampler(temperature=0.7, top_k=40, top_p=0.8, repetition_penalty=3.0)
    plain = make_sampler(temperature=0.7, top_k=40, top_p=0.8)
    expected = plain.scores(logits[:, None], [])[:, 0]
    assert torch.equal(warped.warp_draft(logits), expected)
    assert (expected == -torch.inf).any() and expected.isfinite().any(dim=1).all()


def test_same_seed_same_tokens_other_seed_others() -> None:
    probs = random_logits(64, VOCABULARY).softmax(-1)

    def tokens(seed: int | None) -> list[int]:
        sampler = make_sampler(temperature=1.0, seed=seed)
        return [*sampler.draw(probs).tolist(), *sampler.choose(probs.log()).tolist()]

    assert tokens(5) == tokens(5)
    assert tokens(5) != tokens(6)
    assert tokens(None) != tokens(None)


def test_draws_follow_the_weights_without_normalising() -> None:
    weights = random_logits(1, VOCABULARY).softmax(-1)
    weights[0, [0, 9, VOCABULARY - 1]] = 0.0
    generator = torch.Generator().manual_seed(0)
    draws = draw_categorical(weights.expand(50_000, -1), generator=generator)
    assert draws.shape == (50_000,)
    counts = draws.bincount(minlength=VOCABULARY).double()
    possible = weights[0] > 0
    assert counts[~possible].sum() == 0
    expected = weights[0].double() / weights[0].double().sum() * len(draws)
    assert chisquare(counts[possible], expected[possible]).pvalue > 0.01


@pytest.mark.parametrize(("u", "index"), [(0.0, 1), (0.3, 1), (1 - 2**-53, 2)])
def test_extreme_draws_stay_on_positive_weights(
    monkeypatch: pytest.MonkeyPatch, u: float, index: int
) -> None:
    monkeypatch.setattr(
        sampling, "uniform", lambda shape, generator: torch.full(shape, u, dtype=torch.float64)
    )
    for scale in (1.0, 0.7, 1.1, 3e-30):
        weights = torch.tensor([0.0, 0.5, 0.5, 0.0]) * scale
        assert draw_categorical(weights, generator=torch.Generator()).item() == index


def test_rare_tokens_are_not_rounded_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a token of nearly 1, a float32 CDF cannot tell tokens of 1e-9 apart; ours does."""
    weights = torch.cat([torch.tensor([1.0]), torch.full((10_000,), 1e-9)])
    total = weights.double().sum()
    for index in (1, 57, 4321, 9999):
        u = float((1.0 + (index - 0.5) * weights[1].double()) / total)
        monkeypatch.setattr(
            sampling,
            "uniform",
            lambda shape, generator, u=u: torch.full(shape, u, dtype=torch.float64),
        )
        assert draw_categorical(weights, generator=torch.Generator()).item() == index


def test_uniform_numbers_are_finer_than_float32() -> None:
    u = sampling.uniform((1000,), generator=torch.Generator().manual_seed(0))
    assert ((u >= 0) & (u < 1)).all()
    assert (u * 2**24 % 1 != 0).any()


def test_a_processor_must_be_callable() -> None:
    with pytest.raises(MultirateError, match="not callable"):
        make_sampler(processors=["temperature"])
