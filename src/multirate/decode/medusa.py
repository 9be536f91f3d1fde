"""Medusa (Cai et al. 2024, arXiv 2401.10774): heads that guess several tokens ahead from one state.

Head i reads the final state of the position before the last token and guesses the token i places
behind that one: `LM head(x + SiLU(W_i x + b_i))` of the normed state x, W and b zero at the start. What
the heads rank highest is verified as a sparse tree of fixed shape. Here the heads share the base's LM
head, on a reduced vocabulary, and acceptance is exact in place of the paper's "typical" one.

Shapes: R rows, D hidden size, H heads, Vd draft vocabulary.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from multirate.decode.drafter import Draft, Drafter, DraftRequest
from multirate.decode.heads import DraftHead, fill_heads, load_heads, save_heads
from multirate.models.base import BaseModel

HEADS = 4
RANKS = 10  # candidates of a head that the tree may hold
MAX_NODES = 64

Node = tuple[int, ...]  # the rank taken from head 1, head 2, ...


class MedusaHeads(nn.Module):
    """The heads of one base model.

    Args:
        base: the model; frozen, not part of the state dict.
        ids: LongTensor `[Vd]`, the tokens that they may guess.
        num_heads: H.
    """

    def __init__(self, base: BaseModel, ids: Tensor, num_heads: int = HEADS) -> None:
        super().__init__()
        size = base.hidden_size
        self.blocks = nn.ModuleList(nn.Linear(size, size) for _ in range(num_heads))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        self.__dict__["head"] = DraftHead(base, ids)
        self.to(base.device)

    head: DraftHead

    def forward(self, h: Tensor) -> Tensor:
        """The final state h_N `[..., D]` to logits `[..., H, Vd]`."""
        x = self.head.norm(h)
        guesses = [x + F.silu(block(x)) for block in self.blocks]
        return self.head(torch.stack(guesses, dim=-2))


@lru_cache(maxsize=64)
def sparse_tree(
    accuracy: tuple[tuple[float, ...], ...], nodes: int, depth: int
) -> tuple[tuple[Node, ...], tuple[int, ...]]:
    """The likeliest root paths, taking head i's guess of rank r to be right with `accuracy[i][r]`.

    The paper's way to its fixed tree: nodes are added one by one, always the one with the highest
    product of accuracies along its path (section 2.3.3), up to so many nodes and so deep.

    Returns:
        The nodes, the all-first path in front, and the parent of each as in `Draft`.
    """
    queue: list[tuple[float, Node]] = [(-accuracy[0][0], (0,))]
    chosen: list[Node] = []
    while queue and len(chosen) < nodes:
        _, node = heapq.heappop(queue)
        chosen.append(node)
        following = [(*node[:-1], node[-1] + 1), (*node, 0)]
        for new in following:
            if len(new) <= min(depth, len(accuracy)) and new[-1] < len(accuracy[len(new) - 1]):
                chance = prod(accuracy[i][rank] for i, rank in enumerate(new))
                heapq.heappush(queue, (-chance, new))
    # Stable: the all-first path needs no move when it is accepted.
    ordered = sorted(chosen, key=any)
    places = {node: place for place, node in enumerate(ordered)}
    return tuple(ordered), tuple(places.get(node[:-1], -1) for node in ordered)


class MedusaDrafter(Drafter):
    """Drafts a fixed tree of the heads' best guesses; one pass of the heads, whatever its size.

    Args:
        heads: trained.
        accuracy: for each head the share of held-out positions at which its guess of rank 0, 1, ... is
            right; falling.
        expected_acceptance: of the heads' first guesses, each given those before it.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        accuracy: Sequence[Sequence[float]],
        expected_acceptance: Sequence[float] = (),
    ) -> None:
        self.heads = heads.eval()
        self.accuracy = tuple(tuple(ranks) for ranks in accuracy)
        self._expected = tuple(expected_acceptance)

    @classmethod
    def from_folder(cls, path: str | Path, base: BaseModel) -> MedusaDrafter:
        """Load what `save` wrote.

        Raises:
            MultirateError: as `heads.load_heads`.
        """
        config, tensors = load_heads(path, base, "medusa")
        heads = MedusaHeads(base, tensors.pop("draft_ids"), config["num_heads"])
        fill_heads(heads, heads.blocks, tensors)
        return cls(heads, config["accuracy"], config["expected_acceptance"])

    def save(self, path: str | Path) -> Path:
        """Save as a folder; see `heads.save_heads`."""
        head = self.heads.head
        return save_heads(
            path,
            base=head.base,
            method="medusa",
            config={
                "num_heads": len(self.heads.blocks),
                "accuracy": self.accuracy,
                "expected_acceptance": self._expected,
            },
            tensors={**self.heads.state_dict(), "draft_ids": head.ids},
        )

    @property
    def carry_layers(self) -> Sequence[int]:
        return (self.heads.head.base.num_layers,)

    @property
    def expected_acceptance(self) -> Sequence[float]:
        return self._expected

    @property
    def max_width(self) -> int:
        return MAX_NODES // len(self.accuracy)

    def draft(self, request: DraftRequest) -> Draft:
        head = self.heads.head
        logits = self.heads(request.states[head.base.num_layers][:, 0])
        ranked = head.ids[logits.topk(len(self.accuracy[0])).indices]  # [R, H, ranks]
        size = request.count * request.width if request.growth is None else MAX_NODES
        nodes, parents = sparse_tree(self.accuracy, size, request.count)
        device = request.last.device
        depths = torch.tensor([len(node) - 1 for node in nodes], device=device)
        ranks = torch.tensor([node[-1] for node in nodes], device=device)
        chances = [self.accuracy[len(node) - 1][node[-1]] for node in nodes]
        return Draft(
            ranked[:, depths, ranks],
            torch.tensor(parents, device=device),
            chances=[chances] * len(ranked),
            steps=(1,),  # all heads at once
        )
