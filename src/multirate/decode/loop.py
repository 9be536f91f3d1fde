"""The one generation loop: plain decoding is speculative decoding with no drafts.

A generator of steps. It knows token ids, rows and lengths; text belongs to the stop checkers, guesses
to the drafter, randomness to the sampler.

    1. prefill: prompts run through all layers in chunks; each row's last state gives its first token
    2. draft: the drafter guesses a chain or a tree of tokens for every row
    3. verify: the last token and its drafts run through all layers in one block
    4. accept: the longest exact path stays, the model's own next token follows it
    5. stop: each row's checker cuts the block where the row ends; ended rows leave the batch

Lengths count the verified slots of a row: prompt and output, less the last token, whose keys and
values the next block writes. What a rejected draft wrote lies beyond them and is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from multirate.decode.acceptance import accept_greedy, accept_sampled
from multirate.decode.draft_length import DraftLength
from multirate.decode.drafter import Draft, Drafter, DraftRequest, Observation
from multirate.decode.outcomes import Outcome
from multirate.decode.sampling import Sampler, best_token
from multirate.decode.stopping import StopChecker
from multirate.decode.tree import Tree
from multirate.models.arena import KVArena
from multirate.models.base import BaseModel, Block

PREFILL_CHUNK = 512  # positions; bounds the memory of masks and activations, not the speed


@dataclass(frozen=True)
class RowStep:
    """What one step added to one row.

    Attributes:
        row: index of the prompt.
        tokens: new ids, cut where the row ends.
        finish_reason: None while the row goes on.
    """

    row: int
    tokens: list[int]
    finish_reason: str | None


@dataclass
class SpeculationCounts:
    """Counts of one row, in vLLM's terms.

    Attributes:
        num_drafts: verify passes that held drafts.
        num_draft_tokens: drafted tokens, all branches of a tree included.
        num_accepted_tokens: drafted tokens that were accepted.
        accepted_per_position: of which at position i of their draft.
        num_plain_steps: verify passes without drafts, while drafting did not pay. A pass for which
            the drafter ran and found nothing, or that was to be timed, is counted nowhere.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    num_plain_steps: int = 0

    def add(self, outcome: Outcome) -> None:
        """Count one verify pass that held drafts of this row."""
        self.num_drafts += 1
        self.num_draft_tokens += outcome.entries
        self.num_accepted_tokens += outcome.accepted
        missing = outcome.drafted - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * missing)
        for i in range(outcome.accepted):
            self.accepted_per_position[i] += 1


@dataclass
class Rows:
    """The rows still being decoded; every list and tensor has one entry a row."""

    index: list[int]  # which prompt
    ids: list[list[int]]  # prompt and output
    checkers: list[StopChecker]
    counts: list[SpeculationCounts]
    lengths: list[int]
    last: Tensor  # [R]
    states: dict[int, Tensor]  # each [R, 1, D], one position before `last`
    drafter: Drafter | None

    def keep(self, places: list[int], arena: KVArena) -> None:
        rows = torch.tensor(places, device=self.last.device)
        arena.keep(rows)
        if self.drafter is not None:
            self.drafter.keep(places)
        for name in ("index", "ids", "checkers", "counts", "lengths"):
            values = getattr(self, name)
            setattr(self, name, [values[p] for p in places])
        self.last = self.last[rows]
        self.states = {i: state[rows] for i, state in self.states.items()}


@torch.inference_mode()
def decode(
    base: BaseModel,
    prompts: Sequence[Sequence[int]],
    checkers: Sequence[StopChecker],
    sampler: Sampler,
    *,
    drafter: Drafter | None = None,
    draft_length: DraftLength | None = None,
    counts: Sequence[SpeculationCounts] = (),
) -> Iterator[list[RowStep]]:
    """Decode a batch of prompts, step by step.

    Args:
        base: the model.
        prompts: token ids, one list a row, none empty; lengths may differ.
        checkers: one a row; they also know the limits of each row.
        sampler: greedy or sampling, shared by all rows.
        drafter: None for plain decoding.
        draft_length: how many tokens to draft; needed with a drafter.
        counts: one a row, filled in place; may be left out.

    Yields:
        For each step, what it added to each row that was still going. The first step of a row is the
        token that its prefill gives.
    """
    assert (drafter is None) == (draft_length is None)
    max_drafts = draft_length.max_slots if draft_length is not None else 0
    if drafter is not None:
        max_drafts += drafter.extra_entries
    room = max(len(p) + c.room for p, c in zip(prompts, checkers, strict=True))
    arena = base.arena(rows=len(prompts), max_len=room + max_drafts)
    if drafter is not None:
        drafter = drafter.start(rows=len(prompts), max_len=room + max_drafts)
    final, states = prefill(
        base,
        prompts,
        arena,
        drafter.carry_layers if drafter else (),
        observe=drafter.observe if drafter else None,
    )
    rows = Rows(
        index=list(range(len(prompts))),
        ids=[list(p) for p in prompts],
        checkers=list(checkers),
        counts=list(counts) or [SpeculationCounts() for _ in prompts],
        lengths=[len(p) for p in prompts],
        last=torch.zeros(len(prompts), dtype=torch.long, device=base.device),
        states=states,
        drafter=drafter,
    )
    rows.last = sampler.choose(sampler.scores(base.head(final), rows.ids))[:, 0]
    yield _emit(rows, [[token] for token in rows.last.tolist()], arena)
    while rows.index:
        if drafter is not None and draft_length is not None:
            draft_length.begin(len(rows.index))
            draft = _draft(rows, drafter, draft_length, arena, sampler)
        else:
            draft = Draft(rows.last.new_empty((len(rows.index), 0)))
        blocks, paths, outcomes = verify(base, rows, draft, arena, sampler)
        if draft_length is not None:
            draft_length.update(outcomes, draft, paths)
            for count, outcome in zip(rows.counts, outcomes, strict=True):
                if outcome.drafted > 0:
                    count.add(outcome)
                elif draft.steps == ():
                    count.num_plain_steps += 1
        rows.last = torch.tensor([b[-1] for b in blocks], device=base.device)
        rows.lengths = [n + len(b) for n, b in zip(rows.lengths, blocks, strict=True)]
        yield _emit(rows, blocks, arena)


def prefill(
    base: BaseModel,
    prompts: Sequence[Sequence[int]],
    arena: KVArena,
    layers: Sequence[int],
    *,
    observe: Callable[[Observation], None] | None = None,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Run the prompts, right-padded, in chunks; `observe` sees each with the named slow states.

    Returns:
        h_N `[R, 1, D]` at each row's last prompt token, and the named slow states there.
    """
    device, width = base.device, max(len(p) for p in prompts)
    ids = torch.zeros((len(prompts), width), dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
    ends = torch.tensor([len(p) - 1 for p in prompts], device=device)
    wanted = (*layers, base.num_layers)
    kept: dict[int, Tensor] = {}
    for start in range(0, width, PREFILL_CHUNK):
        chunk = ids[:, start : start + PREFILL_CHUNK]
        n = chunk.shape[1]
        block = base.block([start] * len(prompts), n)
        states: dict[int, Tensor] = dict.fromkeys(wanted, cast(Tensor, None))
        base.run_layers(base.embed(chunk), 0, base.num_layers, block, arena, states=states)
        if observe is not None:
            observe(Observation([start] * len(prompts), {i: states[i] for i in layers}))
        # Padding behind a short prompt writes slots that its own tokens overwrite later.
        here = (ends >= start) & (ends < start + n)
        place = (ends - start).clamp(0, n - 1)
        for i, state in states.items():
            picked = _pick(state, place)
            kept[i] = torch.where(here[:, None, None], picked, kept[i]) if i in kept else picked
    final = kept[base.num_layers]
    return final, {i: kept[i] for i in layers}


def _draft(
    rows: Rows, drafter: Drafter, length: DraftLength, arena: KVArena, sampler: Sampler
) -> Draft:
    """What is to be verified; nothing where drafting does not pay."""
    # The last token a row may get needs no draft: the verify pass itself yields it.
    count = min(length.max_drafts, max(c.room for c in rows.checkers) - 1)
    growth = length if length.grows else None
    asks = count > 0 and growth is not None and drafter.grows
    rests = not length.idle and not asks and not length.pays()
    if length.idle or rests or count < 1:
        nothing = rows.last.new_empty((len(rows.index), 0))
        return Draft(nothing, steps=() if rests else None)
    request = DraftRequest(
        rows.last,
        rows.lengths,
        rows.states,
        arena,
        rows.ids,
        count=count,
        sampler=sampler,
        go_on=length.go_on,
        width=length.width,
        growth=growth,
    )
    return length.keep(drafter.draft(request))


def verify(
    base: BaseModel, rows: Rows, draft: Draft, arena: KVArena, sampler: Sampler
) -> tuple[list[list[int]], list[list[int]], list[Outcome]]:
    """Run last tokens and drafts through all layers in one block.

    Leaves the keys, values and states of the accepted path where the next cycle expects them.

    Returns:
        Each row's new tokens, the block entries of those that were drafted, and the outcome.
    """
    count, device = len(rows.index), rows.last.device
    n = draft.tokens.shape[1]
    parents, tree = draft.parent_lists(), None
    ids = rows.last[:, None]
    if n > 0:
        ids = torch.cat([ids, draft.tokens], dim=1)
    if draft.parents is None:
        block = base.block(rows.lengths, n + 1)
    else:
        tree = Tree.of(parents[:1] if draft.parents.ndim == 1 else parents, device)
        block = base.block(rows.lengths, n + 1, depths=tree.depths, block_mask=tree.mask)
    logits, states = _run(base, rows, ids, block, arena)
    scores = sampler.scores(logits, rows.ids, draft.tokens, tree)
    made = draft.lengths or [n] * count
    if sampler.greedy:
        targets = best_token(scores).tolist()
        blocks, paths = accept_greedy(draft.token_lists(), parents, made, targets)
    else:
        blocks, paths = accept_sampled(
            draft.tokens,
            torch.tensor(made, device=device),
            sampler.probabilities(scores),
            draft_probs=draft.probs,
            draft_ids=draft.ids,
            tree=tree,
            generator=sampler.generator,
        ).read(draft.tokens, tree)
    ends = [path[-1] if path else 0 for path in paths]
    rows.states = _at(states, ends, device)
    if rows.drafter is not None:
        stays = [[0, *path] for path in paths]
        rows.drafter.observe(Observation(rows.lengths, states, scores, stays))
    moves = [
        (row, rows.lengths[row] + entry, rows.lengths[row] + depth)
        for row, path in enumerate(paths)
        for depth, entry in enumerate(path, 1)
        if entry != depth
    ]
    if moves:
        arena.move(*zip(*moves, strict=True))
    # The last token a row may get is the verify pass's own: drafts beyond its room count for nothing.
    outcomes = [
        Outcome.of(above[:length], path, checker.room - 1)
        for above, length, path, checker in zip(parents, made, paths, rows.checkers, strict=True)
    ]
    return blocks, paths, outcomes


def _run(
    base: BaseModel, rows: Rows, ids: Tensor, block: Block, arena: KVArena
) -> tuple[Tensor, dict[int, Tensor]]:
    """A block `[R, n]` through all layers: logits `[R, n, V]`, and the states that drafting wants."""
    states: dict[int, Tensor] = dict.fromkeys(rows.states, cast(Tensor, None))
    h = base.run_layers(base.embed(ids), 0, base.num_layers, block, arena, states=states)
    return base.head(h), states


def _at(states: dict[int, Tensor], ends: Sequence[int], device: torch.device) -> dict[int, Tensor]:
    """States `[R, n, D]` at one entry a row: `[R, 1, D]`."""
    if len(set(ends)) == 1:
        return {i: state[:, ends[0] : ends[0] + 1] for i, state in states.items()}
    place = torch.tensor(ends, device=device)
    return {i: _pick(state, place) for i, state in states.items()}


def _pick(x: Tensor, place: Tensor) -> Tensor:
    """`[R, n, D]` at one position a row `[R]`: `[R, 1, D]`."""
    return x[torch.arange(len(x), device=x.device), place][:, None]


def _emit(rows: Rows, blocks: Sequence[list[int]], arena: KVArena) -> list[RowStep]:
    """Hand each row's block to its checker; drop the rows that ended."""
    steps, going = [], []
    for place, block in enumerate(blocks):
        tokens, reason = rows.checkers[place].push(block)
        rows.ids[place].extend(tokens)
        steps.append(RowStep(rows.index[place], tokens, reason))
        if reason is None:
            going.append(place)
    if len(going) == 0:
        rows.index = []
    elif len(going) < len(blocks):
        rows.keep(going, arena)
    return steps
