"""How an accelerator is trained: every setting with its meaning, checked before anything runs."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from multirate.config.errors import MultirateError

Distance = Literal["cosine", "l1"]

# Settings that say how a result is come by, not what it is: a run may be resumed with others.
FREE = ("gradient_accumulation", "save_seconds")


def _help(text: str) -> dict[str, str]:
    return {"help": text}


def cosine_schedule(step: int, steps: int, *, warmup_share: float) -> float:
    """Share of the peak learning rate at step `step` (from 0): linear warm-up, then a cosine to zero."""
    warmup = max(1, round(warmup_share * steps))
    done = max(0, step - warmup) / max(1, steps - warmup)
    return min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


@dataclass(frozen=True)
class TrainingOptions:
    """How an accelerator is trained.

    Raises:
        MultirateError: a value outside its range.
    """

    epochs: float = field(default=1.0, metadata=_help("passes over the text; 0 = closed form only"))
    batch_tokens: int = field(
        default=2048, metadata=_help("positions in a step, over all processes together")
    )
    gradient_accumulation: int = field(
        default=1, metadata=_help("parts that a step is computed in, one after another")
    )
    closed_form: bool = field(default=True, metadata=_help("start from the closed-form fit"))
    closed_form_tokens: int = field(
        default=60_000, metadata=_help("positions that the closed-form start reads")
    )
    heldout_rows: int = field(default=48, metadata=_help("texts kept back to measure acceptance"))
    learning_rate: float = field(default=1e-3, metadata=_help("peak of the cosine schedule"))
    warmup_share: float = field(default=0.03, metadata=_help("share of the steps that warm up"))
    weight_decay: float = field(default=0.0, metadata=_help("of AdamW"))
    clip: float = field(default=1.0, metadata=_help("largest gradient norm"))
    ema_decay: float = field(
        default=0.0, metadata=_help("of the average of the weights that is saved; 0 = none")
    )
    draft_steps: int = field(default=3, metadata=_help("self-fed draft steps that are trained"))
    step_decay: float = field(default=0.8, metadata=_help("loss weight of each further step"))
    reach_weighting: bool = field(
        default=False,
        metadata=_help("weight later steps by the stream's own chance of the tokens before them"),
    )
    prediction_weight: float = field(
        default=1.0, metadata=_help("of the cross-entropy to the model's next-token distribution")
    )
    distillation_weight: float = field(
        default=0.2, metadata=_help("of the distance to the slow states")
    )
    distillation_loss: Distance = field(
        default="cosine", metadata=_help("that distance: cosine, or l1 (normalised)")
    )
    eval_steps: int = field(
        default=0, metadata=_help("steps between evaluations; 0 = a tenth of the run")
    )
    patience: int = field(
        default=0, metadata=_help("evaluations without a new best before it stops; 0 = never")
    )
    save_seconds: float = field(default=120, metadata=_help("seconds between checkpoints"))
    seed: int = field(default=0, metadata=_help("order of the text and start of the adapters"))

    def __post_init__(self) -> None:
        if self.distillation_loss not in get_args(Distance):
            raise MultirateError(
                f"distillation_loss={self.distillation_loss!r} is not known. Allowed: "
                f"{', '.join(get_args(Distance))}."
            )
        for name, low, high in (
            ("epochs", 0, 1000),
            ("batch_tokens", 64, math.inf),
            ("gradient_accumulation", 1, math.inf),
            ("closed_form_tokens", 64, math.inf),
            ("heldout_rows", 1, math.inf),
            ("warmup_share", 0, 1),
            ("weight_decay", 0, math.inf),
            ("draft_steps", 1, 16),
            ("step_decay", 0, 1),
            ("prediction_weight", 0, math.inf),
            ("distillation_weight", 0, math.inf),
            ("eval_steps", 0, math.inf),
            ("patience", 0, math.inf),
            ("save_seconds", 0, math.inf),
            ("seed", 0, 2**63 - 1),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                limits = f"at least {low}" if high == math.inf else f"from {low} to {high}"
                raise MultirateError(f"{name}={value} must be {limits}.")
        if not 0 < self.learning_rate < 1:
            raise MultirateError(f"learning_rate={self.learning_rate} must be between 0 and 1.")
        if not self.clip > 0:
            raise MultirateError(f"clip={self.clip} must be above 0.")
        if not 0 <= self.ema_decay < 1:
            raise MultirateError(f"ema_decay={self.ema_decay} must be at least 0 and below 1.")
        if self.prediction_weight == self.distillation_weight == 0:
            raise MultirateError(
                "prediction_weight and distillation_weight are both 0, so there is nothing to learn."
            )

    def rate(self, step: int, steps: int) -> float:
        """Learning rate of step `step` (from 0) of `steps`: linear warm-up, then a cosine to zero."""
        return self.learning_rate * cosine_schedule(step, steps, warmup_share=self.warmup_share)

    def binding(self) -> dict[str, Any]:
        """The settings that a resumed run must share."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in FREE}
