"""Simulated greedy drafting on held-out text: how many drafts the model would accept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from multirate.streams.accelerator import Accelerator
from multirate.train.batches import Batch
from multirate.train.teacher import Needs, TeacherStates, run_teacher
from multirate.train.unroll import Drafted, following, unroll, window_ids

_AT_ONCE = 256  # positions whose logits over the whole vocabulary are held in memory


@torch.no_grad()
def count_accepted(
    accelerator: Accelerator,
    batch: Batch,
    teacher: TeacherStates,
    draft_steps: int,
    *,
    unroll: Callable[..., Iterator[Drafted]] = unroll,
) -> Tensor:
    """Draft from every position of a batch, the way that `unroll` drafts.

    Returns:
        Tensor: int64 `[draft_steps, 2]`, for each step how often it was reached (all steps before it
        were right) and how often it was then right, which is the base model's own greedy choice.
    """
    base, used = accelerator.base, batch.trained
    model_choice = torch.zeros(used.shape, dtype=torch.long, device=used.device)
    final = teacher.at(base.num_layers)[used].to(base.dtype)
    model_choice[used] = torch.cat([base.head(h).argmax(-1) for h in final.split(_AT_ONCE)])
    goes_on = model_choice == window_ids(batch, ahead=1)
    alive = used
    counts = []
    for drafted in unroll(accelerator, batch, teacher, draft_steps):
        choice = accelerator.draft_logits(drafted.exit[alive]).argmax(-1)
        if accelerator.draft_ids is not None:
            choice = accelerator.draft_ids[choice]
        right = torch.zeros_like(alive)
        right[alive] = choice == model_choice[alive]
        counts.append(torch.stack([alive.sum(), right.sum()]))
        # The next step drafts from one position further on, where the text must be what was drafted:
        # in sampled text the model's best token and the one that follows may differ.
        alive = following(right & goes_on) & used
    return torch.stack(counts)


def acceptance_rates(counts: Tensor) -> tuple[float, ...]:
    """Counts `[steps, 2]` to the chance of each draft given that those before it were accepted."""
    return tuple(right / max(1, reached) for reached, right in counts.tolist())


def measure_acceptance(
    accelerator: Accelerator,
    batches: Iterable[Batch],
    draft_steps: int,
    *,
    unroll: Callable[..., Iterator[Drafted]] = unroll,
) -> tuple[float, ...]:
    """Simulated greedy drafting on held-out text, the way that `unroll` drafts.

    Returns:
        For each draft step, the probability that its token is the base model's own choice given that
        all steps before it were.
    """
    base = accelerator.base
    needs = Needs.of(accelerator.config)
    counts = torch.zeros(draft_steps, 2, dtype=torch.long, device=base.device)
    for batch in batches:
        batch = batch.to(base.device)
        teacher = run_teacher(base, batch, needs)
        with mixed_precision(accelerator):
            counts += count_accepted(accelerator, batch, teacher, draft_steps, unroll=unroll)
    return acceptance_rates(counts)


def mixed_precision(accelerator: Accelerator) -> torch.autocast:
    """Float32 adapters beside a base of a smaller dtype: matmuls in that dtype."""
    base = accelerator.base
    enabled = base.dtype != torch.float32
    dtype = base.dtype if enabled else torch.bfloat16
    return torch.autocast(base.device.type, dtype=dtype, enabled=enabled)


def mean_acceptance_length(conditional: Sequence[float]) -> float:
    """1 + a_1 + a_1 a_2 + ...: tokens a verify pass yields, the bonus token counted."""
    total, chance = 1.0, 1.0
    for a in conditional:
        chance *= a
        total += chance
    return total
