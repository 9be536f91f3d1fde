"""Draft trees: layout, greedy acceptance and losslessness."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from multirate.decode.tree import accept_tree, tree_layout


def test_layout_by_hand() -> None:
    depths, mask = tree_layout(2, 2)  # last, c1, c2, s1, s2
    assert depths.tolist() == [0, 1, 2, 1, 2]
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1],
    ]
    depths, mask = tree_layout(3, 1)
    assert depths.tolist() == [0, 1, 2, 3] and torch.equal(mask, torch.ones(4, 4).tril().bool())


def outcome(
    drafts: list[int], siblings: list[list[int]], targets: list[int], length: int | None = None
) -> tuple[list[int], int, bool]:
    found = accept_tree(
        torch.tensor([drafts]),
        torch.tensor([siblings]),
        torch.tensor([len(drafts) if length is None else length]),
        torch.tensor([targets]),
    )
    block = found.acceptance.blocks(found.drafts)[0]
    return block, int(found.entry), bool(found.by_sibling)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        # entries: last, c1 = 11, c2 = 12, siblings of c1 (21, 31), of c2 (22, 32)
        ([11, 12, 13, 0, 0, 0, 0], ([11, 12, 13], 2, False)),  # the whole chain and the bonus
        ([11, 32, 0, 0, 0, 0, 77], ([11, 32, 77], 6, True)),  # second runner-up of c2
        ([21, 0, 0, 88, 0, 0, 0], ([21, 88], 3, True)),  # runner-up of c1; the chain ends there
        ([31, 12, 0, 0, 99, 0, 0], ([31, 99], 4, True)),
        ([55, 12, 0, 0, 0, 0, 0], ([55], 0, False)),  # nothing fits
        (
            [11, 21, 0, 5, 5, 5, 5],
            ([11, 21], 1, False),
        ),  # a sibling of another depth does not count
    ],
)
def test_acceptance_by_hand(targets: list[int], expected: tuple[list[int], int, bool]) -> None:
    assert outcome([11, 12], [[21, 31], [22, 32]], targets) == expected


def test_nothing_stays_beyond_a_rows_own_length() -> None:
    assert outcome([11, 12], [[21], [22]], [11, 12, 13, 0, 0], length=1) == ([11, 12], 1, False)
    assert outcome([11, 12], [[21], [22]], [11, 22, 13, 0, 7], length=1) == ([11, 22], 1, False)
    assert outcome([11, 12], [[21], [22]], [21, 0, 0, 7, 0], length=0) == ([21], 0, False)


def brute_force(drafts: Tensor, siblings: Tensor, length: int, targets: Tensor) -> list[int]:
    """Walk the tree token by token."""
    k, others = siblings.shape
    block, entry = [], 0
    for depth in range(length):
        block.append(int(targets[entry]))
        if block[-1] == int(drafts[depth]):
            entry = depth + 1
            continue
        hits = (siblings[depth] == block[-1]).nonzero()
        if len(hits) == 0:
            return block
        return [*block, int(targets[1 + k + depth * others + int(hits[0])])]
    return [*block, int(targets[entry])]


def test_acceptance_against_a_walk() -> None:
    g = torch.Generator().manual_seed(0)
    sibling_hits = 0
    for _ in range(300):
        k, width = (
            int(torch.randint(1, 5, (), generator=g)),
            int(torch.randint(2, 5, (), generator=g)),
        )
        ranked = torch.rand(3, k, 6, generator=g).argsort(-1)[..., :width]
        targets = torch.randint(0, 6, (3, 1 + k * width), generator=g)
        lengths = torch.randint(0, k + 1, (3,), generator=g)
        found = accept_tree(ranked[..., 0], ranked[..., 1:], lengths, targets)
        blocks = found.acceptance.blocks(found.drafts)
        for r in range(3):
            expected = brute_force(ranked[r, :, 0], ranked[r, :, 1:], int(lengths[r]), targets[r])
            assert blocks[r] == expected
        sibling_hits += int(found.by_sibling.sum())
    assert sibling_hits > 100
