"""Draft trees: several guesses for what comes next, verified in one masked pass.

A tree is drawn by its parents. Entries of the verified block: 0 is `last`, the last token of the text,
entry i is draft i - 1. An entry sees the text, its ancestors and itself, so every root path is scored
as if it stood alone (tree attention: SpecInfer, arXiv 2305.09781; Medusa, arXiv 2401.10774).

    last ── 1 ── 2 ── 3        parents of entries 1..6: 0, 1, 2, 0, 1, 4
      │     └─ 5
      └──── 4 ── 6

A chain is the tree without branches. Keys and values of the accepted path are moved behind the text
where they do not lie there already, so drafters should put their likeliest path first.

Shapes: R rows, n drafts, n + 1 block entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

KEPT = 256  # shapes that are not made anew; those of single rows come again and again


@dataclass(frozen=True, eq=False)
class Tree:
    """The shape of the drafts of a batch; all tensors have one row for all, or one for each.

    Attributes:
        parents: LongTensor `[R or 1, n]`, the parent's block entry, below the entry's own.
        depths: LongTensor `[R or 1, n + 1]`, of block entries: 0 = the last token.
        mask: bool `[R or 1, n + 1, n + 1]`, which entries an entry sees: its ancestors and itself.
    """

    parents: Tensor
    depths: Tensor
    mask: Tensor

    @staticmethod
    def of(parents: Sequence[Sequence[int]], device: torch.device) -> Tree:
        """The tree of drafts' parents, one list of n a row, in which -1 stands for the last token."""
        return _tree(tuple(map(tuple, parents)), device)

    def row(self, index: int) -> Tree:
        """The tree of one row, `[1, ...]`."""
        if len(self.parents) == 1:
            return self
        here = slice(index, index + 1)
        return Tree(self.parents[here], self.depths[here], self.mask[here])

    @staticmethod
    def chain(n: int, device: torch.device) -> Tree:
        """The tree of n drafts one after another."""
        return _chain(n, str(device))


@lru_cache(maxsize=KEPT)
def _tree(parents: tuple[tuple[int, ...], ...], device: torch.device) -> Tree:
    entries = len(parents[0]) + 1
    seen, depths = bytearray(), []  # the mask a byte an entry; a tensor of lists takes longer
    for row in parents:
        lines, depth = [bytearray(entries)], [0]
        lines[0][0] = 1
        for entry, parent in enumerate(row, 1):
            line = lines[parent + 1].copy()
            line[entry] = 1
            lines.append(line)
            depth.append(depth[parent + 1] + 1)
        seen += b"".join(lines)
        depths.append(depth)
    above = [[parent + 1 for parent in row] for row in parents]
    with torch.inference_mode(False):
        mask = torch.frombuffer(seen, dtype=torch.bool).view(len(parents), entries, entries)
        return Tree(
            torch.tensor(above, dtype=torch.long, device=device).view(len(parents), entries - 1),
            torch.tensor(depths, device=device),
            mask.to(device),
        )


@cache
def _chain(n: int, device: str) -> Tree:
    with torch.inference_mode(False):
        entries = torch.arange(n + 1, device=device)
        mask = entries <= entries[:, None]
        return Tree(entries[None, :n], entries[None], mask[None])


def path_to(entry: int, parents: Sequence[int]) -> list[int]:
    """Block entries from the first draft of a root path to `entry`, given parents as in `Tree`."""
    path = []
    while entry > 0:
        path.append(entry)
        entry = parents[entry - 1]
    return path[::-1]


def caterpillar(drafts: Tensor, siblings: Tensor) -> tuple[Tensor, Tensor]:
    """A chain with its runners-up beside it, as leaves.

    Each draft step ranks its whole vocabulary anyway, so its second and third choices are free; a leaf
    saves the step at which the chain is wrong.

    Args:
        drafts: LongTensor `[R, k]`, the chain.
        siblings: LongTensor `[R, k, w - 1]`, the runners-up of each draft.

    Returns:
        LongTensor `[R, k w]` and `[k w]`, tokens and parents as in `Draft`: the chain comes first.
    """
    chain = torch.arange(-1, drafts.shape[1] - 1, device=drafts.device)
    leaves = chain.repeat_interleave(siblings.shape[2])
    return torch.cat([drafts, siblings.flatten(1)], dim=1), torch.cat([chain, leaves])
