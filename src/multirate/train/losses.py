"""The training loss of an accelerator, as a module that holds its parameters and nothing else.

Two kinds, at every draft step: cross-entropy to the model's next-token distribution over the draft
vocabulary, and distance of the stream's states to the slow states they aim at (M2R2, arXiv 2502.02040,
Eq. 5). Steps after the first are weighted by a decay, and on request by how likely they are reached.

Shapes: B rows, m window positions, U used positions, D hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from multirate.streams.accelerator import Accelerator
from multirate.train.acceptance import count_accepted
from multirate.train.batches import Batch, drafted_positions
from multirate.train.options import Distance, TrainingOptions
from multirate.train.teacher import TeacherStates
from multirate.train.unroll import Drafted, following, unroll, unroll_interval, window_ids


@dataclass(frozen=True, eq=False)
class _Targets:
    """What the first draft step's U used positions are to predict, computed once a batch.

    Attributes:
        place: `[B, m]` index into the U used positions.
        probs: `[U, Vd]`, the teacher's distribution, renormalised over the draft vocabulary: no
            draft distribution can do better.
        column: `[B, m]` column of the next token in the draft vocabulary, -1 where it has none.
    """

    place: Tensor
    probs: Tensor
    column: Tensor | None


def state_distance(p: Tensor, h: Tensor, kind: Distance) -> Tensor:
    """Distance of stream states p to slow states h, both `[U, D]`, per position `[U]`.

    `cosine`: 1 - cos(p, h). `l1`: |p - h|_1 / |h|_1.
    """
    p, h = p.float(), h.float()
    if kind == "cosine":
        return 1 - F.cosine_similarity(p, h, dim=-1)
    return (p - h).abs().sum(-1) / h.abs().sum(-1).clamp(min=1e-6)


class StreamLoss(nn.Module):
    """The loss of an accelerator on a batch.

    Args:
        accelerator: its adapters are this module's parameters; the frozen base is not in the tree.
        options: steps, weights and kinds of losses.
        unroll: how interval 0 drafts over a batch; another function is another kind of drafting.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        options: TrainingOptions,
        *,
        unroll: Callable[..., Iterator[Drafted]] = unroll,
    ) -> None:
        super().__init__()
        self.accelerator, self.options, self.unroll = accelerator, options, unroll

    def forward(self, batch: Batch, teacher: TeacherStates, *args: Any, measure: int = 0) -> Any:
        """`loss`, or with `measure` the counts of simulated drafting of that many steps.

        Both go through here, because a wrapped module (DDP, FSDP2) has its parameters whole only
        while its forward runs.
        """
        if measure:
            return count_accepted(self.accelerator, batch, teacher, measure, unroll=self.unroll)
        return self.loss(batch, teacher, *args)

    def loss(
        self, batch: Batch, teacher: TeacherStates, counts: Sequence[int] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch, or of its share of a bigger one.

        Args:
            batch: the texts.
            teacher: the base model's states for them.
            counts: for each draft step, the used positions of the whole step that this batch is a
                share of; sums are divided by them. By default those of this batch.

        Returns:
            The loss, a scalar, and its parts (detached scalars) by name.
        """
        options, accelerator = self.options, self.accelerator
        used = [drafted_positions(batch.trained, s + 1) for s in range(options.draft_steps)]
        if counts is None:
            counts = [int(mask.sum()) for mask in used]
        targets = self._targets(batch, teacher, used[0])
        reach = used[0].float() if options.reach_weighting else None
        parts: dict[str, Tensor] = {}
        total = torch.zeros((), device=batch.ids.device)
        for drafted in self.unroll(accelerator, batch, teacher, options.draft_steps):
            index = drafted.step - 1
            loss, own = self._step(drafted, used[index], targets, counts[index], reach, parts)
            total = total + options.step_decay**index * loss
            if reach is not None:
                reach = following(reach * own) * used[0]
        for interval in range(1, accelerator.config.schedule.num_intervals):
            drafted = unroll_interval(accelerator, interval, batch, teacher)
            name = f"gate{interval}_"
            loss, _ = self._step(drafted, used[0], targets, counts[0], None, parts, name)
            total = total + loss
        return total, parts

    def _step(
        self,
        drafted: Drafted,
        used: Tensor,
        targets: _Targets,
        count: int,
        reach: Tensor | None,
        parts: dict[str, Tensor],
        prefix: str = "",
    ) -> tuple[Tensor, Tensor]:
        """Loss of one draft step, and the stream's own probability of the next token `[B, m]`."""
        options = self.options
        # Not normalised: a step that is seldom reached counts for little, and shares of a batch add up.
        weight = torch.ones((), device=used.device) if reach is None else reach[used]
        scale = 1 / max(1, count)
        logits = self.accelerator.draft_logits(drafted.exit[used]).float()
        probs = targets.probs
        if len(logits) < len(probs):  # later steps stand at fewer positions
            probs = probs[targets.place[used]]
        normaliser = logits.logsumexp(-1)
        cross_entropy = (weight * (normaliser - (probs * logits).sum(-1))).sum() * scale
        distances = [
            (weight * state_distance(p[used], h[used], options.distillation_loss)).sum() * scale
            for p, h in drafted.pairs
        ]
        distance = torch.stack(distances).mean()
        parts[f"{prefix}cross_entropy_{drafted.step}"] = cross_entropy.detach()
        parts[f"{prefix}distillation_{drafted.step}"] = distance.detach()
        loss = options.prediction_weight * cross_entropy + options.distillation_weight * distance
        own = torch.zeros(used.shape, device=used.device)
        if targets.column is not None:
            with torch.no_grad():
                column = targets.column[used]
                chosen = logits.gather(1, column.clamp(min=0)[:, None])[:, 0]
                own[used] = (chosen - normaliser).exp() * (column >= 0)
        return loss, own

    @torch.no_grad()
    def _targets(self, batch: Batch, teacher: TeacherStates, used: Tensor) -> _Targets:
        accelerator = self.accelerator
        final = teacher.at(accelerator.config.num_layers)[used]
        probs = torch.softmax(accelerator.draft_logits(final).float(), dim=-1)
        place = used.flatten().cumsum(0).view(used.shape) - 1
        column = None
        if self.options.reach_weighting:
            column = window_ids(batch, ahead=1)
            if accelerator.draft_ids is not None:
                columns = torch.full((accelerator.config.vocab_size,), -1, device=used.device)
                columns[accelerator.draft_ids] = torch.arange(
                    len(accelerator.draft_ids), device=used.device
                )
                column = columns[column]
        return _Targets(place, probs, column)
