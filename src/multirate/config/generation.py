"""What a user asks of one generation: lengths, sampling, stopping and strategy.

The options know nothing of models or tokenizers; they are checked once, here, so that the loop
never has to.
"""

import math
import warnings
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from multirate.config.errors import MultirateError

Strategy = Literal["auto", "plain", "speculative"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)

# Below this, logits / temperature leaves the range of float32 for ordinary logits.
MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class GenerationOptions:
    """Options of one generation.

    Raises:
        MultirateError: a value is outside its allowed set; the message names both and the fix.
    """

    max_new_tokens: int = field(
        default=128, metadata={"help": "Most tokens to generate for a prompt; at least 1."}
    )
    temperature: float = field(
        default=0.0, metadata={"help": "Softmax temperature; 0 is greedy decoding."}
    )
    top_k: int | None = field(
        default=None, metadata={"help": "Sample among the k most likely tokens only."}
    )
    top_p: float | None = field(
        default=None,
        metadata={"help": "Sample among the fewest tokens that hold this probability; in (0, 1]."},
    )
    min_p: float | None = field(
        default=None,
        metadata={"help": "Drop tokens below this fraction of the best probability; in [0, 1]."},
    )
    repetition_penalty: float = field(
        default=1.0,
        metadata={"help": "Penalty on tokens already in prompt or output; 1 is none."},
    )
    seed: int | None = field(
        default=None, metadata={"help": "Seed of the sampler; without one every run differs."}
    )
    stop: tuple[str, ...] = field(
        default=(), metadata={"help": "Strings that end the output; they are not part of its text."}
    )
    strategy: Strategy = field(
        default="auto",
        metadata={
            "help": "plain, speculative, or auto: speculative when an accelerator is loaded."
        },
    )
    num_draft_tokens: int | None = field(
        default=None,
        metadata={"help": "Tokens drafted a step; chosen from measured step costs if not given."},
    )
    draft_width: int | None = field(
        default=None,
        metadata={
            "help": "Candidates verified for each drafted token; 1 = a chain. Chosen from "
            "measured step costs if not given; 1 with num_draft_tokens."
        },
    )
    max_draft_tokens: int = field(
        default=16, metadata={"help": "Upper limit of the number of drafted tokens a step."}
    )
    ignore_eos: bool = field(
        default=False, metadata={"help": "Go on after an end-of-sequence token."}
    )

    def __post_init__(self) -> None:
        self._check_int("max_new_tokens", low=1)
        self._check_int("max_draft_tokens", low=1)
        self._check_int("draft_width", low=1, high=16, optional=True)
        self._check_int("num_draft_tokens", low=1, high=self.max_draft_tokens, optional=True)
        self._check_int("top_k", low=1, optional=True)
        self._check_int("seed", low=0, high=2**63 - 1, optional=True)
        self._check_floats()
        if self.strategy not in STRATEGIES:
            raise MultirateError(
                f"strategy={self.strategy!r} is unknown; choose one of {', '.join(STRATEGIES)}."
            )
        if not isinstance(self.ignore_eos, bool):
            raise MultirateError(f"ignore_eos={self.ignore_eos!r} must be True or False.")
        self._normalise_stop()
        self._warn_unused()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken rather than one drawn at random."""
        return self.temperature == 0.0

    def _check_int(
        self, name: str, *, low: int, high: int | None = None, optional: bool = False
    ) -> None:
        value: Any = getattr(self, name)
        if value is None and optional:
            return
        allowed = f"an integer of at least {low}" if high is None else f"an integer {low}..{high}"
        # bool is an int to Python, but True tokens is nobody's intention.
        is_int = isinstance(value, int) and not isinstance(value, bool)
        if is_int and value >= low and (high is None or value <= high):
            return
        fix = "leave it out (None) or give" if optional else "give"
        if name == "num_draft_tokens" and is_int and value > self.max_draft_tokens:
            fix = f"raise max_draft_tokens (now {high}), or {fix}"
        raise MultirateError(f"{name}={value!r} is not allowed; {fix} {allowed}.")

    def _check_floats(self) -> None:
        temperature = self._number("temperature", "0 for greedy decoding, or a finite number > 0")
        if not math.isfinite(temperature) or temperature < 0:
            raise MultirateError(
                f"temperature={temperature!r} is not allowed; give 0 for greedy decoding, or a "
                "finite number > 0."
            )
        if 0 < temperature < MIN_TEMPERATURE:
            raise MultirateError(
                f"temperature={temperature!r} overflows float32; give 0 for greedy decoding, or at "
                f"least {MIN_TEMPERATURE}."
            )
        if self.top_p is not None:
            top_p = self._number("top_p", "a number in (0, 1]")
            if not 0 < top_p <= 1:
                raise MultirateError(
                    f"top_p={top_p!r} is not allowed; give a number in (0, 1], or leave it out to "
                    "keep every token."
                )
        if self.min_p is not None:
            min_p = self._number("min_p", "a number in [0, 1]")
            if not 0 <= min_p <= 1:
                raise MultirateError(
                    f"min_p={min_p!r} is not allowed; give a number in [0, 1], or leave it out to "
                    "keep every token."
                )
        penalty = self._number("repetition_penalty", "a finite number > 0")
        if not math.isfinite(penalty) or penalty <= 0:
            raise MultirateError(
                f"repetition_penalty={penalty!r} is not allowed; give a finite number > 0, where 1 "
                "is no penalty."
            )

    def _number(self, name: str, allowed: str) -> float:
        """The field as a float, which is also what it is from now on (1 becomes 1.0)."""
        value: Any = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise MultirateError(f"{name}={value!r} is not a number; give {allowed}.")
        try:
            number = float(value)
        except OverflowError:  # an int beyond the range of floats
            number = math.inf
        object.__setattr__(self, name, number)
        return number

    def _normalise_stop(self) -> None:
        stop: Any = self.stop
        if isinstance(stop, str):
            stop = (stop,)
        if not isinstance(stop, list | tuple) or not all(isinstance(s, str) for s in stop):
            raise MultirateError(
                f"stop={stop!r} is not allowed; give a string or a list of strings."
            )
        if "" in stop:
            raise MultirateError(
                f"stop={stop!r} holds an empty string, which would end every output at once; "
                "remove it, or give strings of at least one character."
            )
        object.__setattr__(self, "stop", tuple(stop))

    def _warn_unused(self) -> None:
        if not self.greedy:
            return
        unused = [name for name in ("top_k", "top_p", "min_p") if getattr(self, name) is not None]
        if unused:
            warnings.warn(
                f"{', '.join(unused)} has no effect on greedy decoding (temperature=0); set "
                "temperature > 0 to sample.",
                UserWarning,
                stacklevel=4,  # the caller of GenerationOptions(...)
            )
