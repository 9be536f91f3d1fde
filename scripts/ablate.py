"""Design search: variants of the drafter, trained alike on the same text, compared on held-out text.

    python scripts/ablate.py smollm2-135m --data data/smollm2-135m-answers.jsonl.gz --tokens 50000

Every variant gets the same texts in the same order, the same closed-form start and the same steps; what
it changes is in its name. The teacher runs once for all of them and its states stay in memory, so a
variant costs only its own training. Two things that the default preset has not are tried here too:

- `own-kv`: the stream attends to keys and values of its own instead of the model's (as EAGLE does; the
  preset `eagle` over whole texts, here over their trained windows);
- `block`: all drafts at once, one row a future position, each from the last verified token and states,
  seeing the rows before it (instead of one after another, each fed the token and state before it).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from multirate.bench.provenance import provenance
from multirate.models.arena import KVArena
from multirate.models.base import BaseModel
from multirate.models.forms import batch_dtype
from multirate.models.loading import load_pretrained
from multirate.streams.accelerator import Accelerator, Carried
from multirate.streams.entry import FusedInputs
from multirate.streams.fit import Moments, fit_closed_form, set_fused, slow_states
from multirate.train.acceptance import acceptance_rates, count_accepted, mean_acceptance_length
from multirate.train.batches import (
    Batch,
    batches,
    collate,
    frequent_tokens,
    sample_rows,
    schedule,
    split_rows,
)
from multirate.train.data import Row, read_rows
from multirate.train.losses import StreamLoss
from multirate.train.options import TrainingOptions
from multirate.train.teacher import Needs, TeacherStates, run_teacher
from multirate.train.unroll import (
    Drafted,
    UnrolledArena,
    following,
    unroll,
    unrolled_block,
    window_ids,
)

DRAFTS = 5
Unroll = Callable[[Accelerator, Batch, TeacherStates, int], Iterator[Drafted]]


@dataclass(frozen=True)
class Variant:
    """One point of the search: what differs from the preset and from the training's defaults."""

    shape: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    unroll: str = "chain"


def variants(n: int) -> dict[str, Variant]:
    """The search around the carry preset for a model of n layers."""
    deep = (round(n / 3), round(2 * n / 3))

    def last(k: int, **shape: Any) -> dict[str, Any]:
        return {"gates": (n - k, n), "carry_layers": (*deep, n - k, n), **shape}

    return {
        "1 layer": Variant(last(1)),
        "2 layers": Variant(last(2)),
        "3 layers": Variant(last(3)),
        "4 layers": Variant(last(4)),
        "6 layers": Variant(last(6)),
        "carry h_N only": Variant(last(2, carry_layers=(n,))),
        "carry 7 states": Variant(
            last(
                2, carry_layers=tuple(sorted({round(n * i / 6) for i in range(1, 6)} | {n - 2, n}))
            )
        ),
        "rank 16": Variant(last(2, rank=16)),
        "rank 256": Variant(last(2, rank=256)),
        "4k draft tokens": Variant(last(2, draft_vocab_size=4096)),
        "16k draft tokens": Variant(last(2, draft_vocab_size=16384)),
        "1 self-fed step": Variant(last(2), {"draft_steps": 1}),
        "no distillation": Variant(last(2), {"distillation_weight": 0.0}),
        "distillation x5": Variant(last(2), {"distillation_weight": 1.0}),
        "l1 distillation": Variant(last(2), {"distillation_loss": "l1"}),
        "reach weighting": Variant(last(2), {"reach_weighting": True}),
        "half the rate": Variant(last(2), {"learning_rate": 5e-4}),
        "twice the rate": Variant(last(2), {"learning_rate": 2e-3}),
        "random start": Variant(last(2), {"closed_form": False}),
        "own-kv": Variant(last(2), unroll="own-kv"),
        "block": Variant(last(2), unroll="block"),
        "block, 4 layers": Variant(last(4), unroll="block"),
    }


def unroll_own_kv(
    accelerator: Accelerator, batch: Batch, teacher: TeacherStates, draft_steps: int
) -> Iterator[Drafted]:
    """As `unroll`, but what step 1 wrote at earlier positions stands in for the model's own KV."""
    width, base = batch.trained.shape[1], accelerator.base
    ahead = torch.arange(width)[:, None] - torch.arange(width)
    empty = {i: k[:, :, :0] for i, k in teacher.keys.items()}
    arena = UnrolledArena(replace(teacher, keys=empty, values=empty), base.num_layers)

    def mask(step: int) -> Tensor:
        own = [ahead >= step - 1, *(ahead == step - s for s in range(2, step + 1))]
        return base.mask(torch.cat(own, 1).expand(len(batch.rows), 1, -1, -1))

    def enter(step: int, last: Carried) -> Tensor:
        return accelerator.entry(base.embed(window_ids(batch)), last.states, own=last.own)

    return _unroll(accelerator, batch, teacher, arena, draft_steps, enter, mask)


def unroll_block(
    accelerator: Accelerator, batch: Batch, teacher: TeacherStates, draft_steps: int
) -> Iterator[Drafted]:
    """Step s starts from the token and states of s positions before, not from step s - 1.

    So all steps could run at once; through attention they still see the rows before them.
    """
    base = accelerator.base
    arena = UnrolledArena(teacher, base.num_layers)
    known = [base.embed(window_ids(batch)), *(teacher.before(i) for i in accelerator.carry_layers)]

    def enter(step: int, last: Carried) -> Tensor:
        nonlocal known
        if step == 1:
            return accelerator.entry.first(known)
        known = [following(x) for x in known]
        return accelerator.ahead[step - 2](known)

    return _unroll(accelerator, batch, teacher, arena, draft_steps, enter, None)


def _unroll(
    accelerator: Accelerator,
    batch: Batch,
    teacher: TeacherStates,
    arena: UnrolledArena,
    draft_steps: int,
    enter: Callable[[int, Carried], Tensor],
    mask: Callable[[int], Tensor] | None,
) -> Iterator[Drafted]:
    config = accelerator.config
    last = Carried(tuple(teacher.before(i) for i in accelerator.carry_layers), own=False)
    for step in range(1, draft_steps + 1):
        block, prefix = unrolled_block(accelerator.base, batch, step)
        if mask is not None:
            block = replace(block, masks=dict.fromkeys(block.masks, mask(step)))
        start = enter(step, last)
        end = accelerator.advance(start, block, cast(KVArena, arena), prefix)
        last = Carried((following(start), following(end)), own=True)
        pairs = [(start, teacher.at(config.gates[0])), (end, teacher.at(config.num_layers))]
        yield Drafted(step, end, pairs)


UNROLLS: dict[str, Unroll] = {"chain": unroll, "own-kv": unroll_own_kv, "block": unroll_block}


class Search:
    """Texts, the teacher's states for them, and what is trained on them.

    Args:
        base: the frozen model.
        rows: texts to train on, of which about `tokens` positions are used.
        heldout: texts to judge on.
        wanted: the variants that will be tried.
        tokens: positions to train on.
    """

    def __init__(
        self,
        base: BaseModel,
        rows: list[Row],
        heldout: list[Row],
        wanted: list[Variant],
        tokens: int,
    ) -> None:
        self.base, self.text = base, rows
        self.rows = sample_rows(rows, tokens, seed=0)
        needs = [Needs.of(self.make(variant).config) for variant in wanted]
        self.needs = Needs(
            tuple(sorted({i for need in needs for i in need.states})),
            tuple(sorted({i for need in needs for i in need.layers})),
        )
        self.heldout = [(b, self._teach(b)) for b in batches(heldout, tokens=2048)]
        groups = schedule(self.rows, epochs=1, tokens=1024, seed=0)
        self.steps = [collate([self.rows[i] for i in group]) for group in groups]
        self.taught = [self._teach(batch) for batch in self.steps]
        self.slow: dict[int, dict[int, Tensor]] = {}

    def _teach(self, batch: Batch) -> TeacherStates:
        full = run_teacher(self.base, batch, self.needs)
        parts = [{i: x.half() for i, x in p.items()} for p in (full.states, full.keys, full.values)]
        return TeacherStates(*parts)

    def make(self, variant: Variant) -> Accelerator:
        torch.manual_seed(0)
        shape = {"draft_vocab_size": min(8192, self.base.vocab_size), **variant.shape}
        accelerator = Accelerator.from_preset("carry", self.base, **shape)
        accelerator.set_draft_ids(
            frequent_tokens(
                self.text, size=shape["draft_vocab_size"], vocab_size=self.base.vocab_size
            )
        )
        if variant.unroll == "block":
            inputs = 1 + len(accelerator.carry_layers)
            accelerator.ahead = nn.ModuleList(
                FusedInputs(inputs, self.base.hidden_size) for _ in range(DRAFTS - 1)
            )
        return accelerator

    @torch.no_grad()
    def fit(self, accelerator: Accelerator) -> None:
        """The closed form, from states that are computed once for all variants."""

        def states(base: BaseModel, ids: Tensor, layers: Iterable[int]) -> Any:
            key = ids.data_ptr()
            if key not in self.slow:
                found, _ = slow_states(base, ids, set(self.needs.states))
                self.slow[key] = {i: h.half() for i, h in found.items()}
            found = self.slow[key]
            return {i: found[i].float() for i in layers}, found[base.num_layers].float()

        some = self.steps[: max(1, len(self.steps) // 2)]
        fit_closed_form(accelerator, ((b.ids, b.lengths) for b in some), states=states)
        for ahead, entry in enumerate(getattr(accelerator, "ahead", ()), 1):
            self._fit_ahead(accelerator, entry, ahead, some, states)

    def _fit_ahead(
        self,
        accelerator: Accelerator,
        entry: FusedInputs,
        ahead: int,
        some: list[Batch],
        states: Any,
    ) -> None:
        gate, moments = accelerator.config.gates[0], Moments()
        carried = accelerator.carry_layers
        for batch in some:
            found, _ = states(self.base, batch.ids, {gate, *carried})
            known = [self.base.embed(batch.ids), *(following(found[i]) for i in carried)]
            for row, length in enumerate(batch.lengths):
                x = torch.cat([k[row, 2 : length - ahead] for k in known], 1)
                moments.add(x, found[gate][row, 2 + ahead : length])
        set_fused(entry, moments, 1e-3)

    def judge(self, accelerator: Accelerator, unroll: Unroll) -> tuple[float, ...]:
        counts = [
            count_accepted(accelerator, batch, _float(teacher), DRAFTS, unroll=unroll)
            for batch, teacher in self.heldout
        ]
        return acceptance_rates(torch.stack(counts).sum(0))

    def run(self, name: str, variant: Variant) -> dict[str, Any]:
        """Train one variant and measure it."""
        accelerator, unroll = self.make(variant), UNROLLS[variant.unroll]
        options = TrainingOptions(**variant.training)
        if options.closed_form:
            self.fit(accelerator)
        start = self.judge(accelerator, unroll)
        module = StreamLoss(accelerator, options, unroll=unroll)
        optimizer = torch.optim.AdamW(module.parameters(), lr=options.learning_rate, weight_decay=0)
        started = time.perf_counter()
        for step, (batch, teacher) in enumerate(zip(self.steps, self.taught, strict=True)):
            for group in optimizer.param_groups:
                group["lr"] = options.rate(step, len(self.steps))
            loss, _ = module(batch, _float(teacher))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), options.clip)
            optimizer.step()
        seconds = time.perf_counter() - started
        end = self.judge(accelerator, unroll)
        return {
            "name": name,
            "parameters": sum(p.numel() for p in module.parameters()),
            "closed_form": {"acceptance": start, "length_4": mean_acceptance_length(start[:4])},
            "acceptance": end,
            "length_4": mean_acceptance_length(end[:4]),
            "length_5": mean_acceptance_length(end),
            "positions": sum(len(row) for row in self.rows),
            "seconds": seconds,
        }


def _float(teacher: TeacherStates) -> TeacherStates:
    parts = (teacher.states, teacher.keys, teacher.values)
    return TeacherStates(*({i: x.float() for i, x in p.items()} for p in parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--data", action="append", required=True)
    parser.add_argument("--heldout-data", help="text to judge on; default: some of the data")
    parser.add_argument("--tokens", type=int, default=50_000, help="positions to train on")
    parser.add_argument("--variants", help="names, separated by commas; default: all")
    parser.add_argument("--output", type=Path, help="JSON file; variants that it holds are kept")
    args = parser.parse_args()

    loaded = load_pretrained(args.model, dtype=batch_dtype("cpu"), device="cpu")
    base = BaseModel(loaded.model)
    known = variants(base.num_layers)
    names = args.variants.split(",") if args.variants else list(known)
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"unknown variants {unknown}; known: {', '.join(known)}")
    report: dict[str, Any] = {
        "provenance": provenance(
            device=base.device, dtype=base.dtype, command=["python", *sys.argv]
        ),
        "variants": {},
    }
    if args.output and args.output.exists():
        report = json.loads(args.output.read_text())
        names = [name for name in names if name not in report["variants"]]
    rows = [row for path in args.data for row in read_rows(path, loaded.tokenizer)]
    if args.heldout_data:
        heldout = read_rows(args.heldout_data, loaded.tokenizer)
    else:
        heldout, rows = split_rows(rows, heldout=48, seed=0)
    search = Search(base, rows, heldout, [known[name] for name in names], args.tokens)
    print(f"{'variant':18} {'M':>5}  start  a_1   a_2   a_3   a_4   a_5   length at 4, 5 drafts")
    for name in names:
        row = search.run(name, known[name])
        report["variants"][name] = row
        rates = " ".join(f"{a:.3f}" for a in row["acceptance"])
        print(
            f"{name:18} {row['parameters'] / 1e6:5.2f}  {row['closed_form']['acceptance'][0]:.3f}  "
            f"{rates}  {row['length_4']:.3f} {row['length_5']:.3f}  ({row['seconds']:.0f} s)",
            flush=True,
        )
        if args.output:
            args.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
