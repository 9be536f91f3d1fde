"""What reaches the final state at every gate, by every means, and at what price (M2R2, Fig. 6).

Depth is the number of layers that run one after the other before a state is ready. At exit depth E a
state can be had from h_E itself (raw, linear, LITE-style, carry), or from an accelerated stream that
started at the gate before and has run one accelerated layer beside each slow one since (lean, tied).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from multirate.analyze import costs
from multirate.analyze.stacks import (
    ExitHead,
    Stack,
    closed_form,
    end_states,
    judge,
    linear_fit,
    stack_moments,
    train_exit_head,
    train_stack,
)
from multirate.analyze.states import Batch, CachedText, cosine, mixed_precision, share
from multirate.analyze.tasks import LEARNING_RATES, Study, Task, Tick
from multirate.config.accelerator import preset_config
from multirate.config.schedule import RateSchedule
from multirate.models.arena import KVArena
from multirate.streams.accelerator import Accelerator, Carried

INTERVALS = 6
METHODS = {
    "raw exit": "h_E as it is, through the final norm and LM head",
    "linear": "ridge regression of h_N on h_E",
    "LITE-style": "own norm and D x D correction of h_E, trained on the divergence from the full "
    "model's next-token distribution; the base and its LM head stay frozen (LITE tunes the whole model)",
    "carry": "ridge regression of h_N on h_E and the previous position's deep states",
    "lean": "the paper's layers from the gate before, trained on cosine distance and divergence",
    "tied": "base layers with low-rank adapters from the gate before, trained likewise",
}


def exits(num_layers: int) -> tuple[int, ...]:
    """Up to five exit depths, evenly spaced, embedding and final state left out."""
    found = {round(j * num_layers / INTERVALS) for j in range(1, INTERVALS)}
    return tuple(sorted(found - {0, num_layers}))


def carried_layers(study: Study) -> tuple[int, ...]:
    """The deep states that the `carry` preset hands over for this model."""
    shape = study.shape
    return preset_config(
        "carry",
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        num_attention_heads=shape.num_heads,
    ).carry_layers


def interval_targets(study: Study) -> dict[int, tuple[int, tuple[int, ...]]]:
    """For every exit: the gate before it and the targets of the accelerated layers between."""
    gates = (0, *exits(study.num_layers))
    schedule = RateSchedule(study.num_layers, gates)
    return {
        stop: (start, tuple(schedule.target_layer(i) for i in range(start + 1, stop + 1)))
        for start, stop in pairwise(gates)
    }


def alignment_layers(study: Study, accelerator: Accelerator | None) -> set[int]:
    """Slow states that this analysis needs."""
    needed = set(carried_layers(study))
    for stop, (start, targets) in interval_targets(study).items():
        needed |= {start, stop, *targets}
    if accelerator is not None:
        config = accelerator.config
        needed |= {0, *config.gates[:-1], *accelerator.carry_layers}
        needed |= {config.source_layer(i) + 1 for i in config.schedule.layers}
    return needed


def alignment_tasks(
    study: Study, accelerator: Accelerator | None, result: dict[str, Any]
) -> list[Task]:
    """Fill `result` with the quality and price of every method at every exit."""
    tied_epochs = max(1, study.options.epochs // 2)
    result |= {
        "definition": {
            "depth": "layers that run one after the other before the state is ready",
            "cosine": "with h_N, mean over held-out positions",
            "agreement": "share of held-out positions with the full model's next token",
        },
        "exits": list(exits(study.num_layers)),
        "carried_layers": list(carried_layers(study)),
        "rank": study.rank,
        "lean_heads": study.lean_heads,
        "epochs": {"LITE-style": study.options.epochs, "lean": study.options.epochs,
                   "tied": tied_epochs},
        "learning_rates": LEARNING_RATES,
        "methods": {name: {"what": what, "exits": []} for name, what in METHODS.items()},
    }  # fmt: skip
    tasks = []
    for stop, (start, targets) in interval_targets(study).items():
        for name, fit in _READOUTS.items():
            tasks.append(_readout_task(study, result, name, stop, fit))
        for stack, epochs in (
            (study.lean(start, targets), study.options.epochs),
            (study.tied(start, targets), tied_epochs),
        ):
            tasks.append(_stack_task(study, result, stop, stack, epochs))
    if accelerator is not None:
        tasks.append(_accelerator_task(study, result, accelerator))
    return tasks


def _record(result: dict[str, Any], name: str, depth: int, parameters: int, **quality: Any) -> None:
    result["methods"][name]["exits"].append({"depth": depth, "parameters": parameters, **quality})


# ------------------------------------------------------------------------------ readouts of h_E

Readout = Callable[[Study, int, Tick], tuple[Tensor, int]]  # held-out states [T, D], parameters


def _raw(study: Study, layer: int, tick: Tick) -> tuple[Tensor, int]:
    return study.heldout.state(layer), 0


def _linear(study: Study, layer: int, tick: Tick) -> tuple[Tensor, int]:
    fit = linear_fit(study.train.state(layer), study.train.state(study.num_layers))
    return fit(study.heldout.state(layer)), costs.linear_parameters(study.shape.hidden_size)


def _carry(study: Study, layer: int, tick: Tick) -> tuple[Tensor, int]:
    carried = carried_layers(study)

    def inputs(text: CachedText) -> Tensor:
        states = [text.state(layer), *(text.state(i, shift=1) for i in carried)]
        # Each divided by its size: embeddings and deep states differ by orders of magnitude.
        return torch.cat([state * scale for state, scale in zip(states, scales, strict=True)], 1)

    scales = [
        state.square().mean().rsqrt()
        for state in (study.train.state(layer), *(study.train.state(i, shift=1) for i in carried))
    ]
    fit = linear_fit(inputs(study.train), study.train.state(study.num_layers))
    size = study.shape.hidden_size
    return fit(inputs(study.heldout)), costs.linear_parameters(size, inputs=1 + len(carried))


def _lite(study: Study, layer: int, tick: Tick) -> tuple[Tensor, int]:
    head = ExitHead(study.base)
    training = study.training("LITE-style", kl_weight=1.0)
    train_exit_head(head, layer, study.train, study.vocabulary, training, tick=tick)
    with torch.no_grad():
        return head(study.heldout.state(layer)), sum(p.numel() for p in head.parameters())


_READOUTS: dict[str, Readout] = {
    "raw exit": _raw, "linear": _linear, "LITE-style": _lite, "carry": _carry,
}  # fmt: skip


def _readout_task(
    study: Study, result: dict[str, Any], name: str, layer: int, readout: Readout
) -> Task:
    def run(tick: Tick) -> None:
        states, parameters = readout(study, layer, tick)
        _record(result, name, layer, parameters, **judge(study.heldout, states))

    size, tokens = study.shape.hidden_size, study.options.tokens
    inputs = {"raw exit": 0, "linear": 1, "carry": 1 + len(carried_layers(study)), "LITE-style": 0}
    work = study.judge_work() + 4 * tokens * (inputs[name] * size) ** 2
    if name == "LITE-style":
        work += study.lean_work(0) + study.options.epochs * tokens * 6 * size**2
    return Task(f"{name} at layer {layer}", work, run)


# ------------------------------------------------------------------------------ accelerated streams


def _stack_task(study: Study, result: dict[str, Any], stop: int, stack: Stack, epochs: int) -> Task:
    def run(tick: Tick) -> None:
        torch.manual_seed(study.options.seed)
        layers = stack.layers(study.base)
        closed_form(layers, stack, stack_moments(study.train, stack))
        fitted = judge(study.heldout, end_states(layers, stack, study.heldout))
        training = study.training(stack.kind, kl_weight=1.0, epochs=epochs)
        train_stack(layers, stack, study.train, study.vocabulary, training, tick=tick)
        _record(
            result, stack.kind, stop, _count(layers),
            **judge(study.heldout, end_states(layers, stack, study.heldout)), untrained=fitted,
        )  # fmt: skip

    k = len(stack.targets)
    work = study.lean_work(k) if stack.kind == "lean" else study.tied_work(k, epochs)
    return Task(f"{stack.kind} from layer {stack.start} to {stop}", work, run)


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _accelerator_task(study: Study, result: dict[str, Any], accelerator: Accelerator) -> Task:
    """The given accelerator as it is: its state at the end of every interval."""
    config, text = accelerator.config, study.heldout

    @torch.no_grad()
    def end(batch: Batch, interval: int) -> Tensor:
        block, prefix = text.block(batch)
        with mixed_precision(study.base):
            if accelerator.entry is not None:
                before = tuple(_shifted(batch.states[i]) for i in accelerator.carry_layers)
                carried = Carried(before, own=False)
                p = accelerator.entry(batch.states[0], carried.states, own=carried.own)
            else:
                p = batch.states[config.gates[interval]]
            arena = cast(KVArena, batch.arena)
            return accelerator.advance(p, block, arena, prefix, interval=interval)

    def run(tick: Tick) -> None:
        found = []
        for interval, (start, stop) in enumerate(pairwise(config.gates)):
            states = text.gather(lambda batch, j=interval: end(batch, j))  # type: ignore[misc]
            with torch.no_grad():
                tokens = torch.cat([accelerator.draft_logits(some).argmax(-1)
                                    for some in states.split(512)])  # fmt: skip
            if accelerator.draft_ids is not None:
                tokens = accelerator.draft_ids[tokens]
            found.append(
                {
                    "depth": stop - start if config.entry == "carry" else stop,
                    "gate": start,
                    "cosine": cosine(states, text.state(study.num_layers)),
                    "agreement": share(tokens == text.choices),
                }
            )
        result["accelerator"] = {
            "entry": config.entry,
            "layer_kind": config.layer_kind,
            "layers": len(accelerator.layers),
            "draft_vocab_size": config.draft_vocab_size,
            "parameters": accelerator.num_parameters(),
            "exits": found,
        }

    work = study.judge_work() + study.tied_work(len(accelerator.layers), 1)
    return Task("the accelerator", work, run)


def _shifted(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 1, 0))[:, :-1]


# ------------------------------------------------------------------------------ prices


def parameter_counts(study: Study, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Trained parameters of every method for this model, and of the published rivals by formula.

    Args:
        study: the model.
        result: the alignment numbers; the average over exits is taken from them.
    """
    shape = study.shape
    rows = []
    for name, method in result["methods"].items():
        per_exit = [e["parameters"] for e in method["exits"]]
        if any(per_exit):
            mean = sum(per_exit) / len(per_exit)
            rows.append({"name": name, "parameters": mean, "counted": "mean over exits, each"})
    if "accelerator" in result:
        rows.append(
            {
                "name": "accelerator",
                "parameters": result["accelerator"]["parameters"],
                "counted": "all of it",
            }
        )
    for heads in (4, 5):
        rows.append(
            {
                "name": f"Medusa, {heads} heads",
                "parameters": costs.medusa_parameters(shape, heads),
                "counted": "a residual block and a vocabulary head for each draft position",
            }
        )
    rows += [
        {
            "name": "EAGLE",
            "parameters": costs.eagle_parameters(shape),
            "counted": "one decoder layer and the map of (embedding, feature); the base's LM head",
        },
        {
            "name": "EAGLE-3",
            "parameters": costs.eagle3_parameters(shape, head=True),
            "counted": f"one decoder layer over (embedding, feature), the map of three layers' "
            f"features, an LM head of {min(costs.EAGLE3_DRAFT_VOCABULARY, shape.vocab_size)} tokens; "
            f"{costs.eagle3_parameters(shape, head=False)} without that head",
        },
        {"name": "base model", "parameters": shape.parameters, "counted": "frozen; for scale"},
    ]
    return rows
