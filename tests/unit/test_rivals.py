"""Drafters of other methods: each is what its description says, and none changes the output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from test_stream_steps import shaken
from tiny_models import NUM_LAYERS, VOCABULARY, tiny_model

from multirate.bench.methods import METHODS
from multirate.bench.options import SpeculativeOptions
from multirate.config.errors import MultirateError
from multirate.config.generation import GenerationOptions
from multirate.decode.costs import StepCosts
from multirate.decode.draft_length import DraftLength
from multirate.decode.drafter import MODEL, TEXT, Draft, Drafter, DraftRequest
from multirate.decode.engine import Engine
from multirate.decode.lookup import NgramTreeDrafter, PromptLookupDrafter
from multirate.decode.outcomes import Outcome
from multirate.decode.results import GenerationResult
from multirate.decode.rivals import EarlyExitDrafter, ModelDrafter
from multirate.decode.sampling import Sampler
from multirate.decode.stream import AcceleratorDrafter
from multirate.models.base import BaseModel

# Ragged; the first two repeat themselves, so that lookups find something from the first step on.
PROMPTS = [[5, 9, 11, 7, 5, 9, 11], [8, 3, 8], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29]]
NEW = 24
GREEDY = Sampler(GenerationOptions(), device="cpu")

BASE = BaseModel(tiny_model("llama"))
WINDOWED = BaseModel(tiny_model("gemma3_text"))
CHEAP = StepCosts((10.0,) * 17, (0.1,) * 4)


def small_model(base: BaseModel) -> BaseModel:
    """Another model with the same tokens, whose guesses are often wrong."""
    return BaseModel(tiny_model("qwen2", num_hidden_layers=2, vocab_size=base.vocab_size, seed=5))


DRAFTERS: dict[str, Callable[[BaseModel], Drafter]] = {
    "prompt lookup": lambda base: PromptLookupDrafter(),
    "n-grams first": lambda base: NgramTreeDrafter(
        AcceleratorDrafter(shaken(base, "carry", draft_vocab_size=80)),
        PromptLookupDrafter(max_ngram=2),
        min_ngram=1,
    ),
    "n-grams first, else a model": lambda base: NgramTreeDrafter(
        ModelDrafter(small_model(base), base)
    ),
    "early exit": lambda base: EarlyExitDrafter(base, 2),
    "two models": lambda base: ModelDrafter(small_model(base), base),
    "two models, the same": lambda base: ModelDrafter(base, base),
}


@pytest.mark.parametrize("base", [BASE, WINDOWED], ids=["llama", "gemma3"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_output_is_the_plain_one(name: str, base: BaseModel) -> None:
    engine = Engine(base, drafter=DRAFTERS[name](base))
    options = GenerationOptions(max_new_tokens=NEW, ignore_eos=True)
    plain = [engine.generate(p, options, strategy="plain").token_ids for p in PROMPTS]
    for prompts in (PROMPTS[:1], PROMPTS):
        for drafts in (1, 4):
            results = engine.generate(prompts, options, num_draft_tokens=drafts)
            assert [r.token_ids for r in results] == plain[: len(prompts)]
            assert sum(r.speculation.num_draft_tokens for r in results) > 0


@pytest.mark.parametrize("base", [BASE, WINDOWED], ids=["llama", "gemma3"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_grown_output_is_the_plain_one(name: str, base: BaseModel) -> None:
    engine = Engine(base, drafter=DRAFTERS[name](base))
    engine.step_costs = lambda **_: CHEAP  # type: ignore[method-assign]
    options = GenerationOptions(max_new_tokens=NEW, ignore_eos=True)
    plain = [engine.generate(p, options, strategy="plain").token_ids for p in PROMPTS]
    results = engine.generate(PROMPTS, options)
    assert [r.token_ids for r in results] == plain
    assert sum(r.speculation.num_draft_tokens for r in results) > 0


@pytest.mark.parametrize("name", DRAFTERS)
def test_rows_that_leave_the_batch_early_change_nothing(name: str) -> None:
    """Each row ends at another step, the first ones first: what a drafter keeps must follow."""
    engine = Engine(BASE, drafter=DRAFTERS[name](BASE))
    plain = [engine.generate(p, max_new_tokens=NEW, strategy="plain") for p in PROMPTS]
    ends = sorted({r.token_ids[place] for r, place in zip(plain, (4, 9, 15), strict=True)})
    eos = BASE.model.generation_config.eos_token_id
    BASE.model.generation_config.eos_token_id = ends
    try:
        wanted = [engine.generate(p, max_new_tokens=NEW, strategy="plain") for p in PROMPTS]
        results = engine.generate(PROMPTS, max_new_tokens=NEW, num_draft_tokens=3)
    finally:
        BASE.model.generation_config.eos_token_id = eos
    assert len({r.new_tokens for r in wanted}) > 1
    assert [r.token_ids for r in results] == [r.token_ids for r in wanted]


def accepts_everything(results: Sequence[GenerationResult]) -> bool:
    counts = [r.speculation for r in results]
    assert all(c is not None and c.num_draft_tokens > 0 for c in counts)
    return all(c is not None and c.num_accepted_tokens == c.num_draft_tokens for c in counts)


@pytest.mark.parametrize(
    "drafter",
    [ModelDrafter(BASE, BASE), EarlyExitDrafter(BASE, NUM_LAYERS)],
    ids=["the same model", "all layers"],
)
def test_the_model_agrees_with_itself(drafter: Drafter) -> None:
    """Only if the drafter has read each row's text right, whatever was accepted before."""
    engine = Engine(BASE, drafter=drafter)
    for drafts in (1, 3, 5):
        results = engine.generate(
            PROMPTS, max_new_tokens=NEW, ignore_eos=True, num_draft_tokens=drafts
        )
        assert accepts_everything(results)
    engine.step_costs = lambda **_: CHEAP  # type: ignore[method-assign]
    grown = engine.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True)
    for result in grown:  # the likeliest draft is right in every tree; some are deeper than others
        assert result.speculation.per_position_acceptance_rate[0] == 1.0
        assert result.speculation.mean_acceptance_length > 2.5
    # Drawn from the same distribution, too, everything stays.
    sampled = engine.generate(
        PROMPTS, max_new_tokens=NEW, ignore_eos=True, num_draft_tokens=3, temperature=1.0, seed=1
    )
    rates = [r.speculation.acceptance_rate for r in sampled]
    assert min(rates) > 0.99


def test_a_model_catches_up_on_what_it_did_not_draft() -> None:
    """Steps without drafts, then drafts again, and rows that accept different numbers."""
    base, wrong = BASE, small_model(BASE)
    rows = [list(p) for p in PROMPTS]
    for model in (base, wrong):
        run = ModelDrafter(model, base).start(rows=3, max_len=40)
        for texts in (
            rows,
            [[*rows[0], 1], [*rows[1], 2, 3, 4], [*rows[2], 5, 6]],
            [[*rows[0], 1, *range(30, 39)], [*rows[1], 2, 3, 4], [*rows[2], 5, 6, 7]],
        ):
            assert torch.equal(drafted(run, texts, 4).tokens, greedy(model, texts, 4))
        run.keep([2, 0])
        texts = [[*texts[2], 8], [*texts[0], 9, 10]]
        assert torch.equal(drafted(run, texts, 4).tokens, greedy(model, texts, 4))
    single = drafted(ModelDrafter(wrong, base), texts, 4)  # without a generation around it
    assert torch.equal(single.tokens, greedy(wrong, texts, 4))


def test_a_model_drafts_nothing_beyond_its_context() -> None:
    short = BaseModel(tiny_model("llama", max_position_embeddings=16))
    engine = Engine(BASE, drafter=ModelDrafter(short, BASE))
    plain = engine.generate(PROMPTS[0], max_new_tokens=NEW, ignore_eos=True, strategy="plain")
    result = engine.generate(PROMPTS[0], max_new_tokens=NEW, ignore_eos=True, num_draft_tokens=4)
    assert result.token_ids == plain.token_ids
    assert 0 < result.speculation.num_draft_tokens <= 16


def greedy(model: BaseModel, texts: Sequence[list[int]], count: int) -> torch.Tensor:
    results = Engine(model).generate(list(texts), max_new_tokens=count, ignore_eos=True)
    return torch.tensor([r.token_ids for r in results])


def drafted(
    drafter: Drafter,
    texts: Sequence[list[int]],
    count: int,
    go_on: Callable[[int, float | None], bool] = lambda *_: True,
) -> Draft:
    """What a drafter that needs neither states nor the base's arena guesses."""
    arena = BASE.arena(rows=len(texts), max_len=1)
    with torch.inference_mode():
        return drafter.draft(
            DraftRequest(
                torch.tensor([t[-1] for t in texts]), [len(t) - 1 for t in texts], {}, arena,
                texts, count=count, sampler=GREEDY, go_on=go_on,
            )
        )  # fmt: skip


# ------------------------------------------------------------------ prompt lookup


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 9, 8, 7, 6, 1, 2, 3], [9, 8, 7, 6]),  # three tokens match
        ([4, 2, 3, 9, 8, 7, 6, 1, 2, 3], [9, 8, 7, 6]),  # two do
        ([4, 5, 3, 9, 8, 7, 6, 1, 2, 3], [9, 8, 7, 6]),  # one does
        ([3, 40, 5, 3, 41, 6, 3], [41, 6, 3, 41]),  # the last of equals, past the end of the text
        ([2, 3, 40, 5, 3, 41, 2, 3], [40, 5, 3, 41]),  # the longer one before the later one
        ([0, 1, 2, 3, 50, 9, 1, 2, 3, 51, 0, 1, 2, 3], [51, 0, 1, 2]),  # of four only three count
        ([1, 2, 1, 2, 1], [2, 1, 2, 1]),  # a period shorter than the draft
        ([7, 7], [7, 7, 7, 7]),
        ([1, 2, 3, 4], []),
        ([7], []),
    ],
)
def test_lookup_by_hand(text: list[int], expected: list[int]) -> None:
    assert PromptLookupDrafter().find(text, 4) == expected


def test_lookup_rows_differ_in_their_number_of_drafts() -> None:
    texts = [[1, 2, 9, 1, 2], [1, 2, 3, 4]]
    draft = drafted(PromptLookupDrafter(), texts, 3)
    assert draft.tokens.tolist() == [[9, 1, 2], [0, 0, 0]]
    assert (draft.lengths, draft.probs) == ([3, 0], None)
    assert drafted(PromptLookupDrafter(min_ngram=3), texts, 3).tokens.shape == (2, 0)
    assert drafted(PromptLookupDrafter(num_tokens=2), texts, 3).tokens.shape == (2, 2)
    asked: list[tuple[int, float | None]] = []
    short = drafted(
        PromptLookupDrafter(), texts, 3, lambda n, chance: bool(asked.append((n, chance)))
    )
    assert short.tokens.tolist() == [[9], [0]]
    assert asked == [(1, None)]


def test_a_lookup_without_a_match_is_no_draft() -> None:
    """Nothing found is not a rejected draft, and no sign that drafting does not pay."""
    engine = Engine(BASE, drafter=PromptLookupDrafter(min_ngram=40, max_ngram=40))
    result = engine.generate(PROMPTS[0], max_new_tokens=12, ignore_eos=True, num_draft_tokens=4)
    spec = result.speculation
    assert spec is not None
    assert (spec.num_drafts, spec.num_draft_tokens, spec.num_plain_steps) == (0, 0, 0)
    assert spec.note is None
    policy = DraftLength(StepCosts((1.0, 1.0, 1.0), (0.0,)), max_drafts=2, prior=[0.5])
    before = policy.acceptance()
    policy.update([Outcome(0, 0), Outcome(0, 0)])
    assert policy.acceptance() == before


def test_without_a_chance_of_its_own_a_draft_goes_by_what_was_accepted() -> None:
    policy = DraftLength(StepCosts((10.0, 10.5, 11.0, 11.5), (1.0,)), max_drafts=3, prior=[0.5])
    assert policy.price() * 1.5 == pytest.approx(0.2019, abs=1e-4)  # of one more draft
    assert policy.go_on(1, None)  # 0.5 x 0.5 is worth it
    assert not policy.go_on(2, None)  # 0.5 x 0.5 x 0.5 is not


# ------------------------------------------------------------------ n-grams first


class Recorder(Drafter):
    """Drafts token 60 with the chance that it is told, from the tokens 60 to 63; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def draft(self, request: DraftRequest) -> Draft:
        self.calls += 1
        size = (len(request.last), request.count)
        probs = torch.tensor([0.7, 0.1, 0.1, 0.1]).expand(*size, 4)
        tokens = torch.full(size, 60)
        return Draft(tokens, probs=probs, ids=torch.tensor([60, 61, 62, 63]))


def test_ngrams_first_asks_the_other_drafter_only_where_nothing_matches() -> None:
    other = Recorder()
    drafter = NgramTreeDrafter(other, PromptLookupDrafter(num_tokens=3), min_ngram=2)
    match, none = [1, 2, 9, 60, 1, 2], [1, 2, 3, 2]
    alone = drafted(drafter, [match], 2)
    assert (alone.tokens.tolist(), alone.lengths, other.calls) == ([[9, 60]], [2], 0)
    assert drafted(drafter, [none], 2).tokens.tolist() == [[60, 60]]
    both = drafted(drafter, [match, none], 4)
    assert other.calls == 2
    assert both.lengths == [3, 4]
    assert both.tokens.tolist() == [[9, 60, 1, 0], [60, 60, 60, 60]]
    # q of the looked-up tokens is a point mass, in columns that the other's vocabulary lacks too.
    assert both.ids is not None and both.probs is not None
    assert {1, 9, 60} < set(both.ids.tolist())
    assert len(both.ids.unique()) == len(both.ids)
    for place, token in enumerate([9, 60, 1]):
        assert both.ids[both.probs[0, place] == 1].tolist() == [token]
        assert both.probs[0, place].sum() == 1
    assert both.probs[1, 3, :4].tolist() == pytest.approx([0.7, 0.1, 0.1, 0.1])
    assert both.probs[1, :, 4:].sum() == 0


class Twig(Drafter):
    """A fixed small tree of a model's: 9 and 8 first, 60 after 9; counts its calls."""

    calls = 0

    def draft(self, request: DraftRequest) -> Draft:
        self.calls += 1
        return Draft.of_rows(
            [[9, 8, 60]] * len(request.last),
            [[-1, -1, 0]] * len(request.last),
            device=request.last.device,
            chances=[[0.5, 0.1, 0.4]] * len(request.last),
            steps=(1, 1),
        )


def grown(drafter: Drafter, texts: Sequence[list[int]], growth: DraftLength) -> Draft:
    return drafter.draft(
        DraftRequest(
            torch.tensor([t[-1] for t in texts]), [len(t) - 1 for t in texts], {},
            BASE.arena(rows=len(texts), max_len=1), texts, count=4, sampler=GREEDY,
            go_on=growth.go_on, width=4, growth=growth,
        )
    )  # fmt: skip


def test_lookups_are_a_branch_of_the_same_tree() -> None:
    growth = DraftLength(CHEAP, max_drafts=4, prior=[0.5], width=None)
    drafter = NgramTreeDrafter(Twig(), PromptLookupDrafter(max_ngram=5))
    joined = grown(drafter, [[1, 2, 9, 5, 60, 1, 2], [1, 2, 3, 4], [4, 4, 2, 8, 7, 4, 2]], growth)
    # Row 0 looks up 9 5 60 1 after a match of two, row 1 nothing, row 2 looks up 8 7 4 2.
    assert joined.lengths == [6, 3, 6]
    assert joined.tokens[0].tolist() == [9, 8, 60, 5, 60, 1]
    assert joined.parent_lists()[0] == [-1, -1, 0, 0, 3, 4]
    assert joined.tokens[2].tolist() == [9, 8, 60, 7, 4, 2]
    assert joined.parent_lists()[2] == [-1, -1, 0, 1, 3, 4]
    assert joined.steps == (1, 1) and joined.kinds is not None and joined.chances is not None
    assert joined.kinds[0] == [MODEL, MODEL, MODEL, TEXT, TEXT, TEXT]
    assert joined.kinds[2] == [MODEL, TEXT, MODEL, TEXT, TEXT, TEXT]  # the surer of the two
    assert joined.chances[0][:3] == [0.5, 0.1, 0.4] and joined.chances[2][1] == 0.35


def test_lookups_go_on_where_the_other_drafter_does_not_pay() -> None:
    dear = StepCosts((10.0,) * 17, (100.0,) * 4)
    growth = DraftLength(dear, max_drafts=4, prior=[0.5], width=None)
    other = Twig()
    found = grown(NgramTreeDrafter(other), [[1, 2, 9, 5, 60, 1, 2]], growth)
    assert (found.tokens.tolist(), found.steps, other.calls) == ([[9, 5, 60, 1]], (), 0)
    assert growth.keep(found).tokens.shape == (1, 4)


def test_the_other_drafter_rests_where_a_lookup_is_nearly_sure() -> None:
    # Alone a draft gains 0.5 tokens and costs a fifth of a step; 0.2 x 0.5 is less than that.
    costs = StepCosts((10.0,) * 17, (2.0,) * 4)
    growth = DraftLength(costs, max_drafts=1, prior=[0.5], width=None)
    other = Twig()
    drafter = NgramTreeDrafter(other)
    grown(drafter, [[1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5]], growth)
    assert other.calls == 0
    grown(drafter, [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 5]], growth)
    assert other.calls == 1


# ------------------------------------------------------------------ sampling

SAMPLED_VOCABULARY = 16
SAMPLES, BATCH = 12_000, 2_000
# The second prompt has no match at first, so a mixed batch holds both kinds of drafts.
SAMPLED_PROMPTS = [[3, 7, 3, 11, 3, 7], [1, 5, 9, 13, 2, 6]]


@pytest.mark.parametrize("name", ["prompt lookup", "n-grams first", "early exit", "two models"])
def test_sampled_output_has_the_target_distribution(name: str) -> None:
    base = BaseModel(tiny_model("llama", vocab_size=SAMPLED_VOCABULARY, seed=3))
    drafters = {
        **DRAFTERS,
        "n-grams first": lambda base: NgramTreeDrafter(
            AcceleratorDrafter(shaken(base, "carry", draft_vocab_size=12)),
            PromptLookupDrafter(max_ngram=2),
            min_ngram=1,
        ),
    }
    engine = Engine(base, drafter=drafters[name](base))
    counts = np.zeros((2, SAMPLED_VOCABULARY, SAMPLED_VOCABULARY))
    drafts = 0
    for seed in range(SAMPLES // BATCH):
        results = engine.generate(
            SAMPLED_PROMPTS * (BATCH // 2), max_new_tokens=3, ignore_eos=True, temperature=0.8,
            num_draft_tokens=2, seed=seed,
        )  # fmt: skip
        for i, result in enumerate(results):
            counts[i % 2, result.token_ids[1], result.token_ids[2]] += 1
            drafts += result.speculation.num_draft_tokens
    assert drafts > SAMPLES / 4
    for prompt, seen in zip(SAMPLED_PROMPTS, counts, strict=True):
        expected = exact(base, prompt, 0.8) * seen.sum()
        rare = expected < 10
        observed = np.append(seen[~rare], seen[rare].sum())
        assert chisquare(observed, np.append(expected[~rare], expected[rare].sum())).pvalue > 0.005


def exact(base: BaseModel, prompt: list[int], temperature: float) -> np.ndarray:
    """Probability of every pair (second, third new token), by enumeration."""
    tokens = range(SAMPLED_VOCABULARY)

    def step(contexts: list[list[int]]) -> torch.Tensor:
        with torch.inference_mode():
            logits = base.model(torch.tensor(contexts)).logits[:, -1].double()
            return (logits / temperature).softmax(-1)

    second = step([[*prompt, a] for a in tokens])
    third = step([[*prompt, a, b] for a, b in product(tokens, tokens)])
    joint = (step([prompt])[0][:, None] * second)[..., None] * third.view(16, 16, 16)
    return joint.sum(0).numpy()


# ------------------------------------------------------------------ users' mistakes and the engine


def test_mistakes() -> None:
    other = BaseModel(tiny_model("llama", vocab_size=50))
    with pytest.raises(
        MultirateError, match=f"vocabulary of 50, the base model one of {VOCABULARY}"
    ):
        ModelDrafter(other, BASE)
    for layers in (0, NUM_LAYERS + 1):
        with pytest.raises(MultirateError, match=f"num_layers={layers} is not allowed"):
            EarlyExitDrafter(BASE, layers)
    with pytest.raises(MultirateError, match="min_ngram=4 and max_ngram=3"):
        PromptLookupDrafter(min_ngram=4)
    with pytest.raises(MultirateError, match="num_tokens=0"):
        PromptLookupDrafter(num_tokens=0)


@pytest.mark.parametrize("name", DRAFTERS)
def test_costs_are_measured_for_each_drafter(name: str) -> None:
    engine = Engine(BASE, drafter=DRAFTERS[name](BASE))
    costs = engine.step_costs(rows=2, context=20, max_drafts=2)
    assert len(costs.draft) == engine.drafter.max_beam and min(costs.draft) > 0
    # All of the machinery, draft length by measured costs included.
    plain = engine.generate(PROMPTS[2], max_new_tokens=NEW, ignore_eos=True, strategy="plain")
    result = engine.generate(PROMPTS[2], max_new_tokens=NEW, ignore_eos=True)
    assert (result.token_ids, result.strategy) == (plain.token_ids, "speculative")


def test_an_engines_own_drafter_goes_before_the_accelerators() -> None:
    accelerator, lookup = shaken(BASE, "carry"), PromptLookupDrafter()
    engine = Engine(BASE, accelerator=accelerator, drafter=lookup)
    assert engine.drafter is lookup
    own = Engine(BASE, accelerator=accelerator).drafter
    assert isinstance(own, NgramTreeDrafter) and isinstance(own.other, AcceleratorDrafter)
    assert own.min_ngram is None  # where no tree is grown, the stream drafts alone


def test_a_benchmark_runs_each_with_one_name() -> None:
    engine = Engine(BASE, accelerator=shaken(BASE, "carry"))
    methods = ("multirate", "multirate-stream", "prompt-lookup", "first-k")
    settings = SpeculativeOptions(("plain", *methods), max_new_tokens=NEW, num_draft_tokens=2)
    plain = METHODS["plain"].make(engine, settings).run([PROMPTS[0]], NEW)[0]
    for name in methods:
        output = METHODS[name].make(engine, settings).run([PROMPTS[0]], NEW)[0]
        assert output.token_ids == plain.token_ids
        assert output.speculation is not None and output.speculation.num_draft_tokens > 0
    assert METHODS["multirate-stream"].needs_accelerator
    assert not METHODS["prompt-lookup"].needs_accelerator
