"""Whether two greedy outputs are the same, and what a difference between them means.

In float32 speculative decoding gives the tokens of plain decoding. In 16 bits a block of several
positions is rounded differently from one position at a time, so where the two best tokens are almost
equally likely either may win. Such a near-tie is no error; any other difference is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from multirate.decode.loop import prefill
from multirate.models.base import BaseModel

_LOGIT_SIZE = 16  # the best tokens' logits are of the order of 16 to 32


@dataclass(frozen=True)
class Comparison:
    """How an output relates to the plain one.

    Attributes:
        identical: all tokens are equal.
        first_difference: index of the first token that differs; None if none does.
        gap: how far apart the log-probabilities of the two tokens are there, by the plain model;
            None where nothing differs or only one output has a token there.
        near_tie: whether the gap is within the tolerance; None if the outputs are identical.
    """

    identical: bool
    first_difference: int | None = None
    gap: float | None = None
    near_tie: bool | None = None


def near_tie_tolerance(dtype: torch.dtype) -> float:
    """Largest log-probability gap that rounding explains: two steps of the type at logits of 16 to 32.

    One step for each of the two logits. 0.25 in bfloat16, 0.031 in float16, 4e-6 in float32.
    """
    return 2 * _LOGIT_SIZE * torch.finfo(dtype).eps


def compare_outputs(
    base: BaseModel,
    prompt_ids: Sequence[int],
    plain_ids: Sequence[int],
    other_ids: Sequence[int],
    *,
    tolerance: float | None = None,
) -> Comparison:
    """Compare an output with the one of plain greedy decoding.

    Only the first difference is judged: after it the two continue different texts.

    Args:
        base: the model that wrote both; the gap is recomputed with it, in its own dtype.
        prompt_ids: what both continue.
        plain_ids: new tokens of plain decoding.
        other_ids: new tokens of the other method, made with the same length limits.
        tolerance: largest gap of a near-tie; None for `near_tie_tolerance` of the model's dtype.

    Returns:
        Comparison: at the first difference, if there is one.
    """
    pairs = enumerate(zip_longest(plain_ids, other_ids))
    place = next((i for i, (plain, other) in pairs if plain != other), None)
    if place is None:
        return Comparison(identical=True)
    if place >= min(len(plain_ids), len(other_ids)):  # one stopped early: no tie explains that
        return Comparison(identical=False, first_difference=place, near_tie=False)
    logits = _next_logits(base, [*prompt_ids, *plain_ids[:place]])
    # Log-probabilities differ as logits do. Taken from the logits the gap is exact: after a softmax
    # two whole rounding steps can come out a hair over the tolerance.
    gap = abs(float(logits[plain_ids[place]] - logits[other_ids[place]]))
    allowed = near_tie_tolerance(base.dtype) if tolerance is None else tolerance
    return Comparison(identical=False, first_difference=place, gap=gap, near_tie=gap <= allowed)


@torch.inference_mode()
def _next_logits(base: BaseModel, ids: Sequence[int]) -> Tensor:
    """Logits `[V]` of the token after `ids`, float32, from one plain pass in chunks."""
    final, _ = prefill(base, [ids], base.arena(rows=1, max_len=len(ids)), ())
    return base.head(final)[0, 0].float()
