"""GenerationOptions: what is allowed, and what a mistake's message says."""

import dataclasses
import warnings
from typing import Any

import pytest

from multirate.config.errors import MultirateError
from multirate.config.generation import STRATEGIES, GenerationOptions

NAN, INF = float("nan"), float("inf")


def test_defaults_are_greedy() -> None:
    options = GenerationOptions()
    assert options.greedy
    assert options.strategy == "auto"
    assert options.num_draft_tokens is None


def test_temperature_above_zero_samples() -> None:
    assert not GenerationOptions(temperature=0.7).greedy


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("max_new_tokens", 0, "at least 1"),
        ("max_new_tokens", -3, "at least 1"),
        ("max_new_tokens", 1.5, "integer"),
        ("max_new_tokens", True, "integer"),
        ("max_new_tokens", "12", "integer"),
        ("max_new_tokens", None, "integer"),
        ("temperature", NAN, "finite number > 0"),
        ("temperature", INF, "finite number > 0"),
        ("temperature", -0.5, "finite number > 0"),
        ("temperature", 1e-12, "0 for greedy"),
        ("temperature", "hot", "0 for greedy"),
        ("temperature", False, "0 for greedy"),
        ("temperature", 10**400, "finite number > 0"),
        ("top_k", 0, "at least 1"),
        ("top_k", -1, "at least 1"),
        ("top_k", 5.0, "integer"),
        ("top_k", True, "integer"),
        ("top_p", 0.0, "(0, 1]"),
        ("top_p", 1.01, "(0, 1]"),
        ("top_p", NAN, "(0, 1]"),
        ("top_p", "0.9", "(0, 1]"),
        ("min_p", -0.1, "[0, 1]"),
        ("min_p", 1.5, "[0, 1]"),
        ("min_p", NAN, "[0, 1]"),
        ("repetition_penalty", 0.0, "> 0"),
        ("repetition_penalty", -1.0, "> 0"),
        ("repetition_penalty", NAN, "> 0"),
        ("repetition_penalty", INF, "> 0"),
        ("repetition_penalty", None, "> 0"),
        ("seed", -1, "0.."),
        ("seed", 2**64, "0.."),
        ("seed", 1.0, "0.."),
        ("num_draft_tokens", 0, "1..16"),
        ("num_draft_tokens", 17, "1..16"),
        ("num_draft_tokens", True, "1..16"),
        ("max_draft_tokens", 0, "at least 1"),
        ("max_draft_tokens", None, "integer"),
        ("stop", ("a", ""), "at least one character"),
        ("stop", "", "at least one character"),
        ("stop", (3,), "string"),
        ("stop", 3, "string"),
        ("stop", None, "string"),
        ("ignore_eos", 1, "True or False"),
    ],
)
def test_mistakes_name_value_and_allowed_set(name: str, value: Any, allowed: str) -> None:
    kwargs = {"temperature": 1.0, name: value}  # sampling, so that nothing else is remarked
    with pytest.raises(MultirateError) as error:
        GenerationOptions(**kwargs)
    message = str(error.value)
    assert message.startswith(f"{name}=")
    assert allowed in message
    shown = (value,) if name == "stop" and isinstance(value, str) else value
    assert repr(shown) in message or (isinstance(shown, int | float) and shown > 1e9)


def test_unknown_strategy_lists_the_known() -> None:
    with pytest.raises(MultirateError) as error:
        GenerationOptions(strategy="fast")  # type: ignore[arg-type]
    assert "'fast'" in str(error.value)
    assert all(strategy in str(error.value) for strategy in STRATEGIES)


def test_too_many_drafts_name_the_limit_to_raise() -> None:
    with pytest.raises(MultirateError, match="raise max_draft_tokens"):
        GenerationOptions(num_draft_tokens=20)
    assert GenerationOptions(num_draft_tokens=20, max_draft_tokens=20).num_draft_tokens == 20


@pytest.mark.parametrize(
    "kwargs",
    [
        {"max_new_tokens": 1},
        {"top_k": 1, "top_p": 1.0, "min_p": 0.0},
        {"top_p": 1e-9, "min_p": 1.0},
        {"repetition_penalty": 0.5},
        {"seed": 0},
        {"seed": 2**63 - 1},
        {"num_draft_tokens": 1},
        {"num_draft_tokens": 8},
        *({"strategy": strategy} for strategy in STRATEGIES),
    ],
)
def test_edges_are_allowed(kwargs: dict[str, Any]) -> None:
    options = GenerationOptions(temperature=1.0, **kwargs)
    assert {name: getattr(options, name) for name in kwargs} == kwargs


def test_stop_becomes_a_tuple() -> None:
    assert GenerationOptions(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert GenerationOptions(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


def test_integers_become_floats_where_floats_are_meant() -> None:
    # transformers' TemperatureLogitsWarper refuses an int.
    options = GenerationOptions(temperature=1, top_p=1, repetition_penalty=2)
    for value in (options.temperature, options.top_p, options.repetition_penalty):
        assert type(value) is float


def test_filters_without_sampling_are_remarked() -> None:
    with pytest.warns(UserWarning, match="top_k, top_p has no effect") as record:
        GenerationOptions(top_k=5, top_p=0.5)
    assert record[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GenerationOptions(temperature=0.5, top_k=5)
        GenerationOptions(repetition_penalty=1.3)


def test_frozen_and_every_field_has_help() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GenerationOptions().max_new_tokens = 3  # type: ignore[misc]
    assert all(field.metadata["help"] for field in dataclasses.fields(GenerationOptions))
