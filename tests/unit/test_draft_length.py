"""Drafting against a clock: real cycles decide, and drafting that does not pay costs little."""

from __future__ import annotations

import pytest
import torch
from test_stream_steps import shaken
from tiny_models import tiny_model

from multirate.config.generation import GenerationOptions
from multirate.decode.costs import StepCosts
from multirate.decode.draft_length import DraftLength
from multirate.decode.drafter import MODEL, TEXT, Draft
from multirate.decode.engine import Engine
from multirate.decode.outcomes import PLAIN_KEPT, Outcome, Pace
from multirate.models.base import BaseModel

# By these a draft and its verified row add 0.2 to a plain step of 1 s.
COSTS = StepCosts(verify=(1.0, 1.1, 1.2), draft=(0.1,))


class Machine:
    """Plain cycles take `plain` seconds, drafted ones `drafted`; every n-th draft is accepted.

    Args:
        costs: what the policy believes.
        accepts: one draft in so many is right.
    """

    def __init__(
        self, costs: StepCosts = COSTS, *, plain: float, drafted: float, accepts: int
    ) -> None:
        self.now, self.tokens, self.drafts = 0.0, 0, 0
        self.plain, self.drafted, self.accepts = plain, drafted, accepts
        self.policy = DraftLength(costs, max_drafts=1, prior=[0.5], clock=lambda: self.now)

    def cycle(self, held_up: float = 1.0) -> bool:
        self.policy.begin(1)
        drafts = self.policy.pays()
        self.drafts += drafts
        right = drafts and self.drafts % self.accepts == 0
        self.now += (self.drafted if drafts else self.plain) * held_up
        self.tokens += 1 + right
        self.policy.update([Outcome(int(drafts), int(right), int(drafts))])
        return drafts

    def run(self, cycles: int) -> float:
        """Speed-up over plain decoding in these cycles."""
        now, tokens = self.now, self.tokens
        for _ in range(cycles):
            self.cycle()
        return (self.tokens - tokens) * self.plain / (self.now - now)


def test_cycles_that_take_longer_than_their_steps_stop_drafting() -> None:
    """Half of the drafts are right, which pays by the step costs, but not by the clock."""
    machine = Machine(plain=1.0, drafted=1.7, accepts=2)
    assert machine.policy.pays()
    machine.run(60)
    assert machine.run(1000) > 0.98
    assert not machine.policy.pays()
    assert Machine(plain=1.0, drafted=1.7, accepts=1).run(1000) > 1.1  # all are right: 2 / 1.7


def test_drafting_that_never_pays_costs_little_from_the_first_cycle() -> None:
    assert Machine(plain=1.0, drafted=1.4, accepts=10**9).run(500) > 0.97


def test_where_drafting_pays_few_cycles_are_plain() -> None:
    machine = Machine(plain=1.0, drafted=1.2, accepts=1)
    machine.run(100)
    assert machine.run(1000) > 0.98 * 2 / 1.2


def test_steps_measured_on_a_busy_machine_decide_the_same() -> None:
    """All costs are three times too high; only their ratio counts."""
    busy = StepCosts(tuple(3 * x for x in COSTS.verify), tuple(3 * x for x in COSTS.draft))
    decisions = []
    for costs in (COSTS, busy):
        machine = Machine(costs, plain=1.0, drafted=1.2, accepts=2)
        decisions.append([machine.cycle() for _ in range(300)])
    assert decisions[0] == decisions[1]


def test_drafting_is_taken_up_again_when_the_text_changes() -> None:
    machine = Machine(plain=1.0, drafted=1.3, accepts=10**9)
    machine.run(300)
    machine.accepts = 1
    machine.run(300)
    assert machine.run(300) > 1.4


def test_drafting_that_costs_hundreds_of_steps_is_not_tried_every_few() -> None:
    costs = StepCosts((1.0, 1.0, 1.0), (100.0,))
    machine = Machine(costs, plain=1.0, drafted=101.0, accepts=1)
    assert not any(machine.cycle() for _ in range(5000))
    assert machine.cycle()


def test_a_cycle_that_was_held_up_counts_for_little() -> None:
    machine = Machine(plain=1.0, drafted=1.2, accepts=2)
    machine.run(100)
    before = machine.policy.gain()[0]
    machine.cycle(held_up=1000.0)
    assert machine.policy.gain()[0] < 1.2 * before


def test_cycles_of_lookups_alone_do_not_make_a_model_dear() -> None:
    """By the step costs they add next to nothing, by the clock what the loop does around them."""
    costs = StepCosts((1.0, 1.001, 1.002), (0.1,))
    machine = Machine(costs, plain=1.0, drafted=1.2, accepts=2)
    machine.run(100)
    before = machine.policy.gain()
    found = Draft(torch.tensor([[7]]), chances=[[0.5]], kinds=[[TEXT]], steps=())
    for _ in range(500):
        machine.policy.begin(1)
        machine.now += 1.1
        machine.policy.update([Outcome(drafted=1, accepted=0, entries=1)], found, [[]])
    assert machine.policy.gain() == before


def test_other_numbers_of_rows_have_a_pace_of_their_own() -> None:
    machine = Machine(plain=1.0, drafted=1.2, accepts=1)
    machine.run(100)
    machine.policy.begin(2)
    assert machine.policy.idle  # nothing is known of two rows: a plain cycle first
    machine.policy.update([Outcome(0, 0)] * 2)
    machine.policy.begin(1)
    assert not machine.policy.idle


def test_plain_cycles_are_wanted_soon_at_first_and_seldom_later() -> None:
    pace, wanted = Pace(), []
    for cycle in range(300):
        if pace.wants_plain:
            wanted.append(cycle)
        pace.learn(1.0, 0.0 if pace.wants_plain else 0.2)
    assert wanted[:4] == [0, 9, 26, 59]
    assert len(wanted) < 9 and len(pace.plain) == PLAIN_KEPT


def test_what_is_learned_of_cycles_is_kept_unless_a_seed_fixes_the_output() -> None:
    base = BaseModel(tiny_model("llama"))
    engine = Engine(base, accelerator=shaken(base, "carry"))
    engine.step_costs = lambda **_: StepCosts((1.0,) * 17, (0.1,))  # type: ignore[method-assign]
    prompts = [[5, 6, 7]]
    greedy = GenerationOptions()
    seeded = GenerationOptions(temperature=1.0, seed=3)
    assert engine.draft_length(prompts, greedy) is engine.draft_length(prompts, greedy)
    first, second = (engine.draft_length(prompts, seeded) for _ in range(2))
    assert first is not second and first.clock is None is second.clock
    texts = [engine.generate(p, seeded, max_new_tokens=24).token_ids for p in prompts * 3]
    assert texts[0] == texts[1] == texts[2]


def test_rows_of_lookups_are_not_charged_to_the_model() -> None:
    """They are verified whether a model drafts beside them or not."""
    costs = StepCosts(verify=tuple(1.0 + 0.1 * n for n in range(17)), draft=(0.2,))
    length = DraftLength(costs, max_drafts=4, prior=(0.5,), width=None)
    tokens = torch.arange(9)[None]
    draft = Draft(
        tokens,
        torch.tensor([[-1, -1, *range(1, 8)]]),
        chances=[[0.5] * 9],
        kinds=[[MODEL] + [TEXT] * 8],
        steps=(1,),
    )
    for _ in range(500):
        length.begin(1)
        length.update([Outcome(drafted=1, accepted=1, entries=9)], draft, [[1]])
    assert length.gain() == pytest.approx((0.3, 1.0), rel=1e-3)
    assert length.pays()


def test_the_first_draft_of_a_cycle_has_a_price_of_its_own() -> None:
    """A chain of three pays where each step but the first is cheap."""

    def drafts(costs: StepCosts) -> list[bool]:
        length = DraftLength(costs, max_drafts=3, prior=(0.6,) * 3)
        length.begin(1)
        return [length.go_on(i, None) for i in range(3)]

    verify = (1.0, 1.0, 1.0, 1.0)
    assert drafts(StepCosts(verify, draft=(0.2,), start=0.25)) == [True, True, False]
    assert drafts(StepCosts(verify, draft=(0.45,))) == [True, False, False]
