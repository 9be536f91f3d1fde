"""Short distillations on cached states: stacks of accelerated layers, and trained readouts.

They answer questions about a model, they do not make accelerators; `multirate.train` does that.

Shapes: B rows, n positions, T used positions, D hidden size, v answers' vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from multirate.analyze.states import Batch, CachedText, cosine, mixed_precision, next_tokens, share
from multirate.config.errors import MultirateError
from multirate.models.arena import KVArena
from multirate.models.base import BaseModel
from multirate.streams.fit import Moments, fit_lean, ridge_solve
from multirate.streams.layers import LeanLayer, TiedLayer
from multirate.train.options import cosine_schedule

RIDGE = 1e-3
VOCABULARY_LIMIT = 4096
_CLIP = 1.0
_WARMUP = 0.1
_EXIT_BATCH = 64  # positions; an exit head starts from nothing, so it needs many steps


@dataclass(frozen=True)
class Stack:
    """The shape of a stack of accelerated layers.

    Attributes:
        kind: of its layers.
        start: the gate: p starts as the slow state h_start.
        targets: the slow layer that each accelerated layer aims at.
        rank: of its adapters.
        heads: query heads (`lean`).
    """

    kind: Literal["lean", "tied"]
    start: int
    targets: tuple[int, ...]
    rank: int
    heads: int = 1

    def layers(self, base: BaseModel) -> nn.ModuleList:
        """New layers, each reading the base layer that produces the state it aims at."""
        made: list[nn.Module]
        if self.kind == "tied":
            made = [TiedLayer(base, i - 1, self.rank) for i in self.targets]
        else:
            made = [
                LeanLayer(base, i - 1, rank=self.rank, num_heads=self.heads, attended_tokens=None)
                for i in self.targets
            ]
        return nn.ModuleList(made).to(base.device)


@dataclass(frozen=True)
class Training:
    """How a stack or a readout is trained; the same for all that are compared.

    Attributes:
        epochs: passes over the training text.
        learning_rate: peak of a cosine schedule with a warm-up.
        kl_weight: of the Kullback-Leibler divergence from the full model's next-token distribution,
            beside the mean cosine distance to the targets.
        seed: of adapters' starts and the order of batches.
    """

    epochs: int
    learning_rate: float
    kl_weight: float = 1.0
    seed: int = 0


class AnswerVocabulary:
    """The tokens that the full model chooses in the training text, over which losses are taken.

    A few thousand rows of the LM head instead of all: this is what keeps the analysis short.

    Args:
        text: the training text; at most `VOCABULARY_LIMIT` tokens are taken, the most frequent.
    """

    def __init__(self, text: CachedText) -> None:
        ids, counts = text.choices.unique(return_counts=True)
        kept = counts.argsort(descending=True, stable=True)[:VOCABULARY_LIMIT]
        self.base, self.ids = text.base, ids[kept]
        self._rows = cast(Tensor, text.base.lm_head.weight)[self.ids].detach().float()

    def __len__(self) -> int:
        return len(self.ids)

    def divergence(self, normed: Tensor, final: Tensor) -> Tensor:
        """KL of the full model's distribution from the one of normed states, both over v tokens.

        Args:
            normed: `[T, D]` after the final norm.
            final: `[T, D]` the full model's h_N.
        """
        with torch.no_grad():
            goal = self.base.final_norm(final.to(self.base.dtype)).float()
            target = torch.log_softmax(self._logits(goal), dim=-1)
        found = torch.log_softmax(self._logits(normed), dim=-1)
        return F.kl_div(found, target, log_target=True, reduction="batchmean")

    def _logits(self, normed: Tensor) -> Tensor:
        return self.base.soft_cap(F.linear(normed.float(), self._rows)).float()


def run_stack(
    layers: Iterable[nn.Module], text: CachedText, batch: Batch, start: Tensor
) -> list[Tensor]:
    """Take the stream through a stack from `start` `[B, n, D]`; every p_i that is produced."""
    block, prefix = text.block(batch)
    trace, p = [], start.float()
    with mixed_precision(text.base):
        for layer in layers:
            p = layer(p, block, cast(KVArena, batch.arena), prefix)
            trace.append(p)
    return trace


@torch.no_grad()
def end_states(layers: nn.ModuleList, stack: Stack, text: CachedText) -> Tensor:
    """p at the end of a stack, `[T, D]`."""
    return text.gather(lambda b: run_stack(layers, text, b, b.states[stack.start])[-1])


def stack_moments(text: CachedText, stack: Stack) -> Moments:
    """What the closed form of `lean` layers needs, from cached states."""
    moments = Moments()
    for batch in text.batches:
        wanted = [batch.states[i][batch.used] for i in stack.targets]
        moments.add(batch.states[stack.start][batch.used].float(), torch.cat(wanted, 1).float())
    return moments


@torch.no_grad()
def closed_form(layers: nn.ModuleList, stack: Stack, moments: Moments) -> None:
    """Start `lean` layers from ridge regression; `tied` ones start as the base's own layers."""
    if stack.kind == "lean":
        fit_lean(cast(Sequence[LeanLayer], layers), moments, RIDGE)


def linear_fit(x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
    """The ridge regression of states `y` `[T, D]` on inputs `x` `[T, in]`, as a function."""
    scale = x.square().mean().clamp(min=1e-12).rsqrt()
    moments = Moments()
    moments.add(x * scale, y)
    assert moments.xx is not None and moments.xy is not None
    weight, bias = (w.float() for w in ridge_solve(moments.xx, moments.xy, RIDGE))
    return lambda states: F.linear(states * scale, weight, bias)


def train_stack(
    layers: nn.ModuleList,
    stack: Stack,
    text: CachedText,
    vocabulary: AnswerVocabulary,
    training: Training,
    *,
    tick: Callable[[float], None] = lambda part: None,
) -> None:
    """Distil a stack in place: mean cosine distance to its targets, plus the divergence if weighed.

    Raises:
        MultirateError: the loss became NaN or infinite.
    """
    base = text.base

    def loss(batch: Batch) -> Tensor:
        trace = run_stack(layers, text, batch, batch.states[stack.start])
        # Similarities are picked, not states: the gradient of picking states is slow on a CPU.
        distance = torch.stack(
            [1 - F.cosine_similarity(p, batch.states[i].float(), dim=-1)[batch.used].mean()
             for p, i in zip(trace, stack.targets, strict=True)]
        ).mean()  # fmt: skip
        if not training.kl_weight:
            return distance
        positions = batch.used.flatten().nonzero().squeeze(1)
        end = trace[-1].flatten(0, 1).index_select(0, positions)
        final = batch.states[base.num_layers][batch.used]
        normed = base.final_norm(end.to(base.dtype))
        return distance + training.kl_weight * vocabulary.divergence(normed, final)

    batches = [batch for batch in text.batches if len(batch.choices)]
    layers.train()
    _descend(list(layers.parameters()), batches, loss, training, tick)
    layers.eval()


class ExitHead(nn.Module):
    """A trained exit in the style of LITE, on a frozen base: an own norm and a linear correction.

    LITE (arXiv 2310.18581) tunes the whole model for cross-entropy at early layers through the shared
    norm and LM head. Here nothing of the base may change, so each exit gets its own norm weight and a
    D x D map W (zero at the start, which is the raw exit): z = n(h) + W n(h), then norm, then the base's
    LM head. Its loss is the divergence from the full model's next-token distribution alone.
    """

    def __init__(self, base: BaseModel) -> None:
        super().__init__()
        self.__dict__["base"] = base
        size = base.hidden_size
        self.correction = nn.Linear(size, size, bias=False, device=base.device)
        self.scale = nn.Parameter(torch.ones(size, device=base.device))
        nn.init.zeros_(self.correction.weight)

    base: BaseModel

    def forward(self, h: Tensor) -> Tensor:
        """h_E `[T, D]` to the state that the base's final norm and LM head are given."""
        normed = F.rms_norm(h, (h.shape[-1],), eps=1e-6)
        state = normed + self.correction(normed)
        return self.scale * F.rms_norm(state, (h.shape[-1],), eps=1e-6)


def train_exit_head(
    head: ExitHead,
    layer: int,
    text: CachedText,
    vocabulary: AnswerVocabulary,
    training: Training,
    *,
    tick: Callable[[float], None] = lambda part: None,
) -> None:
    """Train an exit at a slow layer in place, on the divergence alone.

    Raises:
        MultirateError: the loss became NaN or infinite.
    """
    base, state, final = text.base, text.state(layer), text.state(text.base.num_layers)

    def loss(positions: Tensor) -> Tensor:
        normed = base.final_norm(head(state[positions]).to(base.dtype))
        return vocabulary.divergence(normed, final[positions])

    order = torch.randperm(len(state), generator=torch.Generator().manual_seed(training.seed))
    _descend(
        list(head.parameters()), order.to(base.device).split(_EXIT_BATCH), loss, training, tick
    )


def _descend(
    parameters: list[nn.Parameter],
    batches: Sequence[Any],
    loss: Callable[[Any], Tensor],
    training: Training,
    tick: Callable[[float], None],
) -> None:
    """AdamW with a warm-up, a cosine schedule and clipped gradients; batches in a seeded order."""
    generator = torch.Generator().manual_seed(training.seed)
    optimizer = torch.optim.AdamW(parameters, lr=training.learning_rate, weight_decay=0.0)
    steps = training.epochs * len(batches)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: cosine_schedule(step, steps, warmup_share=_WARMUP)
    )
    for _ in range(training.epochs):
        for i in torch.randperm(len(batches), generator=generator).tolist():
            value = loss(batches[i])
            if not torch.isfinite(value):
                raise MultirateError(
                    f"The loss of a distillation became {value.item()}. Load the model with --dtype "
                    f"float32."
                )
            optimizer.zero_grad(set_to_none=True)
            value.backward()
            torch.nn.utils.clip_grad_norm_(parameters, _CLIP)
            optimizer.step()
            schedule.step()
            tick(1 / steps)


def judge(text: CachedText, end: Tensor, target: int | None = None) -> dict[str, float]:
    """Held-out quality of states `[T, D]` that stand in for the final one.

    Args:
        text: what is judged on.
        end: the states.
        target: the slow layer that they aim at, if that is to be judged too.

    Returns:
        `cosine` and `agreement` (the same most likely next token) with the full model, and
        `target_cosine` and `target_agreement` with the state aimed at, read by the same LM head.
    """
    tokens = next_tokens(text.base, end)
    result = {
        "cosine": cosine(end, text.state(text.base.num_layers)),
        "agreement": share(tokens == text.choices),
    }
    if target is not None:
        result["target_cosine"] = cosine(end, text.state(target))
        result["target_agreement"] = share(tokens == text.tokens(target))
    return result
