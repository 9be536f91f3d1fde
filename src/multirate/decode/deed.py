"""DEED (Tang et al. 2023, arXiv 2311.08623) as a drafter: exit heads whose confidence decides.

Exit heads stand at several layers of the base model: a linear adaptation module each, then the shared
final norm and LM head. A drafted token leaves at the first head that is sure enough, so its depth
varies; where not even the deepest head is sure, the draft ends. A later token that goes deeper than an
earlier one needs that one's keys and values there: they are computed just in time, in the same pass.
The paper decodes with the heads alone (an encoder-decoder, lossy); here the whole model verifies.

Shapes: R rows, n positions, D hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from multirate.config.errors import MultirateError
from multirate.decode.drafter import MODEL, RANKED, Draft, Drafter, DraftRequest, Growth
from multirate.decode.growth import draft_chain
from multirate.decode.heads import DraftHead, fill_heads, load_heads, save_heads
from multirate.models.base import BaseModel

CONFIDENCE = 0.6  # chance of the best token from which on a head is sure


class ExitHeads(nn.Module):
    """Exit heads of one base model.

    Args:
        base: the model; frozen, not part of the state dict.
        ids: LongTensor `[Vd]`, the tokens that they may guess.
        exits: rising numbers of layers after which there is a head.

    Raises:
        MultirateError: exits that the model does not have.
    """

    def __init__(self, base: BaseModel, ids: Tensor, exits: Sequence[int]) -> None:
        super().__init__()
        self.exits = tuple(exits)
        if (
            not self.exits
            or list(self.exits) != sorted(set(self.exits))
            or not 1 <= self.exits[0] <= self.exits[-1] <= base.num_layers
        ):
            raise MultirateError(
                f"exits={list(exits)} must be rising numbers of layers from 1 to {base.num_layers}."
            )
        size = base.hidden_size
        self.adapters = nn.ModuleList(nn.Linear(size, size) for _ in self.exits)
        self.__dict__["head"] = DraftHead(base, ids)
        self.to(base.device)

    head: DraftHead

    def forward(self, h: Tensor, index: int) -> Tensor:
        """The state at exit `index`, `[..., D]`, to logits `[..., Vd]`."""
        return self.head(self.head.norm(self.adapters[index](h)))


def default_exits(num_layers: int) -> tuple[int, ...]:
    """Four exits, evenly spread before the last layer."""
    return tuple(sorted({max(1, round(num_layers * i / 5)) for i in range(1, 5)}))


@dataclass(frozen=True)
class _WhileSure:
    """A growth that ends where the drafter is not sure."""

    growth: Growth
    sure: Callable[[], bool]

    def chance(self, claimed: float, kind: int = MODEL) -> float:
        return self.growth.chance(claimed, kind)

    def pays(self, chance: float = 1.0) -> bool:
        return self.growth.pays(chance)

    def beam(self, depth: int, chances: Sequence[Sequence[float]], limit: int) -> int:
        return self.growth.beam(depth, chances, limit) if self.sure() else 0


class DeedDrafter(Drafter):
    """Drafts with the first layers of the base model, as many as each token needs.

    Rows of a batch go equally deep: their mean confidence decides.

    Args:
        heads: trained.
        confidence: chance of its best token from which on a head is sure.
        expected_acceptance: of drafts, each given those before it.
    """

    def __init__(
        self,
        heads: ExitHeads,
        *,
        confidence: float = CONFIDENCE,
        expected_acceptance: Sequence[float] = (),
    ) -> None:
        self.heads, self.confidence = heads.eval(), confidence
        self._expected = tuple(expected_acceptance)

    @classmethod
    def from_folder(cls, path: str | Path, base: BaseModel) -> DeedDrafter:
        """Load what `save` wrote.

        Raises:
            MultirateError: as `heads.load_heads`.
        """
        config, tensors = load_heads(path, base, "deed")
        heads = ExitHeads(base, tensors.pop("draft_ids"), config["exits"])
        fill_heads(heads, heads.adapters, tensors)
        return cls(
            heads,
            confidence=config["confidence"],
            expected_acceptance=config["expected_acceptance"],
        )

    def save(self, path: str | Path) -> Path:
        """Save as a folder; see `heads.save_heads`."""
        head = self.heads.head
        return save_heads(
            path,
            base=head.base,
            method="deed",
            config={
                "exits": self.heads.exits,
                "confidence": self.confidence,
                "expected_acceptance": self._expected,
            },
            tensors={**self.heads.state_dict(), "draft_ids": head.ids},
        )

    @property
    def expected_acceptance(self) -> Sequence[float]:
        return self._expected

    @property
    def max_width(self) -> int:
        return RANKED

    def draft(self, request: DraftRequest) -> Draft:
        heads, base = self.heads, self.heads.head.base
        states: list[Tensor] = []  # [R, 1, D] of each drafted-from position, where it stands
        passed: list[int] = []  # exits that it has passed; never rising from position to position
        sure = True

        def deeper(made: int) -> Tensor:
            """Take the last position to its next exit, and those that are no further along with it."""
            level = passed[-1]
            n = passed.count(level)
            block = base.block([length + made + 1 - n for length in request.lengths], n)
            start = heads.exits[level - 1] if level else 0
            h = torch.cat(states[-n:], dim=1)
            h = base.run_layers(h, start, heads.exits[level], block, request.arena)
            states[-n:] = h.split(1, dim=1)
            passed[-n:] = [level + 1] * n
            return heads(h[:, -1], level)

        def step(made: int, token: Tensor) -> Tensor:
            nonlocal sure
            states.append(base.embed(token[:, None]))
            passed.append(0)
            sure = False
            while not sure and passed[-1] < len(heads.exits):
                logits = deeper(made)
                sure = float(logits.softmax(-1).amax(-1).mean()) >= self.confidence
            return logits

        return draft_chain(
            step,
            replace(
                request,
                go_on=lambda made, chance: sure and request.go_on(made, chance),
                growth=request.growth and _WhileSure(request.growth, lambda: sure),
            ),
            heads.head.ids,
        )
