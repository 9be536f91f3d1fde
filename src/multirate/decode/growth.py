"""Drafting from a distribution: chains, one token after another, and trees, level by level.

Shapes: R rows, m nodes of a level, k drafts, w children of a node, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from multirate.decode.drafter import Draft, DraftRequest, as_tensor
from multirate.decode.sampling import Sampler
from multirate.decode.tree import Tree, caterpillar
from multirate.streams.step import Ranking

# What a draft step makes of its nodes: logits `[R, m, Vd]`, or their ranking where none are drawn.
Ranked = Tensor | Ranking


def draft_chain(
    step: Callable[[int, Tensor], Tensor], request: DraftRequest, ids: Tensor | None = None
) -> Draft:
    """Draft one token after another.

    Args:
        step: takes the number of drafts made so far and the token `[R]` to continue; returns
            logits `[R, Vd]`.
        request: what the loop wants.
        ids: as in `Draft`.
    """

    def step_level(level: Level) -> Tensor:
        return step(level.depth, level.tokens[:, 0])[:, None]

    return draft_levels(step_level, request, ids, max_beam=1)


def draft_levels(
    step: Callable[[Level], Ranked], request: DraftRequest, ids: Tensor | None, *, max_beam: int
) -> Draft:
    """Grow a tree, where that is asked for, or draft one token after another.

    Args:
        step: as for `grow_tree`.
        request: what the loop wants.
        ids: as in `Draft`.
        max_beam: most nodes of a level that are continued.
    """
    if request.growth is not None:
        return grow_tree(step, request, ids, max_beam=max_beam)
    sampler, last = request.sampler, request.last[:, None]
    root = torch.zeros_like(last)
    tokens: list[Tensor] = []  # each [R, w], the draft and its runners-up
    probs: list[Tensor] = []
    chance = torch.ones(len(last), device=last.device)
    for made in range(request.count):
        if made > 0 and not request.go_on(made, float(chance.mean())):
            break
        made_of_it = step(Level(made, last, root, None))
        if sampler.greedy:
            best = _ranking(made_of_it, request, ids)
            chance = chance * best.chances[:, 0, 0]
            tokens.append(best.tokens[:, 0])
        else:
            assert isinstance(made_of_it, Tensor)
            q = sampler.probabilities(sampler.warp_draft(made_of_it[:, 0]))
            columns, drawn_from = draw_different(q, min(request.width, q.shape[-1]), sampler)
            probs.append(drawn_from)
            chance = chance * q.gather(-1, columns[:, :1])[:, 0]
            tokens.append(columns if ids is None else ids[columns])
        last = tokens[-1][:, :1]
    ranked = torch.stack(tokens, dim=1)  # [R, k, w]
    chain, parents = ranked[..., 0], None
    q_all = torch.stack(probs, dim=1) if probs else None  # [R, k, w, Vd]
    if ranked.shape[2] > 1:
        chain, parents = caterpillar(chain, ranked[..., 1:])
        if q_all is not None:
            q_all = torch.cat([q_all[:, :, 0], q_all[:, :, 1:].flatten(1, 2)], dim=1)
    elif q_all is not None:
        q_all = q_all[:, :, 0]
    return Draft(chain, parents, q_all, ids)


def _ranking(ranked: Ranked, request: DraftRequest, ids: Tensor | None) -> Ranking:
    """The best `request.width` candidates of each node."""
    if isinstance(ranked, Tensor):
        sampler = request.sampler
        q = sampler.probabilities(sampler.warp_draft(ranked.flatten(0, 1))).view(ranked.shape)
        best = q.topk(min(request.width, q.shape[-1]))
        return Ranking(best.indices if ids is None else ids[best.indices], best.values)
    return Ranking(ranked.tokens[..., : request.width], ranked.chances[..., : request.width])


def draw_different(q: Tensor, count: int, sampler: Sampler) -> tuple[Tensor, Tensor]:
    """Draw several tokens without replacement.

    Args:
        q: `[R, Vd]`, a distribution a row.
        count: how many to draw.
        sampler: draws.

    Returns:
        LongTensor `[R, count]`, columns of q, and `[R, count, Vd]`, what each was drawn from: q without
        those before it, normalised.
    """
    columns: list[Tensor] = [sampler.draw(q)]
    drawn_from = [q]
    while len(columns) < count:
        left = drawn_from[-1].scatter(1, columns[-1][:, None], 0.0)
        mass = left.sum(1, keepdim=True)
        # Where q has no further token, any one serves; it is then proposed for certain.
        column = sampler.draw(torch.where(mass > 0, left, 1.0))
        certain = torch.zeros_like(q).scatter_(1, column[:, None], 1.0)
        columns.append(column)
        drawn_from.append(torch.where(mass > 0, left / mass, certain))
    return torch.stack(columns, dim=1), torch.stack(drawn_from, dim=1)


@dataclass(frozen=True, eq=False)
class Level:
    """Nodes that one draft step continues, m a row.

    Attributes:
        depth: of the nodes; 0 = the last token.
        tokens: LongTensor `[R, m]`.
        parents: LongTensor `[R, m]`, which node of the level before each one follows.
        tree: of the S nodes of all levels so far, these being the last m; None for a chain.
    """

    depth: int
    tokens: Tensor
    parents: Tensor
    tree: Tree | None


def grow_tree(
    step: Callable[[Level], Ranked],
    request: DraftRequest,
    ids: Tensor | None,
    *,
    max_beam: int,
) -> Draft:
    """Grow trees level by level, where their chances are best (EAGLE-2, arXiv 2406.16858).

    Each step continues the likeliest nodes of the last level and ranks what follows each of them.

    Args:
        step: what follows the nodes of a level.
        request: what the loop wants, `growth` among it.
        ids: as in `Draft`.
        max_beam: most nodes of a level that are continued.
    """
    growth, device = request.growth, request.last.device
    assert growth is not None
    rows = range(len(request.last))
    tokens: list[list[int]] = [[] for _ in rows]
    parents: list[list[int]] = [[] for _ in rows]
    claims: list[list[float]] = [[] for _ in rows]
    values: list[list[float]] = [[] for _ in rows]
    above: list[list[int]] = [[] for _ in rows]  # of continued nodes, as in `Draft.parents`
    continued = [[-1] for _ in rows]  # entries that this level's nodes are
    level = Level(0, request.last[:, None], torch.zeros_like(request.last[:, None]), None)
    steps: list[int] = []
    beam = growth.beam(0, [[1.0] for _ in rows], 1)
    while beam > 0:
        steps.append(beam)
        best = _ranking(step(level), request, ids)
        new: list[list[int]] = [[] for _ in rows]
        ranked = zip(
            best.tokens.flatten(0, 1).tolist(), best.chances.flatten(0, 1).tolist(), strict=True
        )
        nodes = [(row, entry) for row in rows for entry in continued[row]]
        for (row, entry), node in zip(nodes, ranked, strict=True):
            for token, claim in zip(*node, strict=True):
                new[row].append(len(tokens[row]))
                tokens[row].append(token)
                parents[row].append(entry)
                claims[row].append(claim)
                value = values[row][entry] if entry >= 0 else 1.0
                values[row].append(value * growth.chance(claim))
        if len(steps) == request.count:
            break
        for row in rows:
            new[row].sort(key=lambda i: -values[row][i])
        chances = [[values[row][i] for i in new[row]] for row in rows]
        beam = growth.beam(len(steps), chances, max_beam)
        if beam == 0:
            break
        chosen = [new[row][:beam] for row in rows]
        places = [[continued[row].index(parents[row][i]) for i in chosen[row]] for row in rows]
        first = sum(steps[:-1]) - 1  # the root is none of the drafts
        for row in rows:
            above[row].extend(first + place for place in places[row])
        level = Level(
            len(steps),
            as_tensor([[tokens[row][i] for i in chosen[row]] for row in rows], beam, device),
            as_tensor(places, beam, device),
            Tree.of(above, device) if max([*steps, beam]) > 1 else None,
        )
        continued = chosen
    return Draft.of_rows(tokens, parents, device=device, chances=claims, steps=tuple(steps))
