"""Blocks are what their definition says, although most of them is looked up."""

from __future__ import annotations

import pytest
import torch
from tiny_models import TINY_MODELS, tiny_model

from multirate.models import block as block_module
from multirate.models.base import SLIDING, BaseModel

DEPTHS = torch.tensor([0, 1, 1, 2])
SEES = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)


def seen_by_hand(start: int, n: int, length: int, window: int | None, tree: bool) -> torch.Tensor:
    """`[n, length]`, entry by entry."""
    seen = torch.zeros(n, length, dtype=torch.bool)
    for i in range(n):
        position = start + (int(DEPTHS[i]) if tree else i)
        for slot in range(length):
            j = slot - start
            key = slot if j < 0 or not tree else start + int(DEPTHS[min(j, n - 1)])
            before = j < 0 or (j < n and (bool(SEES[i, j]) if tree else j <= i))
            seen[i, slot] = before and (window is None or position - key < window)
    return seen


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("starts", [[3], [9], [4, 4], [7, 2, 5]])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "gpt_oss", "llama-eager"])
def test_a_block_by_hand(name: str, starts: list[int], tree: bool) -> None:
    base = BaseModel(tiny_model(name))
    shape = {"depths": DEPTHS, "block_mask": SEES} if tree else {}
    block = base.block(starts, 4, **shape)
    depths = DEPTHS if tree else torch.arange(4)
    assert block.visible == max(starts) + 4
    assert block.start == (starts[0] if len(set(starts)) == 1 else None)
    for row, start in enumerate(starts):
        assert torch.equal(block.slots[row], start + torch.arange(4))
        assert torch.equal(block.positions[row], start + depths)
        for kind, mask in block.masks.items():
            window = base.config.sliding_window if kind == SLIDING else None
            seen = seen_by_hand(start, 4, block.visible, window, tree)
            assert torch.equal(mask[row, 0], base.mask(seen))
    tensors = [block.slots, block.positions, *block.masks.values()]
    assert all(x.is_contiguous() and len(x) == len(starts) for x in tensors)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_rotary_embeddings_are_the_models_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly, although they are computed for many positions at once, and again when a text grows."""
    monkeypatch.setattr(block_module, "SHORTEST_TABLE", 8)
    base = BaseModel(tiny_model(name))
    for starts, n in [([2], 1), ([5], 6), ([30, 30], 2), ([21, 40], 3)]:
        block = base.block(starts, n)
        for kind, pair in base.rotary(block.positions).items():
            for found, own in zip(block.rotary[kind], pair, strict=True):
                assert torch.equal(found, own) and found.is_contiguous()


def test_frequencies_that_follow_the_text_are_not_kept() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    base = BaseModel(tiny_model("llama", rope_parameters=rope, max_position_embeddings=16))
    before = base.block([3], 2).rotary["full_attention"][0]
    base.block([40], 2)
    after = base.block([39], 2)
    assert torch.equal(
        after.rotary["full_attention"][0], base.rotary(after.positions)["full_attention"][0]
    )
    assert torch.equal(base.block([3], 2).rotary["full_attention"][0], before)


@pytest.mark.parametrize("starts", [[5], [4, 7]])
def test_a_position_alone_stands_where_it_stands_in_a_chain(starts: list[int]) -> None:
    base = BaseModel(tiny_model("mistral"))
    chain = base.block(starts, 5)
    for i in range(5):
        alone = base.block([start + i for start in starts], 1)
        seen = alone.visible
        assert seen == max(starts) + i + 1
        slots, positions, mask, cos, sin = chain.tensors((SLIDING,))
        expected = slots, positions, mask[:, :, :, :seen], cos, sin
        for x, y in zip(expected, alone.tensors((SLIDING,)), strict=True):
            assert torch.equal(x[:, :, i : i + 1] if x.ndim == 4 else x[:, i : i + 1], y)
