"""A draft step compiled as one drafts what the steps of an eager stream do."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from test_compiled import libraries
from test_stream_steps import shaken
from tiny_models import VOCABULARY, tiny_model

from multirate.config.generation import GenerationOptions
from multirate.decode.draft_length import EvenGrowth
from multirate.decode.drafter import Draft, DraftRequest
from multirate.decode.loop import prefill
from multirate.decode.sampling import Sampler
from multirate.decode.stream import AcceleratorDrafter
from multirate.models.attention import group_queries
from multirate.models.base import BaseModel
from multirate.models.stack import Stack, run_stack
from multirate.streams.accelerator import Accelerator

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
TEXTS = [[5, 9, 11, 7, 5, 9, 11], [8, 3, 8], [20, 21, 22, 23, 24, 25, 26, 27]]


@torch.inference_mode()
def drafts(stream: Accelerator, texts: list[list[int]], **settings: Any) -> Draft:
    """What follows texts, whose last tokens are not in the arena yet."""
    rows, base = len(texts), BaseModel(stream.base.model)  # which is not compiled
    drafter = AcceleratorDrafter(stream).start(rows=rows, max_len=48)
    arena = stream.base.arena(rows=rows, max_len=48)
    _, states = prefill(base, [text[:-1] for text in texts], arena, stream.carry_layers,
                        observe=drafter.observe)  # fmt: skip
    options = GenerationOptions(temperature=settings.pop("temperature", 0.0), seed=3)
    request = DraftRequest(
        torch.tensor([text[-1] for text in texts]), [len(text) - 1 for text in texts], states, arena,
        texts, count=3, sampler=Sampler(options, device="cpu"), go_on=lambda *_: True, **settings,
    )  # fmt: skip
    return drafter.draft(request)


CASES: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (1, {"width": 3}),
    (1, {"width": 2, "temperature": 1.0}),
    (1, {"width": 3, "growth": EvenGrowth(1)}),
    (1, {"width": 3, "growth": EvenGrowth(3)}),
    (3, {"width": 2}),
    (3, {"width": 3, "growth": EvenGrowth(2)}),
]


@needs_compiler
@pytest.mark.parametrize(
    ("model", "preset", "changes", "batch"),
    [
        ("llama", "carry", {"draft_vocab_size": 31, "gates": (3, 4)}, True),
        ("gemma3_text", "eagle", {"draft_vocab_size": None}, False),  # and soft-capped logits
    ],
)
def test_compiled_drafts_are_eager_ones(
    model: str, preset: str, changes: dict[str, Any], batch: bool
) -> None:
    loaded = tiny_model(model)
    group_queries(loaded, kernel=False)
    base = BaseModel(loaded)
    stream = shaken(base, preset, **changes)
    cases = [case for case in CASES if batch or case[0] == 1]
    expected = [drafts(stream, TEXTS[:rows], **settings) for rows, settings in cases]
    base.compile("layers")
    AcceleratorDrafter(stream).warm_up(3 if batch else 1)
    compiled = libraries(base)
    for (rows, settings), want in zip(cases, expected, strict=True):
        found = drafts(stream, TEXTS[:rows], **settings)
        assert torch.equal(found.tokens, want.tokens)
        assert found.parent_lists() == want.parent_lists() and found.steps == want.steps
        for name in ("probs", "chances"):
            one, other = getattr(found, name), getattr(want, name)
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(
                    torch.as_tensor(one), torch.as_tensor(other), atol=1e-4, rtol=1e-4
                )
    assert libraries(base) == compiled > 0  # no case needed a library of its own
    assert base.compile_mode == "layers"


def test_a_draft_step_that_cannot_be_compiled_runs_layer_by_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = BaseModel(tiny_model("llama"))
    stream = shaken(base, "carry", draft_vocab_size=VOCABULARY)
    expected = drafts(stream, TEXTS, width=2)
    base.compile("layers")

    def layers_only(stack: Stack, *arguments: Any) -> list[torch.Tensor]:
        if stack.after is not None:
            raise RuntimeError("no compiler here")
        return run_stack(stack, *arguments)

    monkeypatch.setattr(base._compiled, "_ahead", layers_only)
    with pytest.warns(UserWarning, match="layer by layer: no compiler here$") as warnings:
        stream.warm_up(1)
    assert [str(w.message).split("so ")[1][:20] for w in warnings] == [
        "a first draft step r", "a draft step runs la"
    ]  # fmt: skip
    assert base.compile_mode == "layers"
    assert torch.equal(drafts(stream, TEXTS, width=2).tokens, expected.tokens)
