"""How fast an accelerated stream can go, and how many parameters it needs (M2R2, Figs. 2b and 10a).

The rate is varied with the parameter budget and the data held fixed, which the paper does not do: the
same k `lean` layers, of the same rank and heads, started from the same closed-form fit and trained on
the same text for the same steps, aim from the same gate E at h_{E+R}, h_{E+2R}, ..., h_{E+kR}.
"""

from __future__ import annotations

from math import floor
from typing import Any

import torch

from multirate.analyze.stacks import (
    Stack,
    closed_form,
    end_states,
    judge,
    linear_fit,
    stack_moments,
    train_stack,
)
from multirate.analyze.states import cosine, next_tokens, share
from multirate.analyze.tasks import Study, Task, Tick, span_targets

RANKS = (1, 2, 4, 8, 16, 32, 64, 128)


def rate_stacks(study: Study) -> list[tuple[float, Stack]]:
    """Every rate from 1 to the one that reaches h_N, from the embedding and from the middle gate."""
    n, k = study.num_layers, study.stack_layers
    found: list[tuple[float, Stack]] = []
    for start in sorted({0, study.middle_gate}):
        fastest = (n - start) / k
        for rate in [*range(1, floor(fastest) + 1), fastest]:
            targets = tuple(min(n, floor(start + i * rate + 0.5)) for i in range(1, k + 1))
            if (start, targets) not in [(s.start, s.targets) for _, s in found]:
                found.append((float(rate), study.lean(start, targets)))
    return found


def rate_layers(study: Study) -> set[int]:
    """Slow states that the rate analysis needs."""
    return {i for _, stack in rate_stacks(study) for i in (stack.start, *stack.targets)}


def rate_tasks(study: Study, result: dict[str, Any]) -> list[Task]:
    """Fill `result` with the numbers of every rate."""
    k, stacks = study.stack_layers, rate_stacks(study)
    training = study.training("lean", kl_weight=0.0)
    result |= {
        "held_fixed": f"{k} lean layers of rank {study.rank} with {study.lean_heads} query heads, "
        f"closed-form start, then {training.epochs} passes over the same text on the mean cosine "
        f"distance to the targets, learning rate {training.learning_rate:g}, the same seed",
        "layers": k,
        "rank": study.rank,
        "heads": study.lean_heads,
        "parameters": sum(p.numel() for p in stacks[0][1].layers(study.base).parameters()),
        "definition": {
            "target_cosine": "of the stack's end with the slow state that its last layer aims at",
            "target_agreement": "same next token as that state, both read by the final norm and LM head",
            "cosine": "of the stack's end with h_N",
            "agreement": "same next token as the full model",
            "readout_agreement": "the same after a ridge regression of h_N on the stack's end",
            "start_cosine": "of the gate's state with the target: a stack that does nothing",
            "state_agreement": "of the target itself with the full model, read by the LM head",
        },
        "starts": {},
    }

    def task(rate: float, stack: Stack) -> Task:
        def run(tick: Tick) -> None:
            layers = _distilled(study, stack, kl_weight=0.0, tick=tick)
            n, target = study.num_layers, stack.targets[-1]
            end = end_states(layers, stack, study.heldout)
            readout = linear_fit(end_states(layers, stack, study.train), study.train.state(n))
            goal = study.heldout.state(target)
            tokens = next_tokens(study.base, readout(end))
            row = {
                "rate": rate,
                "targets": list(stack.targets),
                **judge(study.heldout, end, target),
                "readout_agreement": share(tokens == study.heldout.choices),
                "start_cosine": cosine(study.heldout.state(stack.start), goal),
                "state_agreement": share(study.heldout.tokens(target) == study.heldout.choices),
            }
            result["starts"].setdefault(str(stack.start), []).append(row)

        work = study.lean_work(k) + 2 * study.judge_work()
        return Task(f"rate {rate:.3g} from layer {stack.start}", work, run)

    return [task(rate, stack) for rate, stack in stacks]


def rank_layers(study: Study) -> set[int]:
    """Slow states that the rank ablation needs."""
    start = study.middle_gate
    return {start, *span_targets(study.num_layers, start, study.stack_layers)}


def rank_tasks(study: Study, result: dict[str, Any]) -> list[Task]:
    """Fill `result` with the numbers of every rank up to the hidden size."""
    start, k = study.middle_gate, study.stack_layers
    targets = span_targets(study.num_layers, start, k)
    training = study.training("lean", kl_weight=1.0)
    result |= {
        "start": start,
        "targets": list(targets),
        "heads": study.lean_heads,
        "training": f"{training.epochs} passes on cosine distance plus divergence from the full "
        f"model's next-token distribution, learning rate {training.learning_rate:g}",
        "ranks": [],
    }
    moments: list[Any] = []  # of the inputs and targets that all ranks share

    def task(rank: int) -> Task:
        def run(tick: Tick) -> None:
            if not moments:
                moments.append(stack_moments(study.train, study.lean(start, targets)))
            stack = study.lean(start, targets, rank)
            torch.manual_seed(study.options.seed)
            layers = stack.layers(study.base)
            closed_form(layers, stack, moments[0])
            fitted = judge(study.heldout, end_states(layers, stack, study.heldout))
            train_stack(layers, stack, study.train, study.vocabulary, training, tick=tick)
            row = {
                "rank": rank,
                "parameters": sum(p.numel() for p in layers.parameters()),
                "closed_form": fitted,
                "trained": judge(study.heldout, end_states(layers, stack, study.heldout)),
            }
            result["ranks"].append(row)

        return Task(f"rank {rank}", study.lean_work(k) + study.judge_work(), run)

    return [task(rank) for rank in RANKS if rank <= study.shape.hidden_size]


def _distilled(study: Study, stack: Stack, *, kl_weight: float, tick: Tick) -> torch.nn.ModuleList:
    """A stack after its closed-form start and training."""
    torch.manual_seed(study.options.seed)
    layers = stack.layers(study.base)
    closed_form(layers, stack, stack_moments(study.train, stack))
    training = study.training("lean", kl_weight=kl_weight)
    train_stack(layers, stack, study.train, study.vocabulary, training, tick=tick)
    return layers
