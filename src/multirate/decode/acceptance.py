"""Which drafted tokens stay: exact acceptance of a chain of drafts.

Pure functions on tensors; nothing here knows a model, a cache or a stop condition. The emitted
tokens follow the target's distribution exactly, whatever the drafter proposes (Leviathan et al.
2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).

Shapes: R rows, k drafts at most, V vocabulary, Vd the drafter's (reduced) vocabulary. A row with
fewer than k drafts says so in `lengths`; what stands beyond is padding and may hold anything.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from multirate.decode.sampling import draw_categorical, uniform


@dataclass(frozen=True, eq=False)
class Acceptance:
    """The outcome of one verification.

    Attributes:
        num_accepted: LongTensor `[R]`, how many of the row's drafts stay.
        next_token: LongTensor `[R]`, the target's own token after them: the correction of the
            first rejected draft, or the bonus token when all stay.
    """

    num_accepted: Tensor
    next_token: Tensor

    def blocks(self, drafts: Tensor) -> list[list[int]]:
        """Each row's new tokens: its accepted drafts `[R, k]`, then `next_token`.

        Moves the results to the host: the one place here that waits for the device.
        """
        table = torch.cat(
            [self.num_accepted[:, None], self.next_token[:, None], drafts.to(torch.long)], dim=1
        ).tolist()
        return [[*row[2 : 2 + row[0]], row[1]] for row in table]


def accept_greedy(drafts: Tensor, lengths: Tensor, targets: Tensor) -> Acceptance:
    """Keep the longest prefix of the drafts that greedy decoding would have written itself.

    Args:
        drafts: LongTensor `[R, k]`.
        lengths: LongTensor `[R]`, valid drafts of each row, 0..k.
        targets: LongTensor `[R, k + 1]`, argmax of the target's scores at each position.
    """
    k = drafts.shape[1]
    assert targets.shape == (drafts.shape[0], k + 1)
    matches = (drafts == targets[:, :k]) & _valid(drafts, lengths)
    num_accepted = _leading(matches)
    return Acceptance(num_accepted, targets.gather(1, num_accepted[:, None]).squeeze(1))


def accept_sampled(
    drafts: Tensor,
    lengths: Tensor,
    target_probs: Tensor,
    *,
    draft_probs: Tensor | None,
    draft_ids: Tensor | None = None,
    generator: torch.Generator,
) -> Acceptance:
    """Speculative sampling: the emitted tokens are distributed exactly as the target's.

    Draft d at position i stays with probability min(1, p_i(d) / q_i(d)). At the first that does
    not, the next token is drawn from max(p_i - q_i, 0), normalised; if all stay, from p after
    them.

    Args:
        drafts: LongTensor `[R, k]`, each drawn from its `draft_probs`.
        lengths: LongTensor `[R]`, valid drafts of each row, 0..k. A row's number of drafts may
            depend on what came before, never on the value of a draft that is then left out.
        target_probs: p, float32 `[R, k + 1, V]`, after every processor.
        draft_probs: q, float32 `[R, k, Vd]`: the distribution that was really sampled. None if
            the drafts were not drawn at random (greedy draft, n-gram lookup): q is then 1 at d.
        draft_ids: LongTensor `[Vd]`, distinct full ids of the columns of q; ids that are not
            among them have q = 0. None if Vd is V.
        generator: the source of randomness, on the tensors' device.

    Numerical edges, each settled so that the output stays the target's:
        - p(d) = 0 is always rejected, also where q(d) = 0.
        - q(d) = 0 < p(d) cannot happen for a draft drawn from q; a drafter that breaks the
          promise (an id outside its vocabulary, a weight that underflowed) has the draft
          accepted, which is the limit of min(1, p/q) for small q.
        - If rounding leaves max(p - q, 0) without any weight, p and q are equal up to rounding
          (or p is a point mass at d), and the next token is drawn from p.
    """
    rows, k = drafts.shape
    assert target_probs.shape[:2] == (rows, k + 1)
    assert draft_probs is None or draft_probs.shape[:2] == (rows, k)
    vocabulary = target_probs.shape[-1]
    valid = _valid(drafts, lengths)
    drafts = drafts.where(valid, 0)  # padding may not be an id at all

    p_drafted = target_probs[:, :k].gather(2, drafts[..., None]).squeeze(2)
    q_drafted = _drafted_probs(drafts, draft_probs, draft_ids, vocabulary=vocabulary)
    # u < p/q without the division: u < 1, so p >= q always stays; 0 < 0 never does.
    u = uniform((rows, k), generator=generator)
    num_accepted = _leading((u * q_drafted < p_drafted) & valid)

    row = torch.arange(rows, device=drafts.device)
    weights = target_probs[row, num_accepted]  # [R, V]
    if k > 0:
        rejected = (num_accepted < lengths)[:, None]
        position = num_accepted.clamp(max=k - 1)  # the clamped rows rejected nothing
        q = torch.zeros_like(weights)
        if draft_probs is None:
            q.scatter_(1, drafts[row, position][:, None], 1.0)
        elif draft_ids is None:
            q = draft_probs[row, position]
        else:
            q.index_copy_(1, draft_ids, draft_probs[row, position])
        residual = (weights - q).clamp_(min=0)
        usable = rejected & (residual.sum(dim=1, keepdim=True) > 0)
        weights = torch.where(usable, residual, weights)
    return Acceptance(num_accepted, draw_categorical(weights, generator=generator))


def _valid(drafts: Tensor, lengths: Tensor) -> Tensor:
    """Bool `[R, k]`: which drafts are drafts, not padding."""
    return torch.arange(drafts.shape[1], device=drafts.device) < lengths[:, None]


def _leading(accepted: Tensor) -> Tensor:
    """How many of `[R, k]` are true before the first that is not: LongTensor `[R]`."""
    return accepted.to(torch.long).cumprod(dim=1).sum(dim=1)


def _drafted_probs(
    drafts: Tensor, draft_probs: Tensor | None, draft_ids: Tensor | None, *, vocabulary: int
) -> Tensor:
    """q of each drafted token, float32 `[R, k]`."""
    if draft_probs is None:
        return torch.ones(drafts.shape, dtype=torch.float32, device=drafts.device)
    if draft_ids is None:
        assert draft_probs.shape[-1] == vocabulary, "a reduced vocabulary needs draft_ids"
        return draft_probs.gather(2, drafts[..., None]).squeeze(2)
    columns = torch.full((vocabulary,), -1, dtype=torch.long, device=drafts.device)
    columns[draft_ids] = torch.arange(len(draft_ids), device=drafts.device)
    column = columns[drafts]  # [R, k]; -1: outside the drafter's vocabulary
    q = draft_probs.gather(2, column.clamp(min=0)[..., None]).squeeze(2)
    return q.where(column >= 0, 0.0)
