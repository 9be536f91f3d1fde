"""Which drafted tokens stay: exact acceptance of trees of drafts, a chain being one of them.

Pure functions; nothing here knows a model, a cache or a stop condition. The emitted
tokens follow the target's distribution exactly, whatever the drafter proposes (chains: Leviathan et
al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318; trees: SpecInfer, arXiv 2305.09781).

Shapes: R rows, n drafts at most, V vocabulary, Vd the drafter's (reduced) vocabulary. A row with
fewer than n drafts says so in `lengths`; what stands beyond is padding and may hold anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from multirate.decode.sampling import draw_categorical, uniform
from multirate.decode.tree import Tree, path_to


@dataclass(frozen=True, eq=False)
class Acceptance:
    """The outcome of one verification.

    Attributes:
        entry: LongTensor `[R]`, the block entry of the last token that stays: 0 if no draft does, i
            for draft i - 1. Of a chain it is the number of drafts that stay.
        next_token: LongTensor `[R]`, the target's own token after it.
    """

    entry: Tensor
    next_token: Tensor

    def read(
        self, drafts: Tensor, tree: Tree | None = None
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Move the results to the host: the one place here that waits for the device.

        Args:
            drafts: LongTensor `[R, n]`.
            tree: of the drafts; None for a chain.

        Returns:
            For each row its new tokens (the drafts that stay, then `next_token`), and the block
            entries of the drafts that stay.
        """
        rows, n = drafts.shape
        parts = [self.entry[:, None], self.next_token[:, None], drafts.to(torch.long)]
        if tree is not None:
            parts.append(tree.parents.expand(rows, n))
        blocks, paths = [], []
        for entry, token, *rest in torch.cat(parts, dim=1).tolist():
            path = list(range(1, entry + 1)) if tree is None else path_to(entry, rest[n:])
            blocks.append([*(rest[i - 1] for i in path), token])
            paths.append(path)
        return blocks, paths


def accept_greedy(
    drafts: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]],
    lengths: Sequence[int],
    targets: Sequence[Sequence[int]],
) -> tuple[list[list[int]], list[list[int]]]:
    """Keep the root path of the drafts that greedy decoding would have written itself.

    On the host: a walk over so few numbers takes less time than asking a device for it.

    Args:
        drafts: n tokens a row.
        parents: of each draft, as in `Draft`: -1 = the last token. Of equal siblings the eldest counts.
        lengths: valid drafts of each row, 0..n.
        targets: n + 1 a row, argmax of the target's scores at each block entry.

    Returns:
        As `Acceptance.read`.
    """
    blocks, paths = [], []
    for tokens, above, length, wanted in zip(drafts, parents, lengths, targets, strict=True):
        places: dict[tuple[int, int], int] = {}
        for entry, key in enumerate(zip(above[:length], tokens, strict=False), 1):
            places.setdefault(key, entry)
        path: list[int] = []
        found = places.get((-1, wanted[0]))
        while found is not None:
            path.append(found)
            found = places.get((found - 1, wanted[found]))
        blocks.append([*(tokens[entry - 1] for entry in path), wanted[path[-1] if path else 0]])
        paths.append(path)
    return blocks, paths


def accept_sampled(
    drafts: Tensor,
    lengths: Tensor,
    target_probs: Tensor,
    *,
    draft_probs: Tensor | None,
    draft_ids: Tensor | None = None,
    tree: Tree | None = None,
    generator: torch.Generator,
) -> Acceptance:
    """Speculative sampling: the emitted tokens are distributed exactly as the target's.

    The walk starts at the last token with weights p, the target's distribution there. Its children
    are asked in their order: d, proposed from q, stays with probability min(1, p(d) / q(d)), and the
    walk goes on from there. If it does not, p becomes max(p - q, 0), normalised, for the next
    child. When no child is left, the next token is drawn from p (recursive rejection sampling).

    Args:
        drafts: LongTensor `[R, n]`, each drawn from its `draft_probs`.
        lengths: LongTensor `[R]`, valid drafts of each row, 0..n. Which drafts a row has may depend
            on what was drawn before them, never on the value of a draft that is then left out.
        target_probs: p, float32 `[R, n + 1, V]`, after every processor.
        draft_probs: q, float32 `[R, n, Vd]`: the distribution that each draft was really drawn from,
            given its ancestors and the siblings before it (drawn without replacement: without
            those). None if the drafts were not drawn at random (best choices, n-gram lookup): q
            is then 1 at d.
        draft_ids: LongTensor `[Vd]`, distinct full ids of the columns of q; ids that are not
            among them have q = 0. None if Vd is V.
        tree: of the drafts; None for a chain.
        generator: the source of randomness, on the tensors' device.

    Numerical edges, each settled so that the output stays the target's:
        - p(d) = 0 is always rejected, also where q(d) = 0.
        - q(d) = 0 < p(d) cannot happen for a draft drawn from q; a drafter that breaks the
          promise (an id outside its vocabulary, a weight that underflowed) has the draft
          accepted, which is the limit of min(1, p/q) for small q.
        - If rounding leaves max(p - q, 0) without any weight, p and q are equal up to rounding
          (or p is a point mass at d), and p stays as it is.
    """
    rows, n = drafts.shape
    assert target_probs.shape[:2] == (rows, n + 1)
    assert draft_probs is None or draft_probs.shape[:2] == (rows, n)
    valid = _valid(drafts, lengths)
    drafts = drafts.where(valid, 0)  # padding may not be an id at all
    parents = (tree or Tree.chain(n, drafts.device)).parents.expand(rows, n)
    q_drafted = _drafted_probs(
        drafts, draft_probs, draft_ids, vocabulary=target_probs.shape[-1]
    )  # [R, n]
    u = uniform((rows, n), generator=generator)

    entry = torch.zeros(rows, dtype=torch.long, device=drafts.device)
    weights = target_probs[:, 0]  # p at `entry`, not normalised: it sums to `total`
    total = torch.ones(rows, device=drafts.device)
    for i in range(n):  # a child stands behind its parent and its elder siblings
        asked = valid[:, i] & (parents[:, i] == entry)
        p_drafted = weights.gather(1, drafts[:, i, None]).squeeze(1)
        # u < p/q without the division: u < 1, so p >= q always stays; 0 < 0 never does.
        stays = asked & (u[:, i] * q_drafted[:, i] * total < p_drafted)
        residual = _without(weights, total, drafts[:, i], draft_probs, draft_ids, i)
        left = residual.sum(1)
        reduced = asked & ~stays & (left > 0)
        entry = torch.where(stays, i + 1, entry)
        total = torch.where(stays, 1.0, torch.where(reduced, left, total))
        weights = torch.where(
            stays[:, None],
            target_probs[:, i + 1],
            torch.where(reduced[:, None], residual, weights),
        )
    return Acceptance(entry, draw_categorical(weights, generator=generator))


def _without(
    weights: Tensor,
    total: Tensor,
    draft: Tensor,
    draft_probs: Tensor | None,
    draft_ids: Tensor | None,
    i: int,
) -> Tensor:
    """max(p - q, 0) of draft i, `[R, V]`, for p of sum `total`."""
    if draft_probs is None:
        return weights.scatter(1, draft[:, None], 0.0)
    q = draft_probs[:, i] * total[:, None]
    if draft_ids is None:
        return (weights - q).clamp_(min=0)
    return weights.index_add(1, draft_ids, -q).clamp_(min=0)


def _valid(drafts: Tensor, lengths: Tensor) -> Tensor:
    """Bool `[R, n]`: which drafts are drafts, not padding."""
    return torch.arange(drafts.shape[1], device=drafts.device) < lengths[:, None]


def _drafted_probs(
    drafts: Tensor, draft_probs: Tensor | None, draft_ids: Tensor | None, *, vocabulary: int
) -> Tensor:
    """q of each drafted token, float32 `[R, n]`."""
    if draft_probs is None:
        return torch.ones(drafts.shape, dtype=torch.float32, device=drafts.device)
    if draft_ids is None:
        assert draft_probs.shape[-1] == vocabulary, "a reduced vocabulary needs draft_ids"
        return draft_probs.gather(2, drafts[..., None]).squeeze(2)
    columns = torch.full((vocabulary,), -1, dtype=torch.long, device=drafts.device)
    columns[draft_ids] = torch.arange(len(draft_ids), device=drafts.device)
    column = columns[drafts]  # [R, n]; -1: outside the drafter's vocabulary
    q = draft_probs.gather(2, column.clamp(min=0)[..., None]).squeeze(2)
    return q.where(column >= 0, 0.0)
