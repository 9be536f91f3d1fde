"""Acceptance: prefixes as a plain loop finds them, and the target's distribution exactly."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from multirate.config.generation import GenerationOptions
from multirate.decode import acceptance
from multirate.decode.acceptance import Acceptance, accept_greedy, accept_sampled
from multirate.decode.growth import draw_different
from multirate.decode.sampling import Sampler, draw_categorical, uniform
from multirate.decode.tree import Tree

VOCABULARY = 16
ROWS = 60_000


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Greedy


def greedy_by_loop(drafts: list[int], targets: list[int]) -> list[int]:
    block = []
    for draft, target in zip(drafts, targets, strict=False):
        if draft != target:
            break
        block.append(draft)
    return [*block, targets[len(block)]]


def test_greedy_exhaustively() -> None:
    """Every pair of 3 drafts and 4 targets over two tokens, with every length, in one batch."""
    cases = [
        (drafts, length, targets)
        for drafts in product(range(2), repeat=3)
        for length in range(4)
        for targets in product(range(2), repeat=4)
    ]
    drafts, lengths, targets = zip(*cases, strict=True)
    blocks, paths = accept_greedy(drafts, [[-1, 0, 1]] * len(cases), lengths, targets)
    expected = [greedy_by_loop(list(d[:n]), list(t)) for d, n, t in cases]
    assert blocks == expected
    assert paths == [list(range(1, len(block))) for block in expected]


@given(st.data())
def test_greedy_with_garbage_padding(data: st.DataObject) -> None:
    k = data.draw(st.integers(0, 5))
    token = st.integers(0, 2)
    rows = data.draw(
        st.lists(
            st.tuples(
                st.lists(token, min_size=0, max_size=k),
                st.lists(token, min_size=k + 1, max_size=k + 1),
            ),
            min_size=1,
            max_size=4,
        )
    )
    padding = data.draw(st.sampled_from([-1, 0, 2, 10**9]))
    drafts = [d + [padding] * (k - len(d)) for d, _ in rows]
    chains = [list(range(-1, k - 1))] * len(rows)
    blocks, _ = accept_greedy(drafts, chains, [len(d) for d, _ in rows], [t for _, t in rows])
    assert blocks == [greedy_by_loop(d, t) for d, t in rows]


# Sampled: the mechanics


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_sampled_prefix_is_that_of_a_loop(seed: int, reduced: bool) -> None:
    rows, k = 50, 4
    g = seeded(seed)
    ids = torch.tensor([7, 2, 11, 3]) if reduced else torch.arange(VOCABULARY)
    p = torch.randn(rows, k + 1, VOCABULARY, generator=g).softmax(-1)
    q = torch.randn(rows, k, len(ids), generator=g).softmax(-1)
    drafts = ids[draw_categorical(q, generator=g)]
    lengths = torch.randint(0, k + 1, (rows,), generator=g)
    acceptance = accept_sampled(
        drafts,
        lengths,
        p,
        draft_probs=q,
        draft_ids=ids if reduced else None,
        generator=seeded(seed + 100),
    )
    u = uniform((rows, k), generator=seeded(seed + 100))
    for row in range(rows):
        accepted = 0
        for i in range(int(lengths[row])):
            draft = drafts[row, i]
            column = int((ids == draft).nonzero())
            if u[row, i] >= min(1.0, float(p[row, i, draft]) / float(q[row, i, column])):
                break
            accepted += 1
        assert int(acceptance.entry[row]) == accepted
        if accepted < lengths[row]:  # the corrected token is one the draft proposed too rarely
            token = acceptance.next_token[row]
            proposed = q[row, accepted, ids == token].sum()
            assert p[row, accepted, token] > proposed


def one_draft(
    p: list[float],
    q: list[float] | None,
    draft: int,
    *,
    ids: list[int] | None = None,
    rows: int = 2000,
) -> Acceptance:
    """The same position in many rows; the bonus position is the last token for certain."""
    bonus = [0.0] * (len(p) - 1) + [1.0]
    return accept_sampled(
        torch.full((rows, 1), draft),
        torch.ones(rows, dtype=torch.long),
        torch.tensor([[p, bonus]]).expand(rows, -1, -1),
        draft_probs=None if q is None else torch.tensor([[q]]).expand(rows, -1, -1),
        draft_ids=None if ids is None else torch.tensor(ids),
        generator=seeded(0),
    )


@pytest.mark.parametrize("q", [[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], None], ids=str)
def test_an_impossible_token_is_always_rejected(q: list[float] | None) -> None:
    acceptance = one_draft([0.0, 1.0, 0.0], q, 0)
    assert acceptance.entry.sum() == 0
    assert (acceptance.next_token == 1).all()


def test_the_same_distribution_is_always_accepted() -> None:
    for p in ([0.2, 0.3, 0.5], [1e-38, 0.5, 0.5], [1.0, 0.0, 0.0]):
        acceptance = one_draft(p, p, 0)
        assert (acceptance.entry == 1).all()
        assert (acceptance.next_token == 2).all()


def test_a_draft_its_drafter_could_not_make_is_accepted_where_possible() -> None:
    assert (one_draft([0.2, 0.8], [0.0, 1.0], 0).entry == 1).all()
    assert (one_draft([0.2, 0.8], [1.0], 0, ids=[1]).entry == 1).all()
    assert (one_draft([0.0, 1.0], [1.0], 0, ids=[1]).entry == 0).all()


def test_an_empty_residual_falls_back_to_the_target() -> None:
    # p never exceeds q (both off by rounding), and the draft is rejected now and then.
    acceptance = one_draft([0.45, 0.25, 0.25], [0.5, 0.25, 0.25], 0, rows=20_000)
    rejected = acceptance.entry == 0
    counts = acceptance.next_token[rejected].bincount(minlength=3)
    assert 1500 < rejected.sum() < 2500
    assert (counts > rejected.sum() * 0.2).all()


@pytest.mark.parametrize("draft_ids", [None, torch.arange(5)], ids=["full", "reduced"])
def test_rows_without_drafts_and_padding_that_is_no_id(draft_ids: Tensor | None) -> None:
    p = torch.zeros(3, 3, VOCABULARY)
    p[:, 0, 4] = p[:, 1, 6] = p[:, 2, 8] = 1.0
    drafts = torch.tensor([[-1, -1], [4, 10**6], [4, 6]])
    q = torch.full((3, 2, VOCABULARY if draft_ids is None else 5), 0.2)
    acceptance = accept_sampled(
        drafts,
        torch.tensor([0, 1, 2]),
        p,
        draft_probs=q,
        draft_ids=draft_ids,
        generator=seeded(0),
    )
    assert acceptance.read(drafts)[0] == [[4], [4, 6], [4, 6, 8]]


@pytest.mark.parametrize("deterministic", [False, True])
def test_no_drafts_at_all_is_plain_sampling(deterministic: bool) -> None:
    p = torch.zeros(2, 1, VOCABULARY)
    p[0, 0, 3] = p[1, 0, 5] = 1.0
    acceptance = accept_sampled(
        torch.empty(2, 0, dtype=torch.long),
        torch.zeros(2, dtype=torch.long),
        p,
        draft_probs=None if deterministic else torch.empty(2, 0, VOCABULARY),
        generator=seeded(0),
    )
    assert acceptance.entry.tolist() == [0, 0]
    assert acceptance.next_token.tolist() == [3, 5]


# Sampled: the distribution of what comes out

Accept = Callable[..., Acceptance]


@dataclass(frozen=True)
class Chain:
    """A target of three tokens, p(t1) p(t2|t1) p(t3|t1,t2), and a drafter of the first two."""

    p1: Tensor  # [V]
    p2: Tensor  # [V, V]
    p3: Tensor  # [V, V, V]
    q1: Tensor | None  # [Vd]; None: deterministic drafts
    q2: Tensor | None  # [V, Vd]
    ids: Tensor | None = None  # [Vd]

    def sample(self, accept: Accept, *, seed: int) -> Tensor:
        """The first three tokens of ROWS outputs: `[ROWS, 3]`.

        One step with up to two drafts (as many as chance says); what it leaves open is then drawn
        from the target, as later steps would.
        """
        g = seeded(seed)
        drafts = self._drafts(g)
        q = None
        if self.q1 is not None and self.q2 is not None:
            q = torch.stack([self.q1.expand(ROWS, -1), self.q2[drafts[:, 0]]], dim=1)
        d1, d2 = drafts.unbind(1)
        p = torch.stack([self.p1.expand(ROWS, -1), self.p2[d1], self.p3[d1, d2]], dim=1)
        lengths = torch.randint(0, 3, (ROWS,), generator=g)
        out = accept(drafts, lengths, p, draft_probs=q, draft_ids=self.ids, generator=g)

        tokens = torch.cat([drafts, drafts[:, :1]], dim=1)
        tokens.scatter_(1, out.entry[:, None], out.next_token[:, None])
        done = out.entry + 1
        second = draw_categorical(self.p2[tokens[:, 0]], generator=g)
        tokens[:, 1] = torch.where(done >= 2, tokens[:, 1], second)
        third = draw_categorical(self.p3[tokens[:, 0], tokens[:, 1]], generator=g)
        tokens[:, 2] = torch.where(done >= 3, tokens[:, 2], third)
        return tokens

    def pvalue(self, tokens: Tensor) -> float:
        """Chi-square of the joint of the three tokens against the target's."""
        joint = (self.p1[:, None, None] * self.p2[:, :, None] * self.p3).double().flatten()
        joint = joint / joint.sum()
        code = (tokens[:, 0] * VOCABULARY + tokens[:, 1]) * VOCABULARY + tokens[:, 2]
        counts = code.bincount(minlength=VOCABULARY**3).double()
        if counts[joint == 0].sum() > 0:
            return 0.0
        # Cells that are expected too seldom for the test count as one.
        rare = joint * ROWS < 5
        observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected = torch.cat([joint[~rare], joint[rare].sum()[None]]) * ROWS
        possible = expected > 0
        return float(chisquare(observed[possible], expected[possible]).pvalue)

    def _drafts(self, generator: torch.Generator) -> Tensor:
        if self.q1 is None or self.q2 is None:  # the target's best, sometimes: a good guess
            d1 = torch.arange(ROWS) % 4
            return torch.stack([d1, self.p2.argmax(-1)[d1]], dim=1)
        ids = torch.arange(VOCABULARY) if self.ids is None else self.ids
        d1 = ids[draw_categorical(self.q1.expand(ROWS, -1), generator=generator)]
        d2 = ids[draw_categorical(self.q2[d1], generator=generator)]
        return torch.stack([d1, d2], dim=1)


def make_chain(name: str) -> Chain:
    g = seeded(3)
    v = VOCABULARY
    options = {
        "top-k": GenerationOptions(temperature=0.8, top_k=5),
        "top-p": GenerationOptions(temperature=1.2, top_p=0.7),
        "min-p": GenerationOptions(temperature=1.0, min_p=0.2),
    }.get(name, GenerationOptions(temperature=1.0))
    sampler = Sampler(options, device="cpu")

    def target(*shape: int) -> Tensor:
        logits = torch.randn(*shape, v, generator=g) * 1.5
        return sampler.scores(logits.reshape(1, -1, v), []).softmax(-1).reshape(*shape, v)

    ids = torch.tensor([9, 0, 4, 13, 2, 7]) if name == "reduced" else None
    vd = v if ids is None else len(ids)
    q1 = torch.randn(vd, generator=g).mul(1.5).softmax(-1)
    q2 = torch.randn(v, vd, generator=g).mul(1.5).softmax(-1)
    chain = Chain(target(), target(v), target(v, v), q1, q2, ids)
    if name == "deterministic":
        return replace(chain, q1=None, q2=None)
    if name == "near":  # a good drafter: the target's distribution, blurred
        return replace(chain, q1=(chain.p1 + 1 / v) / 2, q2=(chain.p2 + 1 / v) / 2)
    return chain


CHAINS = ["arbitrary", "near", "reduced", "deterministic", "top-k", "top-p", "min-p"]


@pytest.mark.parametrize("name", CHAINS)
def test_output_has_the_targets_distribution(name: str) -> None:
    chain = make_chain(name)
    assert chain.pvalue(chain.sample(accept_sampled, seed=11)) > 0.01


def always_accept(
    drafts: Tensor,
    lengths: Tensor,
    target_probs: Tensor,
    *,
    draft_probs: Tensor | None,
    draft_ids: Tensor | None,
    generator: torch.Generator,
) -> Acceptance:
    rows = torch.arange(len(drafts))
    return Acceptance(lengths, draw_categorical(target_probs[rows, lengths], generator=generator))


def correct_from_target(
    drafts: Tensor,
    lengths: Tensor,
    target_probs: Tensor,
    *,
    draft_probs: Tensor | None,
    draft_ids: Tensor | None,
    generator: torch.Generator,
) -> Acceptance:
    """Draws the correction from p instead of max(p - q, 0)."""
    n = accept_sampled(
        drafts,
        lengths,
        target_probs,
        draft_probs=draft_probs,
        draft_ids=draft_ids,
        generator=generator,
    ).entry
    rows = torch.arange(len(drafts))
    return Acceptance(n, draw_categorical(target_probs[rows, n], generator=generator))


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("broken", [always_accept, correct_from_target])
def test_broken_acceptance_is_told_apart(name: str, broken: Accept) -> None:
    chain = make_chain(name)
    assert chain.pvalue(chain.sample(broken, seed=11)) < 1e-6


# Sampled trees: the distribution of what comes out

# Two siblings below the last token, two below the first of them, one below the second.
SHAPE = [-1, -1, 0, 0, 1]


def grow(chain: Chain, kind: str, g: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """Drafts `[ROWS, 5]` of the tree `SHAPE`, and what they were drawn from."""
    if kind == "deterministic":
        best = chain.p1.topk(4).indices  # two of them, not the same in all rows
        a = best[torch.stack([torch.arange(ROWS) % 4, torch.arange(1, ROWS + 1) % 4], dim=1)]
        b = chain.p2[a[:, 0]].topk(2).indices
        c = chain.p2[a[:, 1]].topk(1).indices
        return torch.cat([a, b, c], dim=1), None
    assert chain.q1 is not None and chain.q2 is not None
    sampler = Sampler(GenerationOptions(temperature=1.0, seed=5), device="cpu")
    ids = torch.arange(VOCABULARY) if chain.ids is None else chain.ids
    columns, qa = draw_different(chain.q1.expand(ROWS, -1), 2, sampler)
    if kind == "mixed":  # the first is looked up, the second is drawn without regard to it
        columns[:, 0] = torch.arange(ROWS) % 3
        columns[:, 1] = sampler.draw(chain.q1.expand(ROWS, -1))
        certain = torch.nn.functional.one_hot(columns[:, 0], len(ids)).float()
        qa = torch.stack([certain, chain.q1.expand(ROWS, -1)], dim=1)
    a = ids[columns]
    b, qb = draw_different(chain.q2[a[:, 0]], 2, sampler)
    c, qc = draw_different(chain.q2[a[:, 1]], 1, sampler)
    return torch.cat([a, ids[b], ids[c]], dim=1), torch.cat([qa, qb, qc], dim=1)


def sample_tree(chain: Chain, kind: str, *, seed: int = 21) -> Tensor:
    """The first three tokens of ROWS outputs, of which a verified tree gives one to three."""
    g = seeded(seed)
    drafts, q = grow(chain, kind, g)
    a, b, c = drafts[:, :2], drafts[:, 2:4], drafts[:, 4]
    p = torch.stack(
        [
            chain.p1.expand(ROWS, -1),
            chain.p2[a[:, 0]],
            chain.p2[a[:, 1]],
            chain.p3[a[:, 0], b[:, 0]],
            chain.p3[a[:, 0], b[:, 1]],
            chain.p3[a[:, 1], c],
        ],
        dim=1,
    )
    lengths = torch.randint(0, 6, (ROWS,), generator=g)
    tree = Tree.of([SHAPE], torch.device("cpu"))
    out = accept_sampled(
        drafts, lengths, p, draft_probs=q, draft_ids=chain.ids, tree=tree, generator=g
    )
    blocks, _ = out.read(drafts, tree)
    done = torch.tensor([len(block) for block in blocks])
    assert {1, 2, 3} == set(done.tolist())
    tokens = torch.tensor([[*block, 0, 0][:3] for block in blocks])
    second = draw_categorical(chain.p2[tokens[:, 0]], generator=g)
    tokens[:, 1] = torch.where(done >= 2, tokens[:, 1], second)
    third = draw_categorical(chain.p3[tokens[:, 0], tokens[:, 1]], generator=g)
    tokens[:, 2] = torch.where(done >= 3, tokens[:, 2], third)
    return tokens


@pytest.mark.parametrize("name", ["arbitrary", "near", "reduced", "top-k", "top-p"])
@pytest.mark.parametrize("kind", ["without replacement", "mixed", "deterministic"])
def test_trees_have_the_targets_distribution(name: str, kind: str) -> None:
    chain = make_chain(name)
    assert chain.pvalue(sample_tree(chain, kind)) > 0.01


@pytest.mark.parametrize("kind", ["without replacement", "mixed", "deterministic"])
def test_siblings_asked_against_the_same_target_are_told_apart(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, "_without", lambda weights, *_: weights)
    chain = make_chain("arbitrary")
    assert chain.pvalue(sample_tree(chain, kind)) < 1e-6


def test_different_draws_are_different_and_end_with_the_distribution() -> None:
    q = torch.tensor([[0.5, 0.3, 0.2, 0.0]]).expand(1000, -1)
    sampler = Sampler(GenerationOptions(temperature=1.0, seed=0), device="cpu")
    columns, drawn_from = draw_different(q, 4, sampler)
    assert (columns.sort(dim=1).values == torch.arange(4)).float().mean() > 0.2
    assert (columns[:, :3].sort(dim=1).values == torch.arange(3)).all()
    assert torch.allclose(drawn_from.sum(-1), torch.ones(1000, 4))
    assert (drawn_from.gather(2, columns[..., None]) > 0).all()
