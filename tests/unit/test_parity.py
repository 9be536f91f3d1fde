"""The layer loop over the KV arena against transformers' own forward, for every architecture.

The reference is always `model(input_ids)`: the whole sequence at once, without a cache. The last
part holds accelerators to the same base: they run on every architecture and never change it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from tiny_models import MAX_POSITIONS, NUM_LAYERS, TINY_MODELS, VOCABULARY, WINDOW, tiny_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from multirate.models.architectures import FULL, SLIDING, SUPPORTED_MODEL_TYPES
from multirate.models.arena import KVArena
from multirate.models.base import BaseModel
from multirate.streams.accelerator import Accelerator, Carried
from multirate.streams.layers import TiedLayer

ATOL = 1e-5
LENGTHS = (11, 7, 9)  # rows of a batch

DRAFT_VOCABULARY = 13
ACCELERATORS = {  # preset and what differs from it
    "carry": ("carry", {"draft_vocab_size": DRAFT_VOCABULARY}),
    "paper": ("paper", {"attended_tokens": 3, "num_heads": 2}),
    "paper-later-gate": ("paper", {"gates": (1, 3)}),
}

# A draft tree: each node's parent, -1 = the last verified token. Siblings lie between a node and
# its parent, so slots are not positions, and the deepest paths leave the attention window behind.
PARENTS = (-1, -1, -1, 2, 2, 4, 0, 5, 7, 7, 9, 10, 11, 11)
OTHER_PARENTS = (-1, -1, 0, 1, 1, 3, 5, 2, 6, 8, 9, 4, 10, 12)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", params=TINY_MODELS)
def base(request: pytest.FixtureRequest) -> BaseModel:
    return BaseModel(tiny_model(request.param))


def tokens(*shape: int, seed: int = 0) -> Tensor:
    """Random token ids, the special ones left out."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, shape, generator=generator)


def forward(
    base: BaseModel, ids: Tensor, starts: Sequence[int], arena: KVArena, **tree: Tensor
) -> Tensor:
    """Logits `[B, n, V]` of the block `ids` behind each row's first `starts[row]` slots."""
    block = base.block(starts, ids.shape[1], **tree)
    return base.head(base.run_layers(base.embed(ids), 0, base.num_layers, block, arena))


def reference(base: BaseModel, ids: Tensor) -> Tensor:
    """Logits `[B, n, V]` of transformers' forward over whole sequences."""
    return base.model(ids, use_cache=False).logits


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=ATOL, rtol=0)


def test_every_supported_architecture_has_a_tiny_model() -> None:
    assert {name.split("-")[0] for name in TINY_MODELS} == set(SUPPORTED_MODEL_TYPES)


def test_tiny_models_tell_a_window_from_none(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this, the tests below would pass with a wrong window."""
    ids = tokens(1, 20)
    with monkeypatch.context() as patch:
        patch.setattr("multirate.models.base.layer_types", lambda _: (FULL,) * NUM_LAYERS)
        wrong = BaseModel(base.model)
    error = (forward(wrong, ids, [0], base.arena(rows=1, max_len=20)) - reference(base, ids)).abs()
    if SLIDING in base.layer_types:
        assert error[:, :WINDOW].max() < ATOL or base.architecture.rotary_per_type
        assert error[:, -1].max() > 0.01
    else:
        assert error.max() < ATOL


def test_prefill(base: BaseModel) -> None:
    ids = tokens(1, 20)
    assert_close(forward(base, ids, [0], base.arena(rows=1, max_len=32)), reference(base, ids))


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((7, 5, 8), id="chunked-prefill"),
        pytest.param((8, *[1] * 12), id="one-token-decode"),
        pytest.param((9, 5, 1, 6), id="verify-blocks"),
    ],
)
def test_blocks_one_after_another(base: BaseModel, sizes: tuple[int, ...]) -> None:
    ids, arena = tokens(1, sum(sizes)), base.arena(rows=1, max_len=32)
    start, logits = 0, []
    for part in ids.split(list(sizes), dim=1):
        logits.append(forward(base, part, [start], arena))
        start += part.shape[1]
    assert_close(torch.cat(logits, dim=1), reference(base, ids))


def test_rollback(base: BaseModel) -> None:
    """A rejected block leaves no trace, whether it is overwritten in part, wholly or not at all."""
    prompt, rejected, other = tokens(1, 9), tokens(1, 6, seed=1), tokens(1, 9, seed=2)
    arena = base.arena(rows=1, max_len=32)
    forward(base, prompt, [0], arena)
    forward(base, rejected, [9], arena)
    kept = torch.cat([prompt, rejected[:, :2]], dim=1)  # two of the six accepted
    ids = torch.cat([kept, other], dim=1)
    expected = reference(base, ids)
    assert_close(forward(base, other[:, :1], [11], arena), expected[:, 11:12])
    assert_close(forward(base, other[:, 1:4], [12], arena), expected[:, 12:15])
    forward(base, rejected, [15], arena)
    assert_close(forward(base, other[:, 4:], [15], arena), expected[:, 15:])


def test_rows_of_different_lengths(base: BaseModel) -> None:
    """Right-padded prefill, decode, verify with uneven acceptance, and a row that leaves."""
    ids, arena = tokens(len(LENGTHS), 24), base.arena(rows=len(LENGTHS), max_len=32)
    expected = reference(base, ids)
    assert_close(expected[1:2], reference(base, ids[1:2]))  # so it stands for each row's own
    padded = ids[:, : max(LENGTHS)].clone()
    for row, length in enumerate(LENGTHS):
        padded[row, length:] = 0
    logits = forward(base, padded, [0] * len(LENGTHS), arena)
    for row, length in enumerate(LENGTHS):
        assert_close(logits[row, :length], expected[row, :length])

    def check(rows: Sequence[int], starts: Sequence[int], n: int) -> None:
        at = torch.tensor(starts)[:, None] + torch.arange(n)
        block = ids[list(rows)].gather(1, at)
        wanted = expected[torch.tensor(rows)[:, None], at]
        assert_close(forward(base, block, starts, arena), wanted)

    check((0, 1, 2), LENGTHS, 1)
    starts = [length + 1 for length in LENGTHS]
    check((0, 1, 2), starts, 4)
    forward(base, tokens(3, 6, seed=1), [s + 4 for s in starts], arena)  # wholly rejected
    starts = [starts[0] + 1, starts[1] + 4, starts[2]]  # of the 4 before: 1, 4 and 0 accepted
    check((0, 1, 2), starts, 3)
    arena.keep(torch.tensor([2, 0]))
    assert (arena.rows, arena.max_len) == (2, 32)
    check((2, 0), [starts[2] + 3, starts[0] + 3], 2)


@pytest.mark.parametrize("k", range(NUM_LAYERS + 1))
def test_partial_runs(base: BaseModel, k: int) -> None:
    """0..k then k..N is 0..N bit for bit, over arenas of their own."""
    ids, n = tokens(2, 10), base.num_layers
    whole, parts = base.arena(rows=2, max_len=16), base.arena(rows=2, max_len=16)
    for starts in ([0, 0], [10, 6]):  # the second block: on top of what each arena holds by now
        block = base.block(starts, ids.shape[1])
        expected = base.run_layers(base.embed(ids), 0, n, block, whole)
        h = base.run_layers(base.embed(ids), 0, k, block, parts)
        assert torch.equal(base.run_layers(h, k, n, block, parts), expected)
        ids = tokens(2, 3, seed=1)


def test_states_are_the_slow_states(base: BaseModel) -> None:
    ids, n = tokens(1, 12), base.num_layers
    expected = base.model(ids, use_cache=False, output_hidden_states=True).hidden_states
    block, arena = base.block([0], 12), base.arena(rows=1, max_len=12)
    states = dict.fromkeys(range(n + 1), torch.empty(0))
    h = base.run_layers(base.embed(ids), 0, n, block, arena, states=states)
    for i in range(n):
        assert_close(states[i], expected[i])
    assert torch.equal(states[n], h)
    assert_close(base.final_norm(states[n]), expected[n])  # transformers' last one is normed

    some = {1: torch.empty(0), n: torch.empty(0)}  # only the asked ones, and only in the range
    base.run_layers(base.embed(ids), 0, 2, block, arena, states=some)
    assert set(some) == {1, n}
    assert torch.equal(some[1], states[1])
    assert some[n].numel() == 0


def ancestors(parents: Sequence[int]) -> list[list[int]]:
    """Each node's path from the root, itself included."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append((paths[parent] if parent >= 0 else []) + [node])
    return paths


def tree_arguments(parents: Sequence[int]) -> dict[str, Tensor]:
    """`depths` `[n]` and `block_mask` `[n, n]` of a draft tree."""
    paths = ancestors(parents)
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node, path in enumerate(paths):
        mask[node, path] = True
    return {"depths": torch.tensor([len(p) - 1 for p in paths]), "block_mask": mask}


@pytest.mark.parametrize(
    "parents",
    [
        pytest.param([PARENTS] * len(LENGTHS), id="one-tree"),
        pytest.param([PARENTS, OTHER_PARENTS, PARENTS], id="tree-per-row"),
    ],
)
def test_draft_tree(base: BaseModel, parents: list[tuple[int, ...]]) -> None:
    """Along every path from root to leaf, a tree's logits are those of the path as a chain."""
    ids, draft = tokens(len(LENGTHS), max(LENGTHS)), tokens(len(LENGTHS), len(PARENTS), seed=1)
    arena = base.arena(rows=len(LENGTHS), max_len=32)
    forward(base, ids, [0] * len(LENGTHS), arena)
    trees = [tree_arguments(p) for p in parents]
    shared = all(p == parents[0] for p in parents)
    tree = trees[0] if shared else {k: torch.stack([t[k] for t in trees]) for k in trees[0]}
    logits = forward(base, draft, LENGTHS, arena, **tree)
    leaves = [
        (row, path)
        for row in range(len(LENGTHS))
        for node, path in enumerate(ancestors(parents[row]))
        if node not in parents[row]
    ]
    assert max(len(path) for _, path in leaves) > WINDOW
    chains = [torch.cat([ids[row, : LENGTHS[row]], draft[row, path]]) for row, path in leaves]
    expected = reference(base, pad_sequence(chains, batch_first=True))  # no chain sees its padding
    for chain, (row, path) in zip(expected, leaves, strict=True):
        start = LENGTHS[row]
        assert_close(logits[row, path], chain[start : start + len(path)])
    as_chain = forward(base, draft, LENGTHS, arena)
    assert (as_chain - logits)[:, -1].abs().max() > 0.01  # the tree did matter


def test_block_at_the_end_of_the_arena(base: BaseModel) -> None:
    """The last slot is usable, and so is the last position the model was made for."""
    ids, arena = tokens(1, MAX_POSITIONS), base.arena(rows=1, max_len=MAX_POSITIONS)
    assert base.context_length == MAX_POSITIONS
    forward(base, ids[:, :-1], [0], arena)
    last = forward(base, ids[:, -1:], [MAX_POSITIONS - 1], arena)
    assert_close(last, reference(base, ids)[:, -1:])


def make_accelerator(base: BaseModel, name: str, *, trained: bool) -> Accelerator:
    """`trained`: no weight is left at zero, so that whatever leaks into the base shows."""
    preset, changes = ACCELERATORS[name]
    torch.manual_seed(0)
    made = Accelerator.from_preset(preset, base, **changes)
    config = made.config
    if trained:
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    if config.draft_vocab_size is not None:
        made.set_draft_ids(torch.randperm(VOCABULARY)[:DRAFT_VOCABULARY])
    return made


def prefill(
    base: BaseModel, ids: Tensor, lengths: Sequence[int], arena: KVArena, keep: Sequence[int]
) -> Carried:
    """Run right-padded rows; the slow states `keep` that the last token of each leaves behind."""
    states = dict.fromkeys(keep, torch.empty(0))
    block = base.block([0] * len(lengths), ids.shape[1])
    base.run_layers(base.embed(ids), 0, base.num_layers, block, arena, states=states)
    rows, last = torch.arange(len(lengths))[:, None], torch.tensor(lengths)[:, None] - 1
    return Carried(tuple(states[i][rows, last] for i in keep), own=False)


def draft(
    accelerator: Accelerator,
    ids: Tensor,
    lengths: Sequence[int],
    arena: KVArena,
    carried: Carried,
) -> Tensor:
    """Draft logits `[B, n, Vd]` of n steps one after another on the tokens `ids` `[B, n]`."""
    logits = []
    for step, token in enumerate(ids.split(1, dim=1)):
        block = accelerator.base.block([length + step for length in lengths], 1)
        prefix = accelerator.prefix(lengths, block.positions)
        out, carried = accelerator.step(token, carried, block, arena, prefix)
        logits.append(out)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("name", ACCELERATORS)
@pytest.mark.parametrize("trained", [False, True], ids=["new", "trained"])
def test_accelerator_steps(base: BaseModel, name: str, trained: bool) -> None:
    """Draft logits have the right shape, depend on the token, and are each row's own."""
    accelerator = make_accelerator(base, name, trained=trained)
    lengths, steps = (11, 7), 3
    prompt, ids = tokens(2, 11), tokens(2, steps, seed=1)
    arena = base.arena(rows=2, max_len=16)
    carried = prefill(base, prompt, lengths, arena, accelerator.carry_layers)
    logits = draft(accelerator, ids, lengths, arena, carried)
    size = accelerator.config.draft_vocab_size or VOCABULARY
    assert logits.shape == (2, steps, size)
    assert logits.isfinite().all()
    other = draft(accelerator, ids.roll(1, dims=0), lengths, arena, carried)
    assert (other - logits).abs().amax(dim=(1, 2)).min() > 0.01
    for row, length in enumerate(lengths):
        alone = base.arena(rows=1, max_len=16)
        only = slice(row, row + 1)
        kept = prefill(base, prompt[only, :length], [length], alone, accelerator.carry_layers)
        assert_close(draft(accelerator, ids[only], [length], alone, kept), logits[only])


@pytest.mark.parametrize("name", ACCELERATORS)
def test_accelerator_leaves_the_base_alone(base: BaseModel, name: str) -> None:
    """Weights, modules and plain logits are bit-identical before, beside and after it."""
    lengths, prompt, ids = (11, 7), tokens(2, 11), tokens(2, 3, seed=1)
    before = {name: value.clone() for name, value in base.model.state_dict().items()}
    modules = {name: id(module) for name, module in base.model.named_modules()}
    plain_arena = base.arena(rows=2, max_len=16)
    prefill(base, prompt, lengths, plain_arena, ())
    plain = forward(base, ids, lengths, plain_arena)

    accelerator = make_accelerator(base, name, trained=True)
    arena = base.arena(rows=2, max_len=16)
    carried = prefill(base, prompt, lengths, arena, accelerator.carry_layers)
    draft(accelerator, ids, lengths, arena, carried)  # leaves provisional keys and values behind
    assert torch.equal(forward(base, ids, lengths, arena), plain)

    after = base.model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert modules == {name: id(module) for name, module in base.model.named_modules()}
    own = {parameter.data_ptr() for parameter in accelerator.parameters()}
    assert own.isdisjoint(value.data_ptr() for value in after.values())


@pytest.mark.parametrize("name", ACCELERATORS)
def test_draft_logits_are_the_heads(base: BaseModel, name: str) -> None:
    """On a slow state the draft logits are the base's own, for the draft vocabulary's tokens."""
    accelerator, h = make_accelerator(base, name, trained=True), torch.randn(2, 3, base.hidden_size)
    expected = base.head(h)
    if accelerator.draft_ids is not None:
        expected = expected[..., accelerator.draft_ids]
    assert_close(accelerator.draft_logits(h), expected)


def test_gate_entry_is_the_slow_state(base: BaseModel) -> None:
    accelerator, ids = make_accelerator(base, "paper-later-gate", trained=True), tokens(1, 7)
    arena = base.arena(rows=1, max_len=8)
    slow = prefill(base, ids, [7], arena, accelerator.config.gates[:1])
    p = accelerator.enter(ids[:, 6:], Carried((), own=False), base.block([6], 1), arena)
    assert_close(p, slow.states[0])


def test_lean_layers_see_the_verified_window_only(base: BaseModel) -> None:
    """Keys and values beyond a row's length, or out of its window, do not reach a lean layer."""
    accelerator = make_accelerator(base, "paper", trained=True)
    lengths, prompt, ids = (11, 7), tokens(2, 11), tokens(2, 1, seed=1)
    arena = base.arena(rows=2, max_len=16)
    carried = prefill(base, prompt, lengths, arena, ())
    before = draft(accelerator, ids, lengths, arena, carried)
    for layer, kind in zip(arena.layers, base.layer_types, strict=True):
        first = [length - WINDOW + 1 if kind == SLIDING else 0 for length in lengths]
        values = layer.values.clone()
        for row, length in enumerate(lengths):
            layer.values[row, :, first[row] : length] += 1.0
        assert not torch.equal(draft(accelerator, ids, lengths, arena, carried), before)
        layer.values.copy_(values)
        for row, length in enumerate(lengths):
            for unseen in (slice(0, first[row]), slice(length, None)):
                layer.keys[row, :, unseen] = layer.values[row, :, unseen] = 9.0
        assert torch.equal(draft(accelerator, ids, lengths, arena, carried), before)


def test_tied_layer_starts_as_the_base_layer(base: BaseModel) -> None:
    """With zero adapters a tied layer is the base layer, exactly, on the base's own tensors."""
    accelerator = make_accelerator(base, "carry", trained=False)
    ids, lengths = tokens(2, 3, seed=1), (11, 7)
    mine, theirs = base.arena(rows=2, max_len=16), base.arena(rows=2, max_len=16)
    for arena in (mine, theirs):
        prefill(base, tokens(2, 11), lengths, arena, ())
    block = base.block(lengths, ids.shape[1])
    h = base.embed(ids)
    for i, layer in zip(accelerator.config.schedule.layers, accelerator.layers, strict=True):
        assert isinstance(layer, TiedLayer)
        expected = base.run_layers(h, i, i + 1, block, theirs)
        assert torch.equal(layer(h, block, mine, None), expected)
        assert torch.equal(mine.layers[i].keys, theirs.layers[i].keys)
        assert torch.equal(mine.layers[i].values, theirs.layers[i].values)
        tensors = {p.data_ptr() for p in base.layers[i].parameters()}
        adapters = {p.data_ptr() for p in layer.adapters.parameters()}
        assert {p.data_ptr() for p in layer.tied.parameters()} == tensors | adapters
        for adapter in layer.adapters.values():
            adapter.B.data.fill_(0.1)
        assert (layer(h, block, mine, None) - expected).abs().max() > 0.01
        h = expected
