"""Training the heads of rival methods (`decode.medusa`, `decode.deed`) on text of the base model.

The frozen model runs once over the text; its states stay in memory, so that an epoch costs only
the heads. Minutes on one core for a small model.

Shapes: T positions, D hidden size, H heads, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from multirate.decode.deed import DeedDrafter, ExitHeads, default_exits
from multirate.decode.medusa import HEADS, RANKS, MedusaDrafter, MedusaHeads
from multirate.models.base import BaseModel
from multirate.streams.fit import Moments
from multirate.train.batches import batches, frequent_tokens, sample_rows
from multirate.train.data import Row
from multirate.train.options import cosine_schedule
from multirate.train.teacher import Needs, run_teacher
from multirate.train.unroll import window_ids

Report = Callable[[str], None]


@dataclass(frozen=True)
class HeadOptions:
    """How heads are trained.

    Attributes:
        tokens: positions of text that the frozen model reads.
        draft_vocab_size: tokens that the heads may guess.
        epochs: passes over its states (Medusa).
        learning_rate: peak of a cosine schedule (Medusa).
        batch: positions in a step (Medusa).
        batch_tokens: positions in a pass of the frozen model.
        ridge: shrinkage of the closed-form fit (DEED), relative to the inputs' second moment.
        seed: which texts are read, and the order of their positions.
    """

    tokens: int = 60_000
    draft_vocab_size: int = 12_288
    epochs: int = 3
    learning_rate: float = 1e-3
    batch: int = 128
    batch_tokens: int = 1024
    ridge: float = 1e-3
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Seen:
    """What the frozen model makes of a text's learned positions.

    Attributes:
        states: for each wanted layer i, h_i `[T, D]`.
        targets: LongTensor `[T, k]`, the tokens 1, 2, ... places ahead; -1 beyond the learned text.
    """

    states: dict[int, Tensor]
    targets: Tensor


@torch.no_grad()
def read_states(
    base: BaseModel, rows: Sequence[Row], layers: Sequence[int], *, ahead: int, batch_tokens: int
) -> Seen:
    """Run the frozen model over texts."""
    needs = Needs(tuple(layers), ())
    kept: dict[int, list[Tensor]] = {i: [] for i in layers}
    targets: list[Tensor] = []
    for batch in batches(rows, tokens=batch_tokens):
        batch = batch.to(base.device)
        teacher = run_teacher(base, batch, needs)
        for i in layers:
            kept[i].append(teacher.at(i)[batch.trained])
        # The token k places ahead is learned where the position k - 1 places ahead is trained.
        found = [
            torch.where(
                F.pad(batch.trained[:, k - 1 :], (0, k - 1)), window_ids(batch, ahead=k), -1
            )
            for k in range(1, ahead + 1)
        ]
        targets.append(torch.stack(found, dim=-1)[batch.trained])
    return Seen({i: torch.cat(x) for i, x in kept.items()}, torch.cat(targets))


def train_medusa(
    base: BaseModel,
    rows: Sequence[Row],
    heldout: Sequence[Row],
    options: HeadOptions,
    report: Report = print,
) -> MedusaDrafter:
    """Medusa-1: the heads alone, by summed cross-entropy to the text, the model frozen.

    Args:
        base: the model, in a type that trains well on its device.
        rows: text that it wrote.
        heldout: greedy answers of the model, on which the tree is calibrated.
        options: of the training.
        report: called with lines of progress.
    """
    n = base.num_layers
    heads = MedusaHeads(base, _draft_ids(base, rows, options))
    some = sample_rows(rows, options.tokens, seed=options.seed)
    seen = read_states(base, some, [n], ahead=HEADS + 1, batch_tokens=options.batch_tokens)
    h, columns = seen.states[n], _columns(base, heads.head.ids, seen.targets[:, 1:])
    report(f"{len(h):,} positions of {sum(len(row) for row in some):,} tokens are read")
    judged = read_states(base, heldout, [n], ahead=HEADS + 1, batch_tokens=options.batch_tokens)

    optimizer = torch.optim.AdamW(heads.parameters(), lr=options.learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(options.seed)
    steps = options.epochs * -(-len(h) // options.batch)
    step = 0
    for epoch in range(1, options.epochs + 1):
        total = 0.0
        for places in torch.randperm(len(h), generator=generator).split(options.batch):
            for group in optimizer.param_groups:
                group["lr"] = options.learning_rate * cosine_schedule(
                    step, steps, warmup_share=0.03
                )
            logits = heads(h[places].float()).float()
            loss = F.cross_entropy(logits.flatten(0, 1), columns[places].flatten(), ignore_index=-1)
            optimizer.zero_grad(set_to_none=True)
            (loss * HEADS).backward()  # summed over heads
            optimizer.step()
            total, step = total + loss.item() * len(places), step + 1
        accuracy, expected = judge_medusa(base, heads, judged)
        report(
            f"epoch {epoch} of {options.epochs}: cross-entropy a head {total / len(h):.3f}; held-out "
            f"acceptance given the drafts before: {', '.join(f'{a:.3f}' for a in expected)}"
        )
    return MedusaDrafter(heads.requires_grad_(False), accuracy, expected)


@torch.no_grad()
def judge_medusa(
    base: BaseModel, heads: MedusaHeads, seen: Seen
) -> tuple[list[list[float]], list[float]]:
    """Per head the accuracy of its first `RANKS` guesses, and of the first ones given those before."""
    columns = _columns(base, heads.head.ids, seen.targets[:, 1:])
    ranks = min(RANKS, len(heads.head.ids))
    hits = []
    for h, wanted in zip(seen.states[base.num_layers].split(256), columns.split(256), strict=True):
        best = heads(h.float()).topk(ranks).indices  # [T, H, ranks]
        hits.append(best == wanted[..., None])
    right = torch.cat(hits)  # [T, H, ranks]
    there = seen.targets[:, 1:] >= 0  # [T, H]
    accuracy = right.sum(0) / there.sum(0).clamp(min=1)[:, None]
    chain = right[..., 0].cumprod(1)
    alive = torch.cat([torch.ones_like(chain[:, :1]), chain[:, :-1]], dim=1) * there
    expected = (chain * there).sum(0) / alive.sum(0).clamp(min=1)
    return accuracy.tolist(), expected.tolist()


@torch.no_grad()
def train_deed(
    base: BaseModel,
    rows: Sequence[Row],
    heldout: Sequence[Row],
    options: HeadOptions,
    report: Report = print,
    *,
    exits: Sequence[int] | None = None,
) -> DeedDrafter:
    """Exit heads by ridge regression of the final state on the state at each exit.

    Args:
        base: the model.
        rows: text that it wrote.
        heldout: greedy answers of the model, to judge on.
        options: of the fit.
        report: called with lines of progress.
        exits: layers after which there is a head; None for `deed.default_exits`.
    """
    n = base.num_layers
    heads = ExitHeads(base, _draft_ids(base, rows, options), exits or default_exits(n))
    wanted = sorted({*heads.exits, n})
    moments = [Moments() for _ in heads.exits]
    some = sample_rows(rows, options.tokens, seed=options.seed)
    for group in (some[i : i + 16] for i in range(0, len(some), 16)):
        seen = read_states(base, group, wanted, ahead=1, batch_tokens=options.batch_tokens)
        for exit_, sums in zip(heads.exits, moments, strict=True):
            sums.add(seen.states[exit_], seen.states[n])
    for adapter, sums in zip(heads.adapters, moments, strict=True):
        weight, bias = sums.solve(options.ridge)
        assert isinstance(adapter, nn.Linear)
        adapter.weight.copy_(weight)
        adapter.bias.copy_(bias)
    report(f"{moments[0].count:,} positions of {sum(len(row) for row in some):,} tokens are read")

    judged = read_states(base, heldout, wanted, ahead=1, batch_tokens=options.batch_tokens)
    drafter = DeedDrafter(heads.requires_grad_(False))
    rates, leave, accuracy = judge_deed(base, drafter, judged)
    for exit_, rate, share in zip(heads.exits, rates, leave, strict=True):
        report(f"exit {exit_}: right {rate:.3f} on all; {share:.3f} of drafts leave there")
    report(f"held-out acceptance of a draft {accuracy:.3f}")
    return DeedDrafter(heads, expected_acceptance=[accuracy])


def judge_deed(
    base: BaseModel, drafter: DeedDrafter, seen: Seen
) -> tuple[list[float], list[float], float]:
    """On held-out states: how often each head is right, how often it is the exit, and all in all."""
    heads = drafter.heads
    wanted = _columns(base, heads.head.ids, seen.targets[:, 0])
    gone = torch.zeros_like(wanted, dtype=torch.bool)
    accepted = torch.zeros_like(gone)
    rates, leave = [], []
    for index, exit_ in enumerate(heads.exits):
        parts = [heads(h.float(), index).softmax(-1).max(-1) for h in seen.states[exit_].split(256)]
        chance, choice = (torch.cat(x) for x in zip(*parts, strict=True))
        last = index == len(heads.exits) - 1
        here = ~gone & ((chance >= drafter.confidence) | last)
        right = choice == wanted
        accepted |= here & right
        gone |= here
        rates.append(float(right.float().mean()))
        leave.append(float(here.float().mean()))
    return rates, leave, float(accepted.float().mean())


def _draft_ids(base: BaseModel, rows: Sequence[Row], options: HeadOptions) -> Tensor:
    size = min(options.draft_vocab_size, base.vocab_size)
    return frequent_tokens(rows, size=size, vocab_size=base.vocab_size)


def _columns(base: BaseModel, ids: Tensor, targets: Tensor) -> Tensor:
    """Token ids to columns of the draft vocabulary; -1 where there is none."""
    columns = torch.full((base.vocab_size,), -1, device=ids.device)
    columns[ids] = torch.arange(len(ids), device=ids.device)
    return torch.where(targets >= 0, columns[targets.clamp(min=0)], -1)
