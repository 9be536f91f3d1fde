"""The generation loop: speculative output is plain output, whatever is drafted and whenever it ends."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_stream_steps import shaken
from tiny_models import MAX_POSITIONS, TINY_MODELS, VOCABULARY, tiny_model

from multirate.config.errors import MultirateError
from multirate.config.generation import GenerationOptions
from multirate.decode import loop
from multirate.decode.costs import StepCosts, measure_costs
from multirate.decode.draft_length import DraftLength
from multirate.decode.drafter import Draft, Drafter, DraftRequest
from multirate.decode.engine import Engine
from multirate.decode.outcomes import Outcome
from multirate.decode.sampling import Sampler
from multirate.decode.stream import AcceleratorDrafter
from multirate.models.base import BaseModel

PROMPTS = [[5, 9, 11, 7], [8, 3], [20, 21, 22, 23, 24, 25, 26, 27, 28], [60]]


def engine_for(model: str, preset: str = "carry", **overrides: object) -> Engine:
    base = BaseModel(tiny_model(model))
    return Engine(base, accelerator=shaken(base, preset, **overrides))


@pytest.mark.parametrize("preset", ["carry", "paper"])
@pytest.mark.parametrize("model", [m for m in TINY_MODELS if "-" not in m or "windowed" in m])
def test_greedy_is_lossless_in_batches(model: str, preset: str) -> None:
    """Past the sliding window, rows of different lengths that accept different numbers of drafts."""
    engine = engine_for(model, preset)
    options = GenerationOptions(max_new_tokens=24, ignore_eos=True)
    plain = [engine.generate(p, options, strategy="plain") for p in PROMPTS]
    for drafts in (1, 3):
        speculative = engine.generate(PROMPTS, options, num_draft_tokens=drafts)
        assert [r.token_ids for r in speculative] == [r.token_ids for r in plain]
    reference = engine.base.model.generate(
        torch.tensor([PROMPTS[2]]), max_new_tokens=24, min_new_tokens=24, do_sample=False
    )
    assert plain[2].token_ids != []
    # `min_new_tokens` bans the end token, which ignore_eos does not: compare up to the first one.
    ids = reference[0, len(PROMPTS[2]) :].tolist()
    end = next((i for i, t in enumerate(plain[2].token_ids) if t == 2), len(ids))
    assert plain[2].token_ids[:end] == ids[:end]


class Oracle(Drafter):
    """Drafts what plain decoding writes, except where `wrong` says; acceptance is then known."""

    def __init__(self, outputs: dict[tuple[int, ...], list[int]], wrong: set[int]) -> None:
        self.outputs, self.wrong = outputs, wrong

    def draft(self, request: DraftRequest) -> Draft:
        count, rows = request.count, []
        for length in request.lengths:
            (prompt, output) = next(iter(self.outputs.items()))
            done = length + 1 - len(prompt)  # tokens written so far, the last one included
            ahead = [*output[done : done + count], *[0] * count][:count]
            rows.append([(t + 1) % VOCABULARY if done + i in self.wrong else t
                         for i, t in enumerate(ahead)])  # fmt: skip
        return Draft(torch.tensor(rows))


@settings(deadline=None, max_examples=40)
@given(
    wrong=st.sets(st.integers(1, 19)),
    drafts=st.integers(1, 8),
    limit=st.integers(1, 20),
    stop_at=st.integers(0, 19),
)
def test_any_acceptance_pattern_gives_the_plain_output(
    wrong: set[int], drafts: int, limit: int, stop_at: int
) -> None:
    engine = ORACLE_ENGINE
    prompt = PROMPTS[0]
    options = GenerationOptions(max_new_tokens=20, ignore_eos=True, strategy="plain")
    full = engine.generate(prompt, options).token_ids
    end_token = full[stop_at]  # ends the output where this token first appears
    engine.base.model.generation_config.eos_token_id = end_token
    plain = engine.generate(prompt, max_new_tokens=limit, strategy="plain")
    engine.drafter = Oracle({tuple(prompt): full}, wrong)
    drafted = engine.generate(
        prompt, max_new_tokens=limit, strategy="speculative", num_draft_tokens=drafts
    )
    assert drafted.token_ids == plain.token_ids
    assert drafted.finish_reason == plain.finish_reason
    assert len(drafted.token_ids) <= limit
    spec = drafted.speculation
    assert spec is not None
    # Every token comes from the prefill, an accepted draft, or a pass's own token; a cut drops some.
    passes = spec.num_drafts + spec.num_plain_steps
    # A last pass with room for one token only holds no draft, and is not counted.
    assert drafted.new_tokens <= 1 + passes + spec.num_accepted_tokens + 1
    assert spec.num_plain_steps == 0
    assert spec.note is None
    if not wrong and drafted.finish_reason == "length":
        assert spec.num_accepted_tokens == spec.num_draft_tokens


ORACLE_ENGINE = engine_for("llama")


def test_counts_follow_the_definitions() -> None:
    engine = engine_for("llama")
    prompt = PROMPTS[0]
    full = engine.generate(prompt, max_new_tokens=21, ignore_eos=True, strategy="plain").token_ids
    # Passes draft tokens 1-4 (third wrong), 4-7 (all right), 9-12 (first wrong), 10-13 (all right)...
    engine.drafter = Oracle({tuple(prompt): full}, {3, 9})
    result = engine.generate(prompt, max_new_tokens=14, ignore_eos=True, num_draft_tokens=4)
    spec = result.speculation
    assert spec is not None
    assert result.token_ids == full[:14]
    # 1 | 1 2 +3 | 4 5 6 7 +8 | +9 | 10 11 12 +13: the last pass has room for three drafts only.
    assert spec.num_drafts == 4
    assert spec.num_draft_tokens == 4 + 4 + 4 + 3
    assert spec.num_accepted_tokens == 2 + 4 + 0 + 3
    assert spec.mean_acceptance_length == pytest.approx(1 + 9 / 4)
    assert spec.acceptance_rate == pytest.approx(9 / 15)
    assert spec.per_position_acceptance_rate == pytest.approx([3 / 4, 3 / 4, 2 / 4, 1 / 4])


def test_prefill_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for("gemma3_text")
    options = GenerationOptions(max_new_tokens=8, ignore_eos=True, num_draft_tokens=2)
    whole = engine.generate(PROMPTS, options)
    monkeypatch.setattr(loop, "PREFILL_CHUNK", 3)
    chunked = engine.generate(PROMPTS, options)
    assert [r.token_ids for r in chunked] == [r.token_ids for r in whole]
    assert [r.speculation for r in chunked] == [r.speculation for r in whole]


def test_context_limit() -> None:
    engine = engine_for("llama")
    prompt = [3 + i % 90 for i in range(MAX_POSITIONS - 5)]
    for strategy in ("plain", "speculative"):
        result = engine.generate(
            prompt, max_new_tokens=50, ignore_eos=True, strategy=strategy, num_draft_tokens=3
        )
        assert (result.new_tokens, result.finish_reason) == (5, "context")
    with pytest.raises(MultirateError, match=f"{MAX_POSITIONS} tokens, but the model's context"):
        engine.generate([5] * MAX_POSITIONS)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "No prompt"),
        ([[]], "prompt is empty"),
        (torch.tensor([], dtype=torch.long), "prompt is empty"),
        ([VOCABULARY], f"Token id {VOCABULARY} is not in the model's vocabulary"),
        ([-1], "Token id -1"),
        ("text", "no tokenizer"),
    ],
)
def test_bad_prompts(prompt: object, words: str) -> None:
    with pytest.raises(MultirateError, match=words):
        engine_for("llama").generate(prompt)


def test_settings_are_checked() -> None:
    engine = engine_for("llama")
    with pytest.raises(MultirateError, match=r"Unknown settings \['max_tokens'\]"):
        engine.generate([5], max_tokens=3)
    plain_only = Engine(engine.base)
    with pytest.raises(MultirateError, match="needs an accelerator"):
        plain_only.generate([5], strategy="speculative")
    assert plain_only.generate([5], max_new_tokens=2).strategy == "plain"


def test_plain_is_bit_identical_with_an_accelerator_loaded() -> None:
    base = BaseModel(tiny_model("qwen3"))
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.inference_mode():
        before = base.model(ids).logits
        engine = Engine(base, accelerator=shaken(base, "carry"))
        engine.generate([5, 6, 7], max_new_tokens=8, num_draft_tokens=3)
        assert torch.equal(base.model(ids).logits, before)


# ------------------------------------------------------------------ draft length


def test_drafting_pays_where_its_tokens_are_worth_its_time() -> None:
    costs = StepCosts(verify=(10.0, 10.5, 11.0, 11.5, 12.0), draft=(1.0,))
    # a = 0.3: 1.3 tokens in 11.5 s, .1130 a second, 1.39 in 13, .1069: a chain of one is best.
    policy = DraftLength(costs, max_drafts=4, prior=[0.3])
    assert policy.gain() == (pytest.approx(1.5), pytest.approx(0.3))
    assert policy.price() == pytest.approx(1.3 / 11.5)
    # Beside a guess that is right half the time 0.15 tokens are left: as much as 1.5 s yield anyway.
    assert policy.pays() and policy.pays(0.51) and not policy.pays(0.49)
    # a = 0.1: 1.1 / 11.5 < 1 / 10: nothing pays.
    assert not DraftLength(costs, max_drafts=4, prior=[0.1]).pays()
    assert DraftLength(costs, max_drafts=4, prior=[0.1]).price() == pytest.approx(0.1)
    assert DraftLength(None, max_drafts=4, fixed=3).pays()


def test_drafting_stops_where_it_does_not_pay_and_is_tried_again() -> None:
    costs = StepCosts(verify=(10.0, 10.5, 11.0), draft=(1.0,))
    policy = DraftLength(costs, max_drafts=2, prior=[0.4])
    chosen = []
    for _ in range(200):
        policy.begin(1)
        chosen.append(policy.pays())
        policy.update([Outcome(2 * chosen[-1], 0)])  # nothing is ever accepted
    assert chosen[0]
    first_stop = chosen.index(False)
    assert first_stop < 25
    later = chosen[first_stop:]
    assert 0 < sum(later) < 0.03 * len(later)


def test_a_chain_goes_on_while_its_expected_gain_is_worth_its_cost() -> None:
    costs = StepCosts(verify=(10.0, 10.5, 11.0, 11.5, 12.0), draft=(1.0,))
    policy = DraftLength(costs, max_drafts=4, prior=[0.5])
    # k = 2: 1.75 / 13 = .1346 is the best; one more draft adds 1.5 s, worth .202 tokens.
    assert policy.price() == pytest.approx(1.75 / 13)
    for drafted in (1, 2, 3):
        assert policy.go_on(drafted, chance=0.41)  # 0.41 x 0.5 = .205
        assert not policy.go_on(drafted, chance=0.40)
    assert DraftLength(None, max_drafts=4, fixed=3).go_on(1, chance=0.0)


def test_the_width_of_what_is_drawn_at_random() -> None:
    """A runner-up is worth its row: 0.2 x 0.5, 0.1 x 0.5, ... tokens at 0.1 tokens a second."""

    def width(row: float, **limits: int) -> int:
        costs = StepCosts(tuple(10 + row * n for n in range(17)), (1.0,))
        return DraftLength(costs, max_drafts=4, prior=[0.5], width=None, drawn=True, **limits).width

    assert [width(1.01), width(0.99), width(0.49), width(0.34)] == [1, 2, 3, 4]
    assert width(0.1, max_width=2) == 2


def test_a_draft_ends_when_the_drafter_is_not_sure() -> None:
    """The stream is asked after each draft, and its confidence is a probability."""
    engine = engine_for("llama")
    asked: list[tuple[int, float]] = []

    def go_on(drafted: int, chance: float | None) -> bool:
        assert chance is not None
        asked.append((drafted, chance))
        return drafted < 2

    base, drafter = engine.base, engine.drafter
    assert drafter is not None
    with torch.inference_mode():
        arena = base.arena(rows=2, max_len=12)
        _, states = loop.prefill(base, [[5, 6, 7], [8, 9]], arena, drafter.carry_layers)
        draft = drafter.draft(
            DraftRequest(
                torch.tensor([3, 4]), [3, 2], states, arena, [[5, 6, 7, 3], [8, 9, 4]],
                count=5, sampler=Sampler(GenerationOptions(), device="cpu"), go_on=go_on,
            )
        )  # fmt: skip
    assert draft.tokens.shape == (2, 2)
    assert [n for n, _ in asked] == [1, 2]
    assert 1 > asked[0][1] > asked[1][1] > 0


def test_draft_length_learns_each_position() -> None:
    policy = DraftLength(StepCosts((1.0, 1.0, 1.0), (0.1,)), max_drafts=2, prior=[0.5, 0.5])
    for _ in range(300):
        policy.update([Outcome(2, 1), Outcome(2, 1)])  # the first always passes, the second never
    first, second = policy.acceptance()
    assert first > 0.95
    assert second < 0.06


def test_an_expensive_drafter_is_switched_off_and_says_so() -> None:
    base = BaseModel(tiny_model("llama"))
    engine = Engine(base, drafter=AcceleratorDrafter(shaken(base, "carry")))
    engine._costs[(1, 256, 16, True)] = StepCosts(verify=(1.0,) * 17, draft=(100.0,))
    result = engine.generate([5, 6, 7], max_new_tokens=12, ignore_eos=True)
    assert result.speculation is not None
    assert (result.speculation.num_drafts, result.speculation.num_plain_steps) == (0, 11)
    assert "Nothing was drafted in 11 steps" in str(result.speculation.note)
    assert result.speculation.mean_acceptance_length == 1.0


def test_measured_costs_are_medians_of_interleaved_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    clock = 0.0

    def work(job: object, seconds: float) -> None:
        nonlocal clock
        calls.append(job)
        clock += seconds

    monkeypatch.setattr("multirate.decode.costs.time.perf_counter", lambda: clock)
    costs = measure_costs(
        lambda n: work(n, 10 + n),
        lambda beam: work(f"draft {beam}", 5 if beam == 0 else 7 + beam),
        max_drafts=4,
        max_beam=4,
        synchronize=lambda: None,
        repeats=2,
    )
    # Every cycle's drafts come behind a pass.
    assert calls == [1, 2, 4, 5, "draft 0", 1, "draft 1", 1, "draft 2", 1, "draft 4"] * 3
    assert costs.verify == pytest.approx((11, 12, 13, 14, 15))
    assert costs.draft == pytest.approx((3, 4, 5, 6))  # what a second step adds to the first
    assert costs.start == pytest.approx(5 - 3)
    assert costs.extra([], 0) == 0
    assert costs.extra([1], 0) == pytest.approx(5)
    assert costs.extra([1, 3], 4) == pytest.approx(5 + 5 + 15 - 11)


def test_costs_never_fall_with_more_rows_and_noise_is_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, seconds = 0.0, {1: 10.0, 2: 18.0, 4: 12.0, 6: 15.0, 7: 16.0}

    def verify(n: int) -> None:
        nonlocal clock
        clock += seconds[n]

    monkeypatch.setattr("multirate.decode.costs.time.perf_counter", lambda: clock)
    costs = measure_costs(
        verify, lambda beam: None, max_drafts=6, synchronize=lambda: None, repeats=1
    )
    # 18, 12 and 15 for 2, 4 and 6 rows are taken for three measurements of the same.
    assert costs.verify == pytest.approx((10, 15, 15, 15, 15, 15, 16))


def test_longrope_context_ends_where_its_frequencies_change() -> None:
    factors = [1.0 + 0.1 * i for i in range(4)]
    model = tiny_model(
        "phi3",
        original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1000.0,
            "short_factor": factors,
            "long_factor": [3 * f for f in factors],
            "original_max_position_embeddings": 16,
        },
    )
    base = BaseModel(model)
    assert base.context_length == 16
    engine = Engine(base, accelerator=shaken(base, "carry"))
    plain = engine.generate([5, 6, 7], max_new_tokens=40, ignore_eos=True, strategy="plain")
    drafted = engine.generate([5, 6, 7], max_new_tokens=40, ignore_eos=True, num_draft_tokens=4)
    assert (plain.new_tokens, plain.finish_reason) == (13, "context")
    assert drafted.token_ids == plain.token_ids
