"""Measuring what a model's and a drafter's steps cost on this device.

They are measured as the generation loop runs them, with all that it does around them.
"""

from __future__ import annotations

import torch

from multirate.config.generation import GenerationOptions
from multirate.decode.costs import StepCosts, measure_costs, synchronizer
from multirate.decode.draft_length import MAX_WIDTH, DraftLength, EvenGrowth
from multirate.decode.drafter import Draft, Drafter, DraftRequest
from multirate.decode.loop import Rows, SpeculationCounts, verify
from multirate.decode.sampling import Sampler
from multirate.decode.stopping import StopChecker
from multirate.models.base import BaseModel

BUDGET = 4.0  # seconds; long contexts in large batches get fewer rounds


@torch.inference_mode()
def measure_steps(
    base: BaseModel, drafter: Drafter, rows: int, context: int, max_drafts: int, greedy: bool
) -> StepCosts:
    """Seconds of draft and verify steps.

    Args:
        base: the model.
        drafter: whose steps are measured.
        rows: batch rows.
        context: valid slots of each row.
        max_drafts: most drafts that are verified.
        greedy: or sampled.
    """
    base.warm_up(rows)
    drafter.warm_up(rows)
    max_len = context + max(max_drafts, drafter.max_beam + 1) + 1
    drafter = drafter.start(rows=rows, max_len=max_len)
    arena = base.arena(rows=rows, max_len=max_len)
    sampler = Sampler(
        GenerationOptions(temperature=0.0 if greedy else 1.0, seed=0), device=base.device
    )
    # No token twice where the vocabulary allows it: nothing to look up, the dear case.
    text = [i % base.config.vocab_size for i in range(context, -1, -1)]
    last = torch.zeros(rows, dtype=torch.long, device=base.device)
    size = (rows, 1, base.hidden_size)
    states = {
        i: torch.zeros(size, dtype=base.dtype, device=base.device) for i in drafter.carry_layers
    }
    batch = Rows(
        index=list(range(rows)),
        ids=[text] * rows,
        checkers=[
            StopChecker(
                (), tokenizer=None, max_new_tokens=max_len, context_length=None, prompt_tokens=1
            )
        ]
        * rows,
        counts=[SpeculationCounts()] * rows,
        lengths=[context] * rows,
        last=last,
        states=states,
        drafter=None,
    )
    policy = DraftLength(None, max_drafts=max_drafts, fixed=max_drafts)

    def run(n: int) -> None:
        made = _binary_tree(rows, n - 1, base.device, greedy)
        _, paths, outcomes = verify(base, batch, made, arena, sampler)
        policy.update(outcomes, made, paths)

    def draft(beam: int) -> None:
        drafter.draft(
            DraftRequest(
                last,
                batch.lengths,
                states,
                arena,
                batch.ids,
                count=2 if beam else 1,
                sampler=sampler,
                go_on=lambda *_: beam > 0,
                width=MAX_WIDTH if greedy else 1,
                growth=EvenGrowth(beam) if greedy else None,
            )
        )

    return measure_costs(
        run,
        draft,
        max_drafts=max_drafts,
        max_beam=drafter.max_beam if greedy else 1,
        synchronize=synchronizer(base.device),
        budget=BUDGET,
    )


def _binary_tree(rows: int, n: int, device: torch.device, greedy: bool) -> Draft:
    """Drafts to be verified; a chain where they are drawn."""
    if n == 0:
        return Draft(torch.zeros((rows, 0), dtype=torch.long, device=device))
    parents = [i // 2 - 1 if greedy else i - 1 for i in range(n)]
    return Draft.of_rows(
        [[0] * n] * rows, [parents] * rows, device=device, chances=[[0.5] * n] * rows
    )
