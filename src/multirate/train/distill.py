"""A minimal training step for accelerators: distillation to the slow stream on its own text.

The teacher runs once over whole rows; the stream then runs over all positions in parallel, several
draft steps deep: step s at position t sees the teacher's keys and values up to t - s and its own ones
after that, and is fed its own state of step s - 1 at position t - 1. That is exactly what it will see
when it drafts (EAGLE-3's training-time test, arXiv 2503.01840, over the teacher's own KV).

Losses, summed over steps with a decay: cross-entropy to the teacher's next-token distribution over the
draft vocabulary, and cosine distance of the stream's states to the slow states they aim at (M2R2, arXiv
2502.02040, Eq. 5).

Shapes: B rows, n positions, D hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache

from multirate.config.errors import MultirateError
from multirate.models.arena import KVArena
from multirate.models.base import SLIDING, BaseModel, Block
from multirate.streams.accelerator import Accelerator, Carried
from multirate.streams.fit import FIRST_POSITION
from multirate.streams.layers import Prefix

TrainingBatch = tuple[Tensor, Sequence[int], Sequence[int]]  # ids [B, n], lengths, answer starts


@dataclass(frozen=True)
class TrainingOptions:
    """How an accelerator is trained.

    Raises:
        MultirateError: a value outside its range.
    """

    learning_rate: float = field(default=5e-4, metadata={"help": "peak of the cosine schedule"})
    warmup_share: float = field(default=0.03, metadata={"help": "share of steps that warm up"})
    draft_steps: int = field(default=3, metadata={"help": "self-fed draft steps that are trained"})
    step_decay: float = field(default=0.8, metadata={"help": "loss weight of each further step"})
    distillation_weight: float = field(default=0.2, metadata={"help": "of the cosine distance"})
    clip: float = field(default=1.0, metadata={"help": "gradient norm"})

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < 1:
            raise MultirateError(f"learning_rate={self.learning_rate} must be between 0 and 1.")
        if self.draft_steps < 1:
            raise MultirateError(f"draft_steps={self.draft_steps} must be at least 1.")


class UnrolledArena(Cache):
    """The teacher's keys and values followed by the stream's own, one segment a draft step."""

    def __init__(self, teacher: KVArena) -> None:
        super().__init__(layers=list(teacher.layers))
        self.own: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def use(self, block: Block, start: int, stop: int) -> None:
        """Positions are in the masks; nothing to point at."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        own = self.own.setdefault(layer_idx, [])
        own.append((key_states, value_states))
        layer, dtype = self.layers[layer_idx], key_states.dtype
        keys = torch.cat([layer.keys.to(dtype), *(k.to(dtype) for k, _ in own)], dim=2)
        values = torch.cat([layer.values.to(dtype), *(v.to(dtype) for _, v in own)], dim=2)
        return keys, values


def unrolled_block(base: BaseModel, n: int, step: int) -> tuple[Block, Prefix]:
    """Masks of draft step `step` (from 1) over n positions of a whole row.

    Position t sees teacher slots j <= t - step and, of its own step m <= step, slot t - step + m.
    """
    t = torch.arange(n, device=base.device)
    teacher = t[None, :] <= t[:, None] - step
    own = [t[None, :] == t[:, None] - step + m for m in range(1, step + 1)]
    distance = t[:, None] - t[None, :]
    prefixes, masks = {}, {}
    for kind in set(base.layer_types):
        window = base.config.sliding_window if kind == SLIDING else n + 1
        seen = [part & (distance < window) for part in (teacher, *own)]
        prefixes[kind] = seen[0][None]
        masks[kind] = base.mask(torch.cat(seen, dim=1)[None, None])
    positions = t[None]
    block = Block(positions, positions, 0, n, masks, base.rotary(positions))
    return block, Prefix(n, prefixes)


def mixed_precision(base: BaseModel) -> torch.autocast:
    """Float32 adapters beside a base of a smaller dtype: matmuls in bfloat16, sums in float32."""
    enabled = base.dtype != torch.float32
    return torch.autocast(base.device.type, dtype=torch.bfloat16, enabled=enabled)


def _shift(x: Tensor) -> Tensor:
    """Each position gets its predecessor's value: `[B, n, D]`, zeros at position 0."""
    return F.pad(x, (0, 0, 1, 0))[:, :-1]


def unroll(
    accelerator: Accelerator, ids: Tensor, draft_steps: int
) -> Iterator[tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]]:
    """Run teacher and stream over rows `[B, n]`, draft step by draft step.

    Yields:
        For each step: draft logits `[B, n, Vd]`, the teacher's h_N `[B, n, D]`, and the pairs
        (stream state, slow state it aims at), each `[B, n, D]`.
    """
    base, config = accelerator.base, accelerator.config
    schedule, (first_gate, last_gate) = config.schedule, config.gates[:2]
    targets = [schedule.target_layer(i + 1) for i in range(first_gate, last_gate)]
    rows, n = ids.shape
    with torch.no_grad():
        wanted = {first_gate, *targets, *config.carry_layers}
        states: dict[int, Tensor] = dict.fromkeys(wanted, cast(Tensor, None))
        teacher = base.arena(rows=rows, max_len=n)
        final = base.run_layers(
            base.embed(ids), 0, base.num_layers, base.block([0] * rows, n), teacher, states=states
        )
        embedding = base.embed(ids)
    arena = UnrolledArena(teacher)
    carried = Carried(tuple(_shift(states[i]) for i in accelerator.carry_layers), own=False)
    for step in range(1, draft_steps + 1):
        block, prefix = unrolled_block(base, n, step)
        if accelerator.entry is not None:
            start = accelerator.entry(embedding, carried.states, own=carried.own)
        else:
            start = states[first_gate]
        trace: list[Tensor] = []
        end = accelerator.advance(start, block, cast(KVArena, arena), prefix, trace=trace)
        pairs = [(p, states[i]) for p, i in zip(trace, targets, strict=True)]
        if accelerator.entry is not None:
            pairs.append((start, states[first_gate]))
            carried = Carried((_shift(start), _shift(end)), own=True)
        yield accelerator.draft_logits(end), final, pairs


def _trained_positions(
    lengths: Sequence[int], answers: Sequence[int], n: int, step: int, device: torch.device
) -> Tensor:
    """`[B, n]` bool: positions whose prediction is a token that the model wrote itself."""
    t = torch.arange(n, device=device)
    first = torch.tensor([max(a - 1, FIRST_POSITION + step - 1) for a in answers], device=device)
    last = torch.tensor(list(lengths), device=device)
    return (t >= first[:, None]) & (t < last[:, None])


def distillation_loss(
    accelerator: Accelerator, batch: TrainingBatch, options: TrainingOptions
) -> tuple[Tensor, dict[str, float]]:
    """The loss of one batch and its parts, for logging."""
    ids, lengths, answers = batch
    total, parts = torch.zeros((), device=ids.device), {}
    for index, (logits, final, pairs) in enumerate(unroll(accelerator, ids, options.draft_steps)):
        used = _trained_positions(lengths, answers, ids.shape[1], index + 1, ids.device)
        with torch.no_grad():
            # Renormalised over the draft vocabulary: no draft distribution can do better.
            target = torch.softmax(accelerator.draft_logits(final[used]).float(), dim=-1)
        log_probs = torch.log_softmax(logits[used].float(), dim=-1)
        cross_entropy = -(target * log_probs).sum(-1).mean()
        distance = torch.stack(
            [1 - F.cosine_similarity(p[used].float(), h[used].float(), dim=-1).mean()
             for p, h in pairs]
        ).mean()  # fmt: skip
        weight = options.step_decay**index
        total = total + weight * (cross_entropy + options.distillation_weight * distance)
        parts[f"cross_entropy_{index + 1}"] = float(cross_entropy.detach())
        parts[f"cosine_distance_{index + 1}"] = float(distance.detach())
    return total, parts


@torch.no_grad()
def measure_acceptance(
    accelerator: Accelerator, batches: Iterable[TrainingBatch], draft_steps: int
) -> tuple[float, ...]:
    """Simulated greedy drafting on held-out text.

    Returns:
        For each draft step, the probability that its token is the base model's own choice given that
        all steps before it were.
    """
    reached, passed = [0] * draft_steps, [0] * draft_steps
    base = accelerator.base
    for ids, lengths, answers in batches:
        alive = _trained_positions(lengths, answers, ids.shape[1], 1, ids.device)
        inside = alive
        with mixed_precision(base):
            for index, (logits, final, _) in enumerate(unroll(accelerator, ids, draft_steps)):
                choice = logits.argmax(-1)
                if accelerator.draft_ids is not None:
                    choice = accelerator.draft_ids[choice]
                right = choice == base.head(final).argmax(-1)
                reached[index] += int(alive.sum())
                alive = alive & right
                passed[index] += int(alive.sum())
                # The next step drafts from one position further on.
                alive = F.pad(alive, (1, 0))[:, :-1] & inside
    return tuple(p / max(1, r) for p, r in zip(passed, reached, strict=True))


def mean_acceptance_length(conditional: Sequence[float]) -> float:
    """1 + a_1 + a_1 a_2 + ...: tokens a verify pass yields, the bonus token counted."""
    total, chance = 1.0, 1.0
    for a in conditional:
        chance *= a
        total += chance
    return total


def train(
    accelerator: Accelerator,
    batches: Sequence[TrainingBatch],
    options: TrainingOptions,
    *,
    on_step: Callable[[int, dict[str, float]], None] = lambda step, parts: None,
) -> None:
    """Train an accelerator in place, one optimiser step a batch.

    Args:
        accelerator: float32 parameters; the base may be of any dtype.
        batches: in the order they are used.
        options: rates and weights.
        on_step: called after each step with its number (from 1) and the losses.

    Raises:
        MultirateError: the loss became NaN or infinite.
    """
    accelerator.train()
    parameters = [p for p in accelerator.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=options.learning_rate, weight_decay=0.0)
    warmup = max(1, round(options.warmup_share * len(batches)))

    def rate(step: int) -> float:
        done = max(0, step - warmup) / max(1, len(batches) - warmup)
        return min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for step, batch in enumerate(batches, 1):
        with mixed_precision(accelerator.base):
            loss, parts = distillation_loss(accelerator, batch, options)
        if not torch.isfinite(loss):
            raise MultirateError(
                f"The loss became {loss.item()} at step {step}. Lower the learning rate (now "
                f"{options.learning_rate:g}), or load the base model with dtype float32."
            )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, options.clip)
        optimizer.step()
        schedule.step()
        on_step(step, {"loss": float(loss.detach()), "gradient_norm": float(norm), **parts})
    accelerator.eval()
