"""What a difference between two outputs is taken for."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model

from multirate.decode import compare as compare_module
from multirate.decode import loop
from multirate.decode.compare import Comparison, compare_outputs, near_tie_tolerance
from multirate.models.base import BaseModel

PROMPT = [5, 6, 7, 8]
PLAIN = [10, 11, 12, 13]


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return BaseModel(tiny_model("llama"))


def log_probs(base: BaseModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return base.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)


def test_identical_outputs(base: BaseModel) -> None:
    assert compare_outputs(base, PROMPT, PLAIN, PLAIN) == Comparison(identical=True)


@pytest.mark.parametrize("chunk", [512, 4, 1])
def test_the_gap_is_the_models_own_at_the_first_difference(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(loop, "PREFILL_CHUNK", chunk)
    scores = log_probs(base, PROMPT + PLAIN[:2])
    gap = abs(float(scores[12] - scores[50]))
    for tolerance, near_tie in ((1.01 * gap, True), (0.99 * gap, False)):
        found = compare_outputs(base, PROMPT, PLAIN, [10, 11, 50, 60], tolerance=tolerance)
        assert (found.identical, found.first_difference) == (False, 2)
        assert found.gap == pytest.approx(gap, abs=1e-5)
        assert found.near_tie is near_tie


def test_a_difference_in_the_first_token(base: BaseModel) -> None:
    scores = log_probs(base, PROMPT)
    found = compare_outputs(base, PROMPT, [10], [50])
    assert found.first_difference == 0
    assert found.gap == pytest.approx(abs(float(scores[10] - scores[50])), abs=1e-5)


@pytest.mark.parametrize("other", [PLAIN[:3], [*PLAIN, 14], []])
def test_an_output_that_ends_early_is_no_tie(base: BaseModel, other: list[int]) -> None:
    found = compare_outputs(base, PROMPT, PLAIN, other)
    assert found == Comparison(False, min(len(PLAIN), len(other)), gap=None, near_tie=False)


def test_the_tolerance_is_two_steps_of_the_dtype() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        step = torch.nextafter(torch.tensor(16, dtype=dtype), torch.tensor(32, dtype=dtype)) - 16
        assert near_tie_tolerance(dtype) == 2 * float(step)
    assert near_tie_tolerance(torch.bfloat16) == 0.25


def test_the_tolerance_follows_the_models_dtype() -> None:
    base = BaseModel(tiny_model("llama").to(torch.bfloat16))
    scores = log_probs(base, PROMPT).float()
    token = int(scores.argsort()[len(scores) // 2])
    gaps = (scores - scores[token]).abs()
    close = int(((gaps > 0.1) & (gaps < 0.2)).nonzero()[0])
    far = int((gaps > 0.3).nonzero()[0])
    assert compare_outputs(base, PROMPT, [token], [close]).near_tie is True
    assert compare_outputs(base, PROMPT, [token], [far]).near_tie is False


def test_a_gap_of_exactly_two_steps_is_a_near_tie(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 logits 0.25 apart: their float32 log-softmax differs by 0.25000006."""
    logits = torch.randn(97, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    logits[12], logits[50] = 17.125, 17.375
    rounded = logits.log_softmax(-1)
    monkeypatch.setattr(compare_module, "_next_logits", lambda *_: logits)
    found = compare_outputs(base, PROMPT, [12], [50], tolerance=0.25)
    assert (found.gap, found.near_tie) == (0.25, True)
    assert float(rounded[50] - rounded[12]) == pytest.approx(0.25, abs=1e-5)
