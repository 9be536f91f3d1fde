"""Graphs of stacks: what is copied, masked and kept, with a stand-in for CUDA's capture.

The stand-in runs a captured function again on the tensors it was captured with, into the tensors that
it returned then: what CUDA does, but for the speed. A test at the end runs the real thing where it can.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor

from multirate.config.errors import MultirateError
from multirate.decode.engine import Engine
from multirate.decode.stream import AcceleratorDrafter
from multirate.models import base as base_module
from multirate.models import cuda_graphs
from multirate.models.base import BaseModel
from multirate.models.cuda_graphs import (
    MAX_GRAPHS,
    STRIDE,
    ArenaPool,
    GraphedStacks,
    Run,
    stretched,
)
from multirate.models.stack import Stack
from multirate.streams.accelerator import Accelerator


class StandIn:
    """Counts captures and replays."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, run: Run) -> tuple[Callable[[], None], list[Tensor]]:
        self.captures += 1
        out = [x.clone() for x in run()]

        def replay() -> None:
            self.replays += 1
            for target, source in zip(out, run(), strict=True):
                target.copy_(source)

        return replay, out


def whole(base: BaseModel) -> Stack:
    return Stack(tuple(base.layers), tuple(base.layer_types))


@torch.inference_mode()
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_one_graph_serves_a_growing_text(name: str) -> None:
    base = BaseModel(tiny_model(name))
    stand_in = StandIn()
    graphs, stack = GraphedStacks(stand_in), whole(base)
    ids = torch.randint(base.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
    arenas = [base.arena(rows=2, max_len=2 * STRIDE) for _ in range(2)]
    starts = [0, 0]
    for n in (5, 1, 1, 4, 1):
        block = base.block(starts, n)
        at = torch.tensor(starts)[:, None] + torch.arange(n)
        h = base.embed(ids.gather(1, at))
        want = base.run_layers(h, 0, base.num_layers, block, arenas[0])
        memory = [arenas[1].memory(i) for i in range(base.num_layers)]
        found = graphs(stack, (h,), block, memory)[-1]
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
        starts = [s + n - lag for s, lag in zip(starts, (0, 1 if n == 5 else 0), strict=True)]
    assert stand_in.captures == 3  # of blocks of 5, 1 and 4
    assert stand_in.replays == 5


@torch.inference_mode()
def test_shapes_arenas_and_lengths_have_graphs_of_their_own_and_old_ones_go() -> None:
    base = BaseModel(tiny_model("llama"))
    stand_in = StandIn()
    graphs, stack = GraphedStacks(stand_in), whole(base)

    def run(arena: object, start: int, n: int) -> None:
        block = base.block([start], n)
        memory = [arena.memory(i) for i in range(base.num_layers)]  # type: ignore[attr-defined]
        graphs(stack, (base.embed(torch.zeros(1, n, dtype=torch.long)),), block, memory)

    first, second = (base.arena(rows=1, max_len=STRIDE + 50) for _ in range(2))
    for arena, start, n, captures in (
        (first, 3, 1, 1), (first, 200, 1, 1), (first, 3, 2, 2), (second, 3, 1, 3),
        (first, STRIDE, 1, 4), (first, STRIDE + 40, 1, 4), (first, 3, 1, 4),
    ):  # fmt: skip
        run(arena, start, n)
        assert stand_in.captures == captures, (start, n)
    for n in range(3, 3 + MAX_GRAPHS):
        run(first, 0, n)
    assert len(graphs._graphs) == MAX_GRAPHS
    run(first, 3, 1)  # forgotten since
    assert stand_in.captures == 4 + MAX_GRAPHS + 1


@torch.inference_mode()
def test_added_slots_are_masked_in_both_kinds_of_masks() -> None:
    base = BaseModel(tiny_model("llama"))
    block = base.block([2], 2)
    longer = stretched(block, 6)
    (mask,) = set(longer.masks.values())
    assert longer.visible == 6 and mask.shape == (1, 1, 2, 6)
    assert mask[0, 0].tolist() == [[True, True, True, False, False, False],
                                   [True, True, True, True, False, False]]  # fmt: skip
    additive = stretched(
        BaseModel(tiny_model("llama", attn_implementation="eager")).block([2], 2), 5
    )
    (mask,) = set(additive.masks.values())
    assert mask[0, 0, :, 4].tolist() == [torch.finfo(torch.float32).min] * 2
    assert stretched(block, 4) is block


def test_memory_is_lent_again_when_its_arena_is_gone() -> None:
    class Arena: ...

    pool, cpu = ArenaPool(), torch.device("cpu")

    def borrow(length: int) -> Tensor:
        return pool.borrow((2, 3, length, 4), slots=2, dtype=torch.float32, device=cpu)

    arena, memory = Arena(), borrow(STRIDE - 10)
    assert memory.shape == (2, 3, STRIDE, 4) and not memory.any()
    memory.fill_(7)
    pool.give_back_with(arena, memory)
    other = borrow(STRIDE)
    assert other.data_ptr() != memory.data_ptr()  # the first one is still in use
    del arena
    gc.collect()
    again = borrow(STRIDE - 3)
    assert again.data_ptr() == memory.data_ptr() and not again.any()
    assert borrow(STRIDE + 1).shape[2] == 2 * STRIDE


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Lets models on a CPU be captured."""
    found = StandIn()
    monkeypatch.setattr(cuda_graphs, "CudaCapture", lambda: found)
    monkeypatch.setattr(base_module, "compile_mode", lambda mode, device: mode)
    return found


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_text_is_generated_through_graphs(stand_in: StandIn, name: str) -> None:
    base = BaseModel(tiny_model(name))
    stream = Accelerator.from_preset("carry", base, rank=2)
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(3))
    engine = Engine(base, drafter=AcceleratorDrafter(stream))
    prompts = [[5, 9, 11, 7], [8, 3, 8, 30, 31], [6]]
    options = {"max_new_tokens": 14, "num_draft_tokens": 3, "ignore_eos": True}
    want = [
        engine.generate(prompts, strategy="plain", **options),
        engine.generate(prompts, **options),
    ]
    base.compile("graphs")
    for _ in range(2):
        found = [engine.generate(prompts, strategy="plain", **options),
                 engine.generate(prompts, **options)]  # fmt: skip
        for kind in (0, 1):
            assert [r.token_ids for r in found[kind]] == [r.token_ids for r in want[kind]]
        drafted = [r[1][0].speculation.num_accepted_tokens for r in (want, found)]
        assert drafted[0] == drafted[1]
        captures, stand_in.captures = stand_in.captures, 0
        assert stand_in.replays > captures
    assert captures == 0  # the second text went through what the first one captured


def test_graphs_are_refused_on_a_cpu() -> None:
    with pytest.raises(
        MultirateError, match=r"CUDA graphs, and this model is on cpu. Use one of: auto"
    ):
        BaseModel(tiny_model("llama")).compile("graphs")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.inference_mode()
def test_real_graphs_compute_what_eager_layers_do() -> None:
    base = BaseModel(tiny_model("llama").to("cuda"))
    graphs, stack = GraphedStacks(), whole(base)
    arenas = [base.arena(rows=1, max_len=STRIDE) for _ in range(2)]
    for start, n in ((0, 6), (6, 1), (7, 1), (8, 3), (11, 3)):
        h = base.embed(torch.full((1, n), start, device="cuda"))
        block = base.block([start], n)
        want = base.run_layers(h, 0, base.num_layers, block, arenas[0])
        memory = [arenas[1].memory(i) for i in range(base.num_layers)]
        torch.testing.assert_close(
            graphs(stack, (h,), block, memory)[-1], want, rtol=1e-4, atol=1e-4
        )
