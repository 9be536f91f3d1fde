"""What a generation returns, and the JSON that the command line prints of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from multirate.decode.loop import SpeculationCounts


@dataclass(frozen=True)
class Speculation:
    """Speculation statistics, in vLLM's terms.

    Attributes:
        num_drafts: verify passes that held drafts.
        num_draft_tokens: drafted tokens.
        num_accepted_tokens: drafted tokens that were accepted.
        mean_acceptance_length: tokens a drafted pass yields, 1 + accepted / drafts: the bonus token
            counts. 1.0 when nothing was drafted.
        acceptance_rate: accepted / drafted; 0.0 when nothing was drafted.
        per_position_acceptance_rate: accepted at position i / drafts (unconditional).
        num_plain_steps: passes without drafts, because drafting did not pay there.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    mean_acceptance_length: float
    acceptance_rate: float
    per_position_acceptance_rate: list[float]
    num_plain_steps: int

    @classmethod
    def of(cls, counts: Sequence[SpeculationCounts]) -> Speculation:
        """Sum the counts of several rows or runs."""
        drafts = sum(c.num_drafts for c in counts)
        drafted = sum(c.num_draft_tokens for c in counts)
        accepted = sum(c.num_accepted_tokens for c in counts)
        width = max((len(c.accepted_per_position) for c in counts), default=0)
        at = [
            sum(c.accepted_per_position[i] for c in counts if i < len(c.accepted_per_position))
            for i in range(width)
        ]
        return cls(
            num_drafts=drafts,
            num_draft_tokens=drafted,
            num_accepted_tokens=accepted,
            mean_acceptance_length=1 + accepted / max(1, drafts),
            acceptance_rate=accepted / max(1, drafted),
            per_position_acceptance_rate=[n / max(1, drafts) for n in at],
            num_plain_steps=sum(c.num_plain_steps for c in counts),
        )

    @property
    def note(self) -> str | None:
        """A sentence for the user where drafting stopped by itself, else None."""
        if self.num_plain_steps == 0:
            return None
        total = self.num_plain_steps + self.num_drafts
        if self.num_drafts == 0:
            return (
                f"Nothing was drafted in {total} steps: by measured step costs drafts would not have "
                f"paid on this device."
            )
        return (
            f"Drafting stopped by itself for {self.num_plain_steps} of {total} steps: at the "
            f"acceptance seen there it would have been slower than plain decoding on this device."
        )


@dataclass(frozen=True)
class GenerationResult:
    """One prompt's output.

    Attributes:
        text: without special tokens and stop string; None if the model has no tokenizer.
        token_ids: new tokens, an end-of-sequence token included.
        prompt_tokens: length of the prompt.
        seconds: wall-clock time from the call to this row's last token, prefill included.
        strategy: "plain" or "speculative".
        dtype: of the weights.
        device: where it ran.
        finish_reason: "eos", "stop", "length" or "context".
        speculation: None for plain decoding.
    """

    text: str | None
    token_ids: list[int]
    prompt_tokens: int
    seconds: float
    strategy: str
    dtype: str
    device: str
    finish_reason: str
    speculation: Speculation | None

    @property
    def new_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds if self.seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The object that `multirate generate --json` prints.

        `speculation` is there where something drafts: the fields of `Speculation`, and its `note`, null
        where drafting never stopped by itself.
        """
        data: dict[str, Any] = {
            "text": self.text,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "strategy": self.strategy,
            "dtype": self.dtype,
            "device": self.device,
            "finish_reason": self.finish_reason,
        }
        if self.speculation is not None:
            data["speculation"] = {**asdict(self.speculation), "note": self.speculation.note}
        return data
