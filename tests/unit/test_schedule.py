"""Rate schedules: the paper's worked example, and what must hold for any model and gates."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multirate.config.accelerator import AcceleratorConfig, preset_config
from multirate.config.errors import MultirateError
from multirate.config.schedule import RateSchedule


def test_worked_example() -> None:
    """N = 32, gates 0, 8, 16, 24 of arXiv 2502.02040."""
    schedule = RateSchedule(32, (0, 8, 16, 24))
    assert [schedule.rate(j) for j in range(3)] == [4, 3, 2]
    targets = {2: 8, 8: 32, 10: 14, 16: 32, 20: 24, 24: 32}
    assert {i: schedule.target_layer(i) for i in targets} == targets
    # p restarts as h_8 and h_16: what comes after those gates aims from there.
    assert [schedule.target_layer(i) for i in (9, 17)] == [11, 18]
    assert [schedule.target_layer(i) for i in range(1, 25)] == [
        *range(4, 33, 4), *range(11, 33, 3), *range(18, 33, 2)
    ]  # fmt: skip


def test_speculation_uses_rate_n_over_k() -> None:
    schedule = RateSchedule(30, (0, 4))
    assert schedule.rate(0) == 7.5
    assert [schedule.target_layer(i) for i in range(1, 5)] == [8, 15, 23, 30]


@st.composite
def schedules(draw: st.DrawFn) -> RateSchedule:
    n = draw(st.integers(1, 80))
    gates = draw(st.sets(st.integers(0, n), min_size=2, max_size=6))
    return RateSchedule(n, tuple(sorted(gates)))


@given(schedules())
def test_targets_rise_to_the_final_state_at_every_gate(schedule: RateSchedule) -> None:
    for j in range(schedule.num_intervals):
        start, stop = schedule.gates[j], schedule.gates[j + 1]
        targets = [schedule.target_layer(i) for i in range(start + 1, stop + 1)]
        assert targets == sorted(targets)
        assert targets[-1] == schedule.num_layers
        # No accelerated layer lags behind the slow one beside it.
        assert all(t >= i for i, t in enumerate(targets, start + 1))
        assert all(schedule.interval(i) == j for i in range(start + 1, stop + 1))


@given(schedules())
def test_targets_are_equation_5_rounded_half_up(schedule: RateSchedule) -> None:
    """(i - E_j) R_j + E_j in exact arithmetic, for the last gate strictly before i."""
    n = schedule.num_layers
    for i in range(schedule.gates[0] + 1, schedule.gates[-1] + 1):
        j = max(j for j, gate in enumerate(schedule.gates) if gate < i)
        start, stop = schedule.gates[j], schedule.gates[j + 1]
        rate = Fraction(n - start, stop - start)
        assert schedule.rate(j) == pytest.approx(float(rate))
        exact = (i - start) * rate + start
        assert schedule.target_layer(i) == min(n, floor(exact + Fraction(1, 2)))


def test_halves_round_up_where_the_rate_has_no_exact_float() -> None:
    assert RateSchedule(34, (0, 28)).target_layer(21) == 26  # 25.5


@given(schedules())
def test_intervals_do_not_know_each_other(schedule: RateSchedule) -> None:
    for start, stop in pairwise(schedule.gates):
        alone = RateSchedule(schedule.num_layers, (start, stop))
        for i in range(start + 1, stop + 1):
            assert schedule.target_layer(i) == alone.target_layer(i)


@pytest.mark.parametrize(
    ("gates", "words"),
    [
        ((0,), "at least two gates"),
        ((4, 4), "strictly increasing"),
        ((0, 31), "from 0 to 30"),
        ((-1, 4), "from 0 to 30"),
    ],
)
def test_bad_gates(gates: tuple[int, ...], words: str) -> None:
    with pytest.raises(MultirateError, match=words):
        RateSchedule(30, gates)


@pytest.mark.parametrize("i", [0, 5])
def test_positions_outside_the_schedule(i: int) -> None:
    with pytest.raises(MultirateError, match="allowed: 1 to 4"):
        RateSchedule(30, (0, 4)).target_layer(i)


SHAPE = {"num_layers": 30, "hidden_size": 576, "vocab_size": 49152}


def test_presets() -> None:
    paper = preset_config("paper", **SHAPE, num_attention_heads=32)
    assert (paper.entry, paper.layer_kind, paper.gates) == ("gate", "lean", (0, 4))
    assert (paper.rank, paper.num_heads, paper.schedule.rate(0)) == (8, 8, 7.5)
    carry = preset_config("carry", **SHAPE, num_attention_heads=9)
    assert (carry.entry, carry.layer_kind, carry.gates) == ("carry", "tied", (26, 30))
    assert [carry.source_layer(i) for i in carry.schedule.layers] == [26, 27, 28, 29]
    assert carry.carry_layers == (10, 20, 26, 30)
    smaller = preset_config("carry", **SHAPE | {"num_layers": 18}, num_attention_heads=4)
    assert smaller.gates == (16, 18)


@given(n=st.integers(1, 60), heads=st.integers(1, 64), preset=st.sampled_from(["carry", "paper"]))
def test_presets_fit_any_model(n: int, heads: int, preset: str) -> None:
    config = preset_config(
        preset, num_layers=n, hidden_size=64, vocab_size=100, num_attention_heads=heads
    )
    assert config.schedule.target_layer(config.gates[1]) == n


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"entry": "jump"}, "entry='jump'.*gate, carry"),
        ({"layer_kind": "thick"}, "layer_kind='thick'.*lean, tied"),
        ({"rank": 0}, "rank=0.*at least 1"),
        ({"rank": True}, "rank=True"),
        ({"carry_layers": ()}, "at least one slow state"),
        ({"carry_layers": (31,)}, "from 0 to 30"),
        ({"gates": (0, 10, 20)}, "Use two gates"),
        ({"draft_vocab_size": 50_000}, "from 1 to 49152"),
        ({"attended_tokens": 0}, "attended_tokens=0"),
        ({"layer_kind": "lean", "num_heads": 0}, "num_heads=0"),
        ({"colour": 1}, "Unknown accelerator settings \\['colour'\\]"),
    ],
)
def test_bad_configs(changes: dict[str, object], words: str) -> None:
    with pytest.raises(MultirateError, match=words):
        preset_config("carry", **SHAPE, num_attention_heads=9, **changes)


def test_unknown_preset() -> None:
    with pytest.raises(MultirateError, match=r"preset='fast' is not known. Allowed: carry, paper"):
        preset_config("fast", **SHAPE, num_attention_heads=9)


def test_config_round_trip_and_newer_keys() -> None:
    config = preset_config("carry", **SHAPE, num_attention_heads=9)
    assert AcceleratorConfig.from_dict(config.to_dict()) == config
    with pytest.warns(UserWarning, match="from_the_future"):
        read = AcceleratorConfig.from_dict({**config.to_dict(), "from_the_future": 1})
    assert read == config
    with pytest.raises(MultirateError, match=r"lacks \['gates'\]"):
        AcceleratorConfig.from_dict(dict(SHAPE))
