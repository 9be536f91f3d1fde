"""Draft trees: a chain of drafts with their runners-up beside them, verified in one masked pass.

Each draft step ranks its whole vocabulary anyway, so its second and third choices are free; and where a
pass of a few more rows costs little, verifying them is nearly free too. The tree is a caterpillar: the
chain of first choices goes on, a runner-up is a leaf. A leaf saves the step at which the chain is wrong.

    last ── c_1 ──── c_2 ──── c_3          k = 3 drafts, width 2
      └─ s_1  └─ s_2   └─ s_3

Entries of the block: `last`, c_1 .. c_k, then the siblings of c_1, of c_2, ... So the chain's keys and
values lie where they belong; those of an accepted leaf are moved there.

Greedy acceptance is exact: what stays is what greedy decoding would have written. (Static trees and tree
attention: SpecInfer, arXiv 2305.09781; Medusa, arXiv 2401.10774.)

Shapes: R rows, k drafts, w width, n = 1 + k w block entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from multirate.decode.acceptance import Acceptance, accept_greedy


@cache
def tree_layout(k: int, width: int) -> tuple[Tensor, Tensor]:
    """Depths and mask of a tree's block.

    Returns:
        LongTensor `[n]`, each entry's depth (0 = the last token), and bool `[n, n]`, which entries an
        entry sees: its ancestors and itself.
    """
    chain = torch.arange(k + 1)
    leaves = torch.arange(1, k + 1).repeat_interleave(width - 1)
    depths = torch.cat([chain, leaves])
    mask = torch.zeros(len(depths), len(depths), dtype=torch.bool)
    mask[:, : k + 1] = chain < depths[:, None]
    mask.fill_diagonal_(True)
    return depths, mask


@dataclass(frozen=True, eq=False)
class TreeAcceptance:
    """The outcome of verifying a tree.

    Attributes:
        acceptance: as of a chain: how many tokens stay, and the model's own next one.
        drafts: LongTensor `[R, k]`: the tokens that stay stand in the first `num_accepted` places.
        entry: LongTensor `[R]`, the block entry of the last token that stays.
        rank: LongTensor `[R]`: -1 if that is `last` or of the chain, else which sibling it is, from 0;
            its depth is then `num_accepted`.
    """

    acceptance: Acceptance
    drafts: Tensor
    entry: Tensor
    rank: Tensor


def accept_tree(
    drafts: Tensor, siblings: Tensor, lengths: Tensor, targets: Tensor
) -> TreeAcceptance:
    """Keep the longest path of the tree that greedy decoding would have written itself.

    Args:
        drafts: LongTensor `[R, k]`, the chain.
        siblings: LongTensor `[R, k, w - 1]`, different from the draft beside them and each other.
        lengths: LongTensor `[R]`, depth to which each row's tree is valid, 0..k.
        targets: LongTensor `[R, n]`, argmax of the target's scores at each block entry.
    """
    rows, k = drafts.shape
    assert siblings.shape[:2] == (rows, k) and targets.shape[1] == 1 + k + k * siblings.shape[2]
    row = torch.arange(rows, device=drafts.device)
    chain = accept_greedy(drafts, lengths, targets[:, : k + 1]).num_accepted  # [R]
    place = chain.clamp(max=k - 1)  # where the chain went wrong, if it did
    wanted = targets[row, place]
    found = (siblings[row, place] == wanted[:, None]) & (chain < lengths)[:, None]  # [R, w - 1]
    by_sibling = found.any(1)
    rank = torch.where(by_sibling, found.to(torch.long).argmax(1), -1)
    leaf = 1 + k + place * siblings.shape[2] + rank
    entry = torch.where(by_sibling, leaf, chain)
    kept = drafts.clone()
    kept[row, place] = torch.where(by_sibling, wanted, drafts[row, place])
    accepted = chain + by_sibling
    return TreeAcceptance(Acceptance(accepted, targets[row, entry]), kept, entry, rank)
