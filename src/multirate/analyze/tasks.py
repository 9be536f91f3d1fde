"""What all analyses share: the study they are part of, and pieces of work with an estimate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from multirate.analyze.costs import ModelShape
from multirate.analyze.stacks import AnswerVocabulary, Stack, Training
from multirate.analyze.states import CachedText
from multirate.analyze.text import MIN_TOKENS
from multirate.config.errors import MultirateError
from multirate.config.schedule import RateSchedule
from multirate.models.base import BaseModel

Tick = Callable[[float], None]

FIGURES = ("velocity", "rates", "alignment", "ranks", "costs")
HEAD_SHARE = 8 / 32  # of the query heads that a lean layer keeps, as published
STACK_LAYERS = 4
# Peaks, by what is trained. A lean layer's linear path reads the raw stream, whose norm is large, and
# its closed-form start is good already: at the rate that suits tied layers it only gets worse.
LEARNING_RATES = {"lean": 1e-4, "tied": 3e-3, "LITE-style": 1e-3}
_MODELLED_VOCABULARY = 3000  # an answer vocabulary's usual size, for estimates


@dataclass(frozen=True)
class AnalysisOptions:
    """What is analysed, and on how much text.

    Raises:
        MultirateError: a value outside its range.
    """

    figures: tuple[str, ...] = FIGURES
    tokens: int = field(default=8_000, metadata={"help": "positions to fit and judge on"})
    rank: int = field(default=32, metadata={"help": "adapter rank of lean and tied layers"})
    epochs: int = field(default=6, metadata={"help": "passes over the text of each distillation"})
    max_length: int = field(default=320, metadata={"help": "longest text, in tokens"})
    seed: int = field(default=0, metadata={"help": "of the split, adapters' start and batch order"})

    def __post_init__(self) -> None:
        unknown = [name for name in self.figures if name not in FIGURES]
        if unknown or not self.figures:
            raise MultirateError(
                f"figures={','.join(self.figures)!r} is not known. Give some of "
                f"{', '.join(FIGURES)}, separated by commas."
            )
        for name, low, high in (
            ("tokens", MIN_TOKENS, 10**9), ("rank", 1, 65_536), ("epochs", 1, 1000),
            ("max_length", 16, 10**6),
        ):  # fmt: skip
            value = getattr(self, name)
            if not low <= value <= high:
                raise MultirateError(f"{name}={value} must be from {low:,} to {high:,}.")


@dataclass
class Study:
    """One model, its text's cached states, and how everything is fitted.

    Attributes:
        base: the model.
        shape: its numbers.
        options: what was asked for.
        train: what is fitted on; empty until the text was read.
        heldout: what is judged on.
    """

    base: BaseModel
    shape: ModelShape
    options: AnalysisOptions
    train: CachedText
    heldout: CachedText
    _vocabulary: AnswerVocabulary | None = None

    @property
    def vocabulary(self) -> AnswerVocabulary:
        """Of the training text."""
        if self._vocabulary is None:
            self._vocabulary = AnswerVocabulary(self.train)
        return self._vocabulary

    @property
    def num_layers(self) -> int:
        return self.shape.num_layers

    @property
    def lean_heads(self) -> int:
        return max(1, round(HEAD_SHARE * self.shape.num_heads))

    @property
    def rank(self) -> int:
        return min(self.options.rank, self.shape.hidden_size)

    @property
    def middle_gate(self) -> int:
        """A third into the model, where early exits begin."""
        return self.num_layers // 3

    @property
    def stack_layers(self) -> int:
        """k: four, or as many as leave room for two rates in a small model."""
        return max(1, min(STACK_LAYERS, (self.num_layers - self.middle_gate) // 2))

    def lean(self, start: int, targets: tuple[int, ...], rank: int | None = None) -> Stack:
        return Stack("lean", start, targets, rank or self.rank, self.lean_heads)

    def tied(self, start: int, targets: tuple[int, ...]) -> Stack:
        return Stack("tied", start, targets, self.rank)

    def training(self, what: str, *, kl_weight: float, epochs: int | None = None) -> Training:
        """How a stack of one kind, or a readout, is trained; see `LEARNING_RATES`."""
        options = self.options
        return Training(
            epochs or options.epochs, LEARNING_RATES[what], kl_weight=kl_weight, seed=options.seed
        )

    def lean_work(self, layers: int) -> float:
        """Seconds of distilling and judging a lean stack, in the work of `Task`."""
        shape, tokens = self.shape, self.options.tokens
        per_layer = 20 * shape.hidden_size * self.rank + 12 * self.options.max_length * 64
        divergence = 8 * _MODELLED_VOCABULARY * shape.hidden_size
        fitting = self.options.epochs * (layers * 3 * per_layer + divergence)
        return tokens * (fitting + 3 * layers * shape.hidden_size**2) + self.judge_work()

    def tied_work(self, layers: int, epochs: int) -> float:
        weights = max(self.shape.layer_weights)
        return epochs * self.options.tokens * layers * 5 * weights + self.judge_work()

    def judge_work(self) -> float:
        shape = self.shape
        return 0.5 * self.options.tokens * shape.vocab_size * shape.hidden_size


def span_targets(num_layers: int, start: int, layers: int) -> tuple[int, ...]:
    """Targets of one interval that reaches h_N: the rate is (N - start) / layers."""
    schedule = RateSchedule(num_layers, (start, start + layers))
    return tuple(schedule.target_layer(i) for i in range(start + 1, start + layers + 1))


@dataclass(frozen=True)
class Task:
    """A piece of work.

    Attributes:
        label: for progress.
        work: its estimate in FLOPs; only its share of the whole matters.
        run: does it; called with a function that takes the share done since the last call.
    """

    label: str
    work: float
    run: Callable[[Tick], None]
