"""`multirate analyze`: what its numbers mean, on models small enough to compute them another way."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_cli
import torch
from test_cli import Cli, save_model, tokenizer
from tiny_models import NUM_LAYERS, VOCABULARY, tiny_model

from multirate.analyze import text
from multirate.analyze.alignment import alignment_layers, alignment_tasks, exits
from multirate.analyze.costs import ModelShape
from multirate.analyze.rates import rate_stacks
from multirate.analyze.run import analyze, output_files, write_analysis
from multirate.analyze.stacks import Stack, run_stack
from multirate.analyze.states import CachedText, next_tokens, read_batch
from multirate.analyze.tasks import FIGURES, AnalysisOptions, Study
from multirate.analyze.text import TOKEN_CLASSES, Text, token_classes
from multirate.analyze.velocity import Velocity
from multirate.config.errors import MultirateError
from multirate.decode.engine import Engine
from multirate.decode.loop import prefill
from multirate.models.base import BaseModel
from multirate.streams.accelerator import Accelerator, Carried

cli = test_cli.cli  # the fixture

QUICK = AnalysisOptions(tokens=600, epochs=1, rank=4)
METHODS = ["raw exit", "linear", "LITE-style", "carry", "lean", "tied"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty prompts with answers of 24 characters each."""
    generator = torch.Generator().manual_seed(0)

    def letters(count: int) -> str:
        ids = torch.randint(0, 10, (count,), generator=generator).tolist()
        return "".join("abc defg1."[i] for i in ids)

    rows = [{"prompt": f"{i:02d}{letters(4)}", "completion": letters(24)} for i in range(40)]
    file = tmp_path_factory.mktemp("analyze") / "text.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("analyze") / "model")


def engine(name: str, preset: str | None = None, **changes: Any) -> Engine:
    base = BaseModel(tiny_model(name))
    stream = Accelerator.from_preset(preset, base, **changes) if preset else None
    return Engine(base, tokenizer=tokenizer(), accelerator=stream)


def study(base: BaseModel, seed: int = 0) -> Study:
    """With the states of six random texts, two of them held out."""
    made = Study(base, ModelShape.of(base), QUICK, CachedText(base), CachedText(base))
    generator = torch.Generator().manual_seed(seed)
    texts = [
        Text(torch.randint(3, VOCABULARY, (n,), generator=generator).tolist(), ((4, n),))
        for n in (20, 20, 17, 14, 20, 12)
    ]
    for cached, some in ((made.train, texts[:4]), (made.heldout, texts[4:])):
        cached.batches.append(read_batch(base, some, layers=range(NUM_LAYERS + 1)))
    return made


# ------------------------------------------------------------------------------ cached states


def test_cached_states_are_the_models_own() -> None:
    base = BaseModel(tiny_model("gemma2"))
    made = study(base)
    batch = made.train.batches[0]
    # The first two positions are outliers; the last one of every row is followed by nothing known.
    assert (batch.start, batch.stop) == (2, 20)
    assert batch.used.sum(1).tolist() == [16, 16, 13, 10]
    ids = torch.randint(3, VOCABULARY, (20,), generator=torch.Generator().manual_seed(0))[None]
    out = base.model(ids, output_hidden_states=True)
    torch.testing.assert_close(
        batch.states[1][0], out.hidden_states[1][0, 2:], atol=1e-5, rtol=1e-5
    )
    assert batch.choices[:16].tolist() == out.logits[0, 3:19].argmax(-1).tolist()
    # Cosine of h_N with itself, the same next tokens, and what came one position before.
    final = made.train.state(NUM_LAYERS)
    assert torch.equal(next_tokens(base, final), made.train.choices)
    torch.testing.assert_close(made.train.state(1, shift=1)[1:16], made.train.state(1)[:15])


@pytest.mark.parametrize("kind", ["lean", "tied"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "olmoe", "gpt_oss"])
def test_stacks_run_as_they_do_when_drafting(name: str, kind: Any) -> None:
    """All positions at once equal one position after a verified prefix in a real arena."""
    base = BaseModel(tiny_model(name))
    torch.manual_seed(0)
    stack = Stack(kind, 1, (2, NUM_LAYERS), rank=4, heads=2)
    layers = stack.layers(base)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        made = study(base)
        batch = made.train.batches[0]
        together = run_stack(layers, made.train, batch, batch.states[1])[-1]
        position = 11
        ids = torch.randint(3, VOCABULARY, (20,), generator=torch.Generator().manual_seed(0))
        arena = base.arena(rows=1, max_len=20)
        prefill(base, [ids[:position].tolist()], arena, ())
        block = base.block([position], 1)
        helper = Accelerator.from_preset("paper", base)  # whose prefix lean layers attend to
        p = batch.states[1][:1, position - batch.start : position - batch.start + 1]
        for layer in layers:
            p = layer(p, block, arena, helper.prefix([position], block.positions))
    torch.testing.assert_close(p[0, 0], together[0, position - batch.start], atol=2e-5, rtol=1e-4)


# ------------------------------------------------------------------------------ text


def test_token_classes() -> None:
    names = ["<s>", "Hi", "Ġthe", "re", "Ġ", "Ċ", "12", "Ġ7", ".", "Ġ(", "a", "▁b", "c", "</s>"]

    class Tokenizer:
        all_special_ids = (0, 13)

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [names[i] for i in ids]

    found = token_classes(Text(list(range(14)), ((2, 14),)), Tokenizer())  # type: ignore[arg-type]
    assert [TOKEN_CLASSES[i].split()[-1] for i in found] == [
        "prompt", "prompt", "start", "piece", "special", "special", "digits", "digits",
        "punctuation", "punctuation", "start", "start", "piece", "special",
    ]  # fmt: skip


def test_split_shares_no_prompt_and_takes_about_what_is_asked() -> None:
    texts = [Text([1, 2, prompt, *[5] * 10], ((3, 13),)) for prompt in range(50) for _ in range(2)]
    corpus = text._corpus(texts, source="x", sha256=None, tokens=400, seed=1)
    prompts = [{t.prompt for t in part} for part in (corpus.train, corpus.heldout)]
    assert not prompts[0] & prompts[1]
    assert [sum(t.positions for t in part) for part in (corpus.train, corpus.heldout)] == [300, 100]
    again = text._corpus(texts, source="x", sha256=None, tokens=400, seed=2)
    assert again.heldout != corpus.heldout


def test_own_text_is_what_plain_decoding_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine("llama")
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]

    class Prompts:
        def encode(self, engine: Engine) -> list[list[int]]:
            return prompts

    monkeypatch.setattr(text, "read_prompts", lambda name: Prompts())
    monkeypatch.setattr(text, "MIN_TOKENS", 10)
    answered: list[int] = []
    corpus = text.own_corpus(made, tokens=30, seed=0, tick=answered.append)
    assert answered == [3]
    written = {tuple(t.prompt): t.ids[len(t.prompt) :] for t in corpus.train + corpus.heldout}
    for prompt in prompts:
        plain = made.generate(prompt, max_new_tokens=10, strategy="plain")
        assert written[tuple(prompt)] == plain.token_ids


# ------------------------------------------------------------------------------ velocity


def test_velocity_by_hand() -> None:
    # Two layers in the plane: a quarter turn that doubles the length, then nothing.
    h0, h1 = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])
    states = {0: h0.expand(1, 4, 2), 1: h1.expand(1, 4, 2), 2: h1.expand(1, 4, 2)}
    velocity = Velocity(2)
    velocity.add(states, torch.tensor([[-1, 0, 3, 3]]))
    numbers = velocity.numbers()["classes"]
    assert [(k, v["positions"]) for k, v in numbers.items()] == [
        ("prompt", 1), ("digits", 2), ("all", 3)
    ]  # fmt: skip
    for row in numbers.values():
        assert row["direction_change"] == pytest.approx([1, 0])
        assert row["norm_ratio"] == pytest.approx([2, 1])
        assert row["cosine_to_final"] == pytest.approx([0, 1, 1])


# ------------------------------------------------------------------------------ what is compared


def test_rates_share_their_budget_and_reach_the_end() -> None:
    base = BaseModel(tiny_model("llama", num_hidden_layers=12))
    made = Study(base, ModelShape.of(base), QUICK, CachedText(base), CachedText(base))
    assert (made.middle_gate, made.stack_layers) == (4, 4)
    stacks = rate_stacks(made)
    assert [(s.start, rate, s.targets) for rate, s in stacks] == [
        (0, 1.0, (1, 2, 3, 4)), (0, 2.0, (2, 4, 6, 8)), (0, 3.0, (3, 6, 9, 12)),
        (4, 1.0, (5, 6, 7, 8)), (4, 2.0, (6, 8, 10, 12)),
    ]  # fmt: skip
    sizes = {sum(p.numel() for p in stack.layers(base).parameters()) for _, stack in stacks}
    assert len(sizes) == 1


def test_exits_are_inside_the_model() -> None:
    assert exits(30) == (5, 10, 15, 20, 25)
    assert exits(4) == (1, 2, 3)
    assert exits(2) == (1,)


@pytest.mark.parametrize(
    ("preset", "changes"),
    [("carry", {"draft_vocab_size": 31}), ("paper", {"gates": (0, 1, 3)})],
)
def test_the_given_accelerators_alignment_is_its_own_first_draft(
    preset: str, changes: dict[str, Any]
) -> None:
    base = BaseModel(tiny_model("llama"))
    torch.manual_seed(1)
    stream = Accelerator.from_preset(preset, base, **changes)
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    made = study(base)
    result: dict[str, Any] = {}
    task = alignment_tasks(made, stream, result)[-1]
    assert alignment_layers(made, stream) <= set(range(NUM_LAYERS + 1))
    task.run(lambda part: None)
    found = result["accelerator"]
    assert found["parameters"] == stream.num_parameters()
    same, count = 0, 0
    generator = torch.Generator().manual_seed(0)
    texts = [
        torch.randint(3, VOCABULARY, (n,), generator=generator) for n in (20, 20, 17, 14, 20, 12)
    ]
    for ids in texts[4:]:
        truth = base.model(ids[None]).logits[0].argmax(-1)
        for t in range(3, len(ids) - 1):
            arena = base.arena(rows=1, max_len=len(ids))
            _, states = prefill(base, [ids[:t].tolist()], arena, stream.carry_layers)
            carried = Carried(tuple(states[i] for i in stream.carry_layers), own=False)
            block = base.block([t], 1)
            prefix = stream.prefix([t], block.positions)
            logits, _ = stream.step(ids[None, t : t + 1], carried, block, arena, prefix)
            token = int(logits.argmax())
            same += (
                int(stream.draft_ids[token]) if stream.draft_ids is not None else token
            ) == truth[t]
            count += 1
    assert made.heldout.positions == count
    assert found["exits"][0]["agreement"] == pytest.approx(int(same) / count)
    depths = [(e["gate"], e["depth"]) for e in found["exits"]]
    assert depths == ([(2, 2)] if preset == "carry" else [(0, 1), (1, 3)])


# ------------------------------------------------------------------------------ the whole


@pytest.mark.parametrize("name", ["llama", "qwen3-windowed", "gemma2", "phi3", "olmoe", "gpt_oss"])
def test_every_figure_for_every_kind_of_model(name: str, data: Path, tmp_path: Path) -> None:
    shares: list[float] = []
    numbers = analyze(
        engine(name, "carry", draft_vocab_size=31), QUICK, data=str(data),
        progress=lambda label, share: shares.append(share),
    )  # fmt: skip
    assert shares == sorted(shares) and shares[-1] == 1
    assert numbers["text"]["fitted"]["positions"] > 2 * numbers["text"]["heldout"]["positions"] > 0
    assert [len(numbers["alignment"]["methods"][m]["exits"]) for m in METHODS] == [3] * 6
    for kind in ("cosine", "agreement", "target_cosine", "target_agreement"):
        values = [row[kind] for rows in numbers["rates"]["starts"].values() for row in rows]
        assert all(-1 <= v <= 1 for v in values)
    assert [row["rank"] for row in numbers["ranks"]["ranks"]] == [1, 2, 4, 8, 16, 32]
    assert numbers["velocity"]["classes"]["all"]["cosine_to_final"][-1] == pytest.approx(1)
    assert json.loads(json.dumps(numbers)) == numbers
    write_analysis(numbers, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(output_files())


def test_fits_and_training_help_on_text_they_have_not_seen(data: Path) -> None:
    numbers = analyze(
        engine("llama"), AnalysisOptions(tokens=600, epochs=8, rank=16), data=str(data)
    )
    methods = numbers["alignment"]["methods"]
    for exit in methods["tied"]["exits"]:
        assert exit["cosine"] > exit["untrained"]["cosine"]
    for exit in methods["lean"]["exits"]:  # whose closed-form start is good already
        assert exit["cosine"] > exit["untrained"]["cosine"] - 0.02
    for name in ("linear", "carry"):
        for ours, raw in zip(methods[name]["exits"], methods["raw exit"]["exits"], strict=True):
            assert ours["cosine"] > raw["cosine"], name
    lite = methods["LITE-style"]["exits"]
    raw = methods["raw exit"]["exits"]
    assert sum(e["agreement"] for e in lite) > sum(e["agreement"] for e in raw)
    ranks = numbers["ranks"]["ranks"]
    assert ranks[-1]["closed_form"]["cosine"] > ranks[0]["closed_form"]["cosine"]
    assert all(row["trained"]["cosine"] > row["closed_form"]["cosine"] - 0.02 for row in ranks)


def test_the_same_seed_gives_the_same_numbers(data: Path) -> None:
    options = AnalysisOptions(tokens=400, epochs=1, rank=2, figures=("alignment",))
    first, second = (analyze(engine("llama"), options, data=str(data)) for _ in range(2))
    assert first["alignment"] == second["alignment"]


def test_the_base_model_is_left_as_it_was(data: Path) -> None:
    made = engine("llama")
    before = {k: v.clone() for k, v in made.base.model.state_dict().items()}
    analyze(made, QUICK, data=str(data))
    after = made.base.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


# ------------------------------------------------------------------------------ the command


def test_the_command_writes_what_it_says(
    cli: Cli,
    model: Path,
    data: Path,
    tmp_path: Path,
) -> None:
    out = tmp_path / "deep" / "out"
    arguments = ["analyze", model, "--data", data, "--output", out, "--figures", "velocity,costs"]
    code, stdout, stderr = cli(*arguments, "--tokens", "500", "--json")
    assert code == 0, stderr
    files = sorted(p.name for p in out.iterdir())
    assert files == sorted(output_files(("velocity", "costs")))
    numbers = json.loads((out / "analysis.json").read_text())
    assert json.loads(stdout) == numbers
    assert set(numbers) == {"provenance", "model", "text", "velocity", "costs"}
    assert numbers["text"]["source"] == "text.jsonl"
    assert (out / "velocity.png").read_bytes().startswith(b"\x89PNG")
    assert "saved" in stderr

    drawn = (out / "velocity.svg").read_bytes()
    code, _, stderr = cli(*arguments, "--tokens", "500")
    assert code == 2
    assert "holds analysis.json already" in stderr and "--overwrite" in stderr
    (out / "mine.txt").write_text("kept")
    code, _, stderr = cli(*arguments, "--tokens", "500", "--overwrite")
    assert code == 0, stderr
    assert (out / "mine.txt").read_text() == "kept"
    assert (out / "velocity.svg").read_bytes() == drawn


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--figures", "velocity,colour"], "Give some of velocity, rates, alignment, ranks, costs"),
        (["--figures", ","], "Give some of velocity"),
        (["--tokens", "10"], "tokens=10 must be from 256"),
        (["--rank", "0"], "rank=0 must be from 1"),
        (["--data", "nothing.jsonl"], "nothing.jsonl"),
        (["--output", "{data}"], "is a file. Choose a folder"),
        (["--output", "{data}/deeper"], "Cannot write to"),
        (["--accelerator", "nowhere/at-all/x"], "nowhere/at-all/x"),
    ],
)
def test_what_is_refused(
    cli: Cli,
    model: Path,
    data: Path,
    tmp_path: Path,
    change: list[str],
    message: str,
) -> None:
    arguments = {"--data": str(data), "--output": str(tmp_path / "out")}
    arguments |= {change[0]: change[1].format(data=data)}
    code, stdout, stderr = cli("analyze", model, *[x for pair in arguments.items() for x in pair])
    assert (code, stdout) == (2, "")
    assert message in stderr and "Traceback" not in stderr
    assert not (tmp_path / "out").exists()


def test_too_little_text(cli: Cli, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "short.jsonl"
    file.write_text('{"prompt": "ab", "completion": "cdefg"}\n' * 3)
    code, _, stderr = cli("analyze", model, "--data", file, "--output", tmp_path / "out")
    assert code == 2
    assert "short.jsonl holds 15 positions in 1 texts" in stderr and "at least 256" in stderr


def test_a_model_that_cannot_answer_needs_data(
    cli: Cli,
    tmp_path: Path,
) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    plain = tokenizer()
    plain.chat_template = None
    plain.save_pretrained(tmp_path / "model")
    code, _, stderr = cli("analyze", tmp_path / "model", "--output", tmp_path / "out")
    assert code == 2
    assert "no chat template" in stderr and "--data" in stderr


def test_without_matplotlib(
    cli: Cli,
    model: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    code, _, stderr = cli("analyze", model, "--data", data, "--output", tmp_path / "out")
    assert code == 2
    assert "pip install 'multirate[plots]'" in stderr


def test_a_failed_write_leaves_the_old_files(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = AnalysisOptions(tokens=300, figures=("velocity",))
    numbers = analyze(engine("llama"), options, data=str(data))
    write_analysis(numbers, tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def full(*args: Any, **rest: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(MultirateError, match="No space left on device"):
        write_analysis({**numbers, "seed": 1}, tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_figures_are_all_drawn() -> None:
    assert output_files()[1::2] == tuple(f"{name}.png" for name in FIGURES)
