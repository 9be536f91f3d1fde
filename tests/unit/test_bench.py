"""`multirate bench`: what it counts, what it divides by what, and what it prints and writes."""

from __future__ import annotations

import getpass
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benching import make_engine, tokenizer, write
from tiny_models import MAX_POSITIONS

from multirate.bench import figures, files, speculative
from multirate.bench import prompts as prompts_module
from multirate.bench.methods import METHODS
from multirate.bench.options import SpeculativeOptions
from multirate.bench.prompts import PROMPT_SETS, read_prompts
from multirate.bench.provenance import git_state, provenance, without_folders
from multirate.bench.registry import Batch, Entry, Method, Output
from multirate.bench.speculative import bench_speculative, run_interleaved
from multirate.bench.statistics import Spread, median_interval
from multirate.bench.summary import Sample, summarise, summarise_categories
from multirate.cli.main import main
from multirate.config.errors import MultirateError
from multirate.decode.compare import Comparison, near_tie_tolerance
from multirate.decode.engine import Engine
from multirate.decode.loop import SpeculationCounts
from multirate.decode.results import Speculation

NEW = 12
DRAFTS = 3
TURNS = ("ABCDEF", "GHI", "2345678", "tuvwx")
METHOD_KEYS = [
    "tokens_per_second", "speedup_vs_plain", "speedup_vs_plain_ci", "mean_acceptance_length",
    "per_position_acceptance_rate", "identical", "near_ties", "differences",
]  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine()


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"turns": [turn, "more"]}) + "\n" for turn in TURNS))
    return file


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[..., Output]], None]:
    """Add a method `name` that runs `function(ids, new)` on each prompt."""

    def add(name: str, function: Callable[..., Output]) -> None:
        def run(batch: Batch, new: int) -> list[Output]:
            return [function(ids, new) for ids in batch]

        monkeypatch.setitem(METHODS, name, Entry(lambda engine, drafts: Method(run)))

    return add


def options(*methods: str, **settings: Any) -> SpeculativeOptions:
    return SpeculativeOptions(methods, **{"max_new_tokens": NEW, **settings})


def sample(tokens: int, seconds: float, speculation: Speculation | None = None) -> Sample:
    return Sample([Output(list(range(tokens)), speculation)], seconds)


# ------------------------------------------------------------------------------ arithmetic


def test_the_json_has_exactly_the_stable_shape(engine: Engine, prompt_file: Path) -> None:
    report = bench_speculative(
        engine,
        read_prompts(prompt_file),
        options("transformers", "plain", "multirate", num_draft_tokens=DRAFTS),
    )
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert list(data) == ["provenance", "prompts", "new_tokens", "methods", "cost_card"]
    assert data["cost_card"]["weight_bytes"] > 0 and data["cost_card"]["roofline_fraction"] > 0
    assert (data["prompts"], data["new_tokens"]) == (len(TURNS), NEW)
    assert list(data["methods"]) == ["transformers", "plain", "multirate"]
    for name, method in data["methods"].items():
        assert list(method) == METHOD_KEYS
        assert list(method["tokens_per_second"]) == ["median", "low", "high"]
        speed = method["tokens_per_second"]
        assert 0 < speed["low"] <= speed["median"] <= speed["high"]
        # In float32 all three give the same tokens.
        assert (method["identical"], method["near_ties"], method["differences"]) == (4, 0, 0), name
    plain, multirate = data["methods"]["plain"], data["methods"]["multirate"]
    assert plain["speedup_vs_plain"] == 1.0 and plain["speedup_vs_plain_ci"] == [1.0, 1.0]
    assert plain["mean_acceptance_length"] is plain["per_position_acceptance_rate"] is None
    assert len(multirate["per_position_acceptance_rate"]) == DRAFTS
    assert data["provenance"]["dtype"] == "float32"
    assert data["provenance"]["compile"] is None
    assert data["provenance"]["near_tie_tolerance"] == near_tie_tolerance(torch.float32)


def test_acceptance_is_that_of_all_prompts_together(engine: Engine, prompt_file: Path) -> None:
    """Weighted by drafts: not the mean of the prompts' rates."""
    prompts = read_prompts(prompt_file)
    report = bench_speculative(engine, prompts, options("multirate", num_draft_tokens=DRAFTS))
    found = report.to_dict()["methods"]["multirate"]
    own = [
        engine.generate(
            ids, strategy="speculative", num_draft_tokens=DRAFTS, max_new_tokens=NEW
        ).speculation
        for ids in prompts.encode(engine)
    ]
    drafts = sum(s.num_drafts for s in own)
    assert len({s.mean_acceptance_length for s in own}) > 1  # or the two would be the same
    assert found["mean_acceptance_length"] == 1 + sum(s.num_accepted_tokens for s in own) / drafts
    for i, rate in enumerate(found["per_position_acceptance_rate"]):
        accepted = sum(s.per_position_acceptance_rate[i] * s.num_drafts for s in own)
        assert rate == pytest.approx(accepted / drafts, abs=1e-12)
    assert found["identical"] is found["speedup_vs_plain"] is None  # plain was not measured


def test_counts_of_prompts_are_summed_exactly() -> None:
    a = SpeculationCounts(num_drafts=49, num_draft_tokens=147, num_accepted_tokens=29,
                          accepted_per_position=[17, 9, 3], num_plain_steps=2)  # fmt: skip
    b = SpeculationCounts(num_drafts=3, num_draft_tokens=3, num_accepted_tokens=3,
                          accepted_per_position=[3])  # fmt: skip
    samples = [sample(5, 1.0, Speculation.of([counts])) for counts in (a, b)]
    summary = summarise({"multirate": samples}, {})["multirate"]
    assert summary.speculation == Speculation.of([a, b])
    assert summary.speculation.mean_acceptance_length == 1 + 32 / 52
    assert summary.speculation.per_position_acceptance_rate == [20 / 52, 9 / 52, 3 / 52]


def test_speedup_is_the_median_of_the_paired_ratios() -> None:
    samples = {
        "plain": [sample(10, 1.0), sample(10, 2.0), sample(10, 10.0)],
        "transformers": [sample(10, 2.0), sample(10, 4.0), sample(10, 20.0)],
        # twice, five times and half as fast; the ratio of the medians is 5
        "other": [sample(10, 0.5), sample(10, 0.4), sample(5, 10.0)],
    }
    summary = summarise(samples, {})["other"]
    assert summary.speedup_vs_plain == pytest.approx(2.0)
    assert summary.speedup_vs_plain_ci == pytest.approx((0.5, 5.0))  # 7 of 27 draws have median 0.5
    assert summary.speedup_vs_transformers == pytest.approx(4.0)
    assert summary.tokens_per_second.median == pytest.approx(20.0)


def test_spread_is_from_the_10th_to_the_90th_percentile() -> None:
    assert Spread.of([float(i) for i in range(11)]) == Spread(median=5.0, low=1.0, high=9.0)
    assert Spread.of([3.0]) == Spread(median=3.0, low=3.0, high=3.0)


def test_the_interval_is_that_of_the_median() -> None:
    """Of 0..100 the median's standard error is about 1 / (2 f sqrt(n)) = 100 / (2 sqrt(101)) = 5."""
    values = [float(i) for i in range(101)]
    low, high = median_interval(values) or (0.0, 0.0)
    assert (low, high) == pytest.approx((50 - 1.96 * 5, 50 + 1.96 * 5), abs=2)
    assert median_interval(values) == (low, high)
    assert median_interval([2.0, 2.0]) == (2.0, 2.0)
    assert median_interval([2.0]) is median_interval([]) is None


def test_prompts_are_sorted_by_how_they_agree() -> None:
    found = [
        Comparison(identical=True),
        Comparison(identical=False, first_difference=3, gap=0.1, near_tie=True),
        Comparison(identical=False, first_difference=0, gap=2.0, near_tie=False),
        Comparison(identical=False, first_difference=9, gap=None, near_tie=False),
        Comparison(identical=True),
        Comparison(identical=True),
    ]
    samples = {"other": [sample(4, 1.0)] * len(found)}
    summary = summarise(samples, {"other": found})["other"]
    assert (summary.identical, summary.near_ties, summary.differences) == (3, 1, 2)


# ------------------------------------------------------------------------------ measuring


def test_wrong_tokens_are_differences(
    engine: Engine, prompt_file: Path, register: Callable[..., None]
) -> None:
    def plain(ids: list[int], new: int) -> list[int]:
        return engine.generate(ids, strategy="plain", max_new_tokens=new).token_ids

    first = read_prompts(prompt_file).encode(engine)[0]
    register("same", lambda ids, new: Output(plain(ids, new)))
    register(
        "wrong once",
        lambda ids, new: Output(
            [i ^ (ids == first and at == 5) for at, i in enumerate(plain(ids, new))]
        ),
    )
    register("short", lambda ids, new: Output(plain(ids, new)[:-1]))
    report = bench_speculative(
        engine, read_prompts(prompt_file), options("plain", "same", "wrong once", "short")
    )
    counts = {
        name: (summary.identical, summary.near_ties, summary.differences)
        for name, summary in report.methods.items()
    }
    assert counts == {
        "plain": (4, 0, 0), "same": (4, 0, 0), "wrong once": (3, 0, 1), "short": (0, 0, 4),
    }  # fmt: skip


def test_methods_take_turns_and_the_whole_call_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now, order, reported = [100.0], [], []
    monkeypatch.setattr(speculative.time, "perf_counter", lambda: now[0])

    def method(name: str, seconds: float) -> Method:
        def run(batch: Batch, new: int) -> list[Output]:
            order.append((name, batch[0][0], new))
            now[0] += seconds
            return [Output([1, 2, 3, 4])]

        return Method(run)

    samples = run_interleaved(
        {"a": method("a", 2.0), "b": method("b", 1.0), "c": method("c", 4.0)},
        [[[0]], [[1]], [[2]], [[3]]],
        max_new_tokens=7,
        synchronize=lambda: now.__setitem__(0, now[0] + 0.5),
        progress=lambda done, total: reported.append((done, total)),
    )
    names = [name for name, _, _ in order]
    assert "".join(names) == "abc" + "bca" + "cab" + "abc"
    assert [(i, new) for _, i, new in order] == [(i, 7) for i in range(4) for _ in range(3)]
    # The device is waited for before the clock starts, and again before it stops.
    assert {name: {s.seconds for s in own} for name, own in samples.items()} == {
        "a": {2.5}, "b": {1.5}, "c": {4.5},
    }  # fmt: skip
    assert samples["a"][0].tokens_per_second == 4 / 2.5
    assert reported == [(done, 12) for done in range(13)]


def test_everything_is_warm_before_the_first_timed_run(
    engine: Engine, prompt_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []
    entry = Entry(
        lambda engine, drafts: Method(
            lambda batch, new: events.append(new) or [Output([1])],
            lambda batches: events.append(("prepare", len(batches))),
        )
    )
    monkeypatch.setitem(METHODS, "fake", entry)
    measured = []
    draft_length = engine.draft_length
    monkeypatch.setattr(
        engine, "draft_length", lambda *args: measured.append(args) or draft_length(*args)
    )
    bench_speculative(
        engine,
        read_prompts(prompt_file),
        options("multirate", "fake"),
        progress=lambda done, total: events.append(f"timed {len(measured)}") if done == 0 else None,
    )
    before = events.index(next(e for e in events if str(e).startswith("timed")))
    assert events[:before] == [("prepare", len(TURNS)), speculative.WARM_UP_TOKENS]
    assert events[before] >= f"timed {len(TURNS)}"  # costs were measured by then
    assert [e for e in events[before + 1 :]] == [NEW] * len(TURNS)


def test_transformers_runs_greedily_whatever_the_models_own_settings(
    capfd: pytest.CaptureFixture[str],
) -> None:
    engine = make_engine()
    engine.base.model.generation_config.update(
        do_sample=True, temperature=0.3, top_k=3, repetition_penalty=9.0, max_length=5
    )
    own = engine.base.model.generation_config
    plain, stock = (
        METHODS[name].make(engine, SpeculativeOptions()) for name in ("plain", "transformers")
    )
    with warnings.catch_warnings(action="error"):
        for ids in ([40, 41, 42], [50]):
            assert stock.run([ids], NEW) == plain.run([ids], NEW)
    assert capfd.readouterr() == ("", "")
    assert engine.base.model.generation_config is own and own.repetition_penalty == 9.0


def test_transformers_stops_where_plain_decoding_stops() -> None:
    engine = make_engine()
    stock, plain = (
        METHODS[name].make(engine, SpeculativeOptions()) for name in ("transformers", "plain")
    )
    ids = [40, 41, 42]
    (free,) = (output.token_ids for output in plain.run([ids], NEW))
    end = next(i for i in range(3, NEW) if free[i] not in free[:i])
    engine.base.model.generation_config.eos_token_id = [free[end], 2]
    assert stock.run([ids], NEW) == plain.run([ids], NEW) == [Output(free[: end + 1])]
    full = [40 + i % 9 for i in range(MAX_POSITIONS - 4)]  # the context ends first
    engine.base.model.generation_config.eos_token_id = 2
    assert len(plain.run([full], NEW)[0].token_ids) == 4
    assert stock.run([full], NEW) == plain.run([full], NEW)


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"methods": ()}, "No method was named. Methods: plain, "),
        ({"methods": ("plain", "medusa9")}, "Unknown method 'medusa9'. Methods: plain"),
        ({"methods": ("plain", "plain")}, "'plain' is named twice"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 is not allowed"),
        ({"num_draft_tokens": 0}, "num_draft_tokens=0 is not allowed"),
        ({"num_draft_tokens": -3}, "num_draft_tokens=-3 is not allowed"),
    ],
)
def test_options_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(MultirateError, match=message):
        SpeculativeOptions(**settings)


def test_many_drafts_are_allowed() -> None:
    assert SpeculativeOptions(num_draft_tokens=20).num_draft_tokens == 20


def test_a_drafting_method_needs_an_accelerator(engine: Engine, prompt_file: Path) -> None:
    bare = Engine(engine.base, tokenizer=engine.tokenizer)
    prompts = read_prompts(prompt_file, limit=1)
    with pytest.raises(MultirateError, match="'multirate' needs an accelerator"):
        bench_speculative(bare, prompts, options("plain", "multirate"))
    assert list(bench_speculative(bare, prompts, options("plain")).methods) == ["plain"]


# ------------------------------------------------------------------------------ prompts


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_every_shape_of_line(tmp_path: Path, engine: Engine) -> None:
    system = {"role": "system", "content": "Short."}
    later = [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
    file = write(
        tmp_path,
        {"id": 1, "turns": ["one", "two"]},
        "",
        {"messages": [system, *user("three"), *later]},
        {"prompt": "four\u2028five", "completion": "never read"},
        {"text": "six"},
    )
    found = read_prompts(file)
    assert [row.content for row in found.rows] == [
        user("one"), [system, *user("three")], user("four\u2028five"), "six",
    ]  # fmt: skip
    assert [row.line for row in found.rows] == [1, 3, 4, 5]
    assert found.name == "p.jsonl"
    words = tokenizer()
    ids = found.encode(engine)
    assert ids[0] == words("u:one;").input_ids and ids[3] == words("six").input_ids
    assert len(read_prompts(file, limit=2).rows) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"turns": ["x"', "line 2: is not JSON"),
        ("[1]", "line 2: is not a JSON object"),
        ({"question": "x"}, "line 2: has no prompt. Needed: 'turns'"),
        ({"turns": []}, "line 2: 'turns' is not a list"),
        ({"turns": "ab"}, "line 2: 'turns' is not a list"),
        ({"turns": [7]}, "line 2: the first turn is empty or not a string"),
        ({"prompt": "  "}, "line 2: 'prompt' is empty"),
        ({"text": None}, "line 2: 'text' is empty or not a string"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "line 2: .* no user message"),
        ({"messages": ["x"]}, "line 2: a message is not an object"),
        ({"messages": [{"role": "user"}]}, "line 2: a message is empty"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(MultirateError, match=message):
        read_prompts(write(tmp_path, {"prompt": "x"}, line))


def test_a_template_makes_prompts_of_any_shape(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        {"mr": "name[A]", "columns": ["No.", "Player"], "n": 3, "category": "tables"},
        {"mr": "with {braces}", "columns": [], "n": None},
    )
    found = read_prompts(file, template=r"{{x}} {mr}\n{columns}: {n}")
    assert [row.content for row in found.rows] == [
        user("{x} name[A]\nNo., Player: 3"), user("{x} with {braces}\n: None"),
    ]  # fmt: skip
    assert [row.category for row in found.rows] == ["tables", None]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{question}", "p.jsonl, line 1: has no field 'question'; it has mr, id. Needed: a row"),
        ("{mr", "line 1: does not fit the template .*expected '}'.* write {name} for a field"),
        ("{}", "line 1: does not fit the template"),
        ("{mr.x}", "line 1: does not fit the template"),
        ("{mr[x]}", "line 1: does not fit the template"),
        ("{mr:d}", "line 1: does not fit the template"),
        ("{mr:>1000000000000000000}", "line 1: does not fit the template"),
        ("  ", "line 1: what the template makes is empty"),
    ],
)
def test_a_template_that_does_not_fit_is_refused(
    tmp_path: Path, template: str, message: str
) -> None:
    with pytest.raises(MultirateError, match=message):
        read_prompts(write(tmp_path, {"mr": "x", "id": 1}), template=template)


def test_what_holds_no_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MultirateError, match="holds no prompts"):
        read_prompts(write(tmp_path, "", " "))
    with pytest.raises(MultirateError, match=r"no prompt set and no file 'nosuch'. Sets: mt_bench"):
        read_prompts("nosuch")
    with pytest.raises(MultirateError, match="limit=0"):
        read_prompts("mt_bench", limit=0)
    binary = tmp_path / "b.jsonl"
    binary.write_bytes(b"\xff\xfe{")
    with pytest.raises(MultirateError, match="UTF-8"):
        read_prompts(binary)


def test_a_prompt_the_model_cannot_take_is_named(tmp_path: Path, engine: Engine) -> None:
    long = read_prompts(write(tmp_path, {"text": "a"}, {"text": "a" * MAX_POSITIONS}))
    with pytest.raises(MultirateError, match=r"p.jsonl, line 2: .*context"):
        long.encode(engine)
    words = tokenizer()
    words.chat_template = None
    bare = Engine(engine.base, tokenizer=words)
    assert read_prompts(write(tmp_path, {"text": "ab"})).encode(bare) == [words("ab").input_ids]
    with pytest.raises(MultirateError, match=r'line 1: .*chat template.*\{"text": ...\}'):
        read_prompts(write(tmp_path, {"prompt": "ab"})).encode(bare)


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("mt_bench", "Compose an engaging travel blog post"),
        ("gsm8k", "Josh decides to try flipping a house."),
        ("humaneval", "from typing import List\n\n\ndef has_close_elements("),
    ],
)
def test_the_sets_that_ship(name: str, start: str) -> None:
    assert name in PROMPT_SETS and len(PROMPT_SETS) == 3
    found = read_prompts(name.replace("_", "-"))
    assert (found.name, len(found.rows), len(found.sha256)) == (name, 64, 64)
    assert found.rows[0].content[0]["content"].startswith(start)
    assert len({str(row.content) for row in found.rows}) == 64


def test_categories(tmp_path: Path) -> None:
    prompts = read_prompts(
        write(
            tmp_path,
            {"question_id": 81, "category": "writing", "turns": ["a", "b"]},  # as in Spec-Bench
            {"category": "qa", "turns": ["c"]},
            {"prompt": "d", "category": None},
            {"text": "e", "category": "writing"},
        )
    )
    prompts.require_categories()
    ids = [[i] for i in range(4)]
    batches, categories = speculative.group(prompts, ids, options("plain", by_category=True))
    assert (batches, categories) == (
        [[[0]], [[3]], [[1]], [[2]]], ["writing", "writing", "qa", "none"],
    )  # fmt: skip
    counts = SpeculationCounts(
        num_drafts=4, num_draft_tokens=8, num_accepted_tokens=6, accepted_per_position=[4, 2]
    )
    none = SpeculationCounts(
        num_drafts=2, num_draft_tokens=4, num_accepted_tokens=0, accepted_per_position=[0, 0]
    )
    speculations = [Speculation.of([own]) for own in (counts, none, none, none)]
    samples = {
        "plain": [sample(10, 1.0)] * 4,
        "other": [
            sample(10, seconds, own)
            for seconds, own in zip([0.5, 0.25, 0.8, 1.0], speculations, strict=True)
        ],
    }
    found = {name: own.to_dict() for name, own in summarise_categories(samples, categories).items()}
    assert {name: own["prompts"] for name, own in found.items()} == {
        "writing": 2, "qa": 1, "none": 1,
    }  # fmt: skip
    assert found["writing"]["methods"]["other"] == {
        "speedup_vs_plain": 3.0,  # of 2 and 4
        "speedup_vs_plain_ci": None,  # which are too few
        "mean_acceptance_length": 1 + 6 / 6,
    }
    assert found["qa"]["methods"]["other"] == {
        "speedup_vs_plain": 1.25, "speedup_vs_plain_ci": None, "mean_acceptance_length": 1.0,
    }  # fmt: skip
    with pytest.raises(MultirateError, match=r"line 1: 'category' is empty or not a string"):
        read_prompts(write(tmp_path, {"prompt": "x", "category": 3}))
    with pytest.raises(MultirateError, match=r"No row of p.jsonl has a category"):
        read_prompts(write(tmp_path, {"prompt": "x"})).require_categories()


# ------------------------------------------------------------------------------ provenance


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, str):
        yield value


def test_provenance_names_the_machine_and_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    home = str(Path.home())
    arguments = [
        "bench",
        "speculative",
        f"{home}/model",
        "--prompts=/data/x y.jsonl",
        "--limit",
        "2",
    ]
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/multirate", *arguments])
    found = provenance(device=torch.device("cpu"), dtype=torch.bfloat16)
    assert found["command"] == "multirate bench speculative model '--prompts=x y.jsonl' --limit 2"
    assert found["dtype"] == "bfloat16" and found["torch_threads"] == torch.get_num_threads()
    assert found["machine"]["cpu"] and found["machine"]["cores"] >= 1
    assert {"os", "python", "torch", "transformers", "multirate", "git", "date"} <= set(found)
    for text in strings({**found, "os": None}):
        assert not text.startswith("/") and home not in text
    assert getpass.getuser() not in found["command"].split()


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("/a/b/c.jsonl", "c.jsonl"),
        ("--output=/a/b/c.json", "--output=c.json"),
        ("../../b/c", "c"),
        ("~b/c", "c"),
        ("/", "."),
        ("C:\\users\\b\\c.json", "c.json"),
        ("data/c.jsonl", "data/c.jsonl"),
        ("owner/name", "owner/name"),
        ("--limit=2", "--limit=2"),
        ("--json", "--json"),
    ],
)
def test_folders_are_cut_off(argument: str, shown: str) -> None:
    assert without_folders(argument) == shown


def test_git_state_is_of_files_that_the_checkout_holds(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    package = tmp_path / "src" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    assert git_state(package) is None
    git("init", "--quiet")
    assert git_state(package) is None  # like an environment inside somebody's repository
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    (tmp_path / "results.json").write_text("{}")
    assert git_state(package) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (package / "new.py").write_text("")
    assert git_state(package) == {"commit": git("rev-parse", "HEAD"), "dirty": True}


# ------------------------------------------------------------------------------ files


def test_a_result_file_is_whole_or_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "new" / "r.json"
    files.require_writable_file(file)
    assert not file.parent.exists()
    files.write_whole(file, "old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(files.os, "replace", fail)
        with pytest.raises(MultirateError, match=r"Cannot write .*r.json: No space left"):
            files.write_whole(file, "new")
    assert file.read_text() == "old"
    assert list(file.parent.iterdir()) == [file]
    files.write_whole(file, "new")
    assert file.read_text() == "new"
    for path, message in ((file.parent, "is a folder"), (file / "x.json", "Cannot write to")):
        with pytest.raises(MultirateError, match=message):
            files.require_writable_file(path)
        with pytest.raises(MultirateError, match="Cannot write"):
            files.write_whole(path, "x")


# ------------------------------------------------------------------------------ command


Run = Callable[..., int]


@pytest.fixture
def run(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `multirate bench speculative MODEL ...` on the tiny engine; the exit code."""

    def load(model: str, accelerator: Any, **kwargs: Any) -> Engine:
        return engine if accelerator else Engine(engine.base, tokenizer=engine.tokenizer)

    monkeypatch.setattr("multirate.load", load)

    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["multirate", "bench", "speculative", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0)

    return call


@pytest.fixture
def arguments(prompt_file: Path) -> tuple[str, ...]:
    return ("tiny", "--accelerator", "fast", "--prompts", str(prompt_file), "--max-new-tokens", "6",
            "--num-draft-tokens", "2")  # fmt: skip


def test_json_is_all_of_stdout(
    run: Run,
    arguments: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out" / "r.json"
    assert run(*arguments, "--limit", "3", "--json", "--output", str(output)) == 0
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert json.loads(output.read_text()) == data
    assert list(data["methods"]) == ["plain", "transformers", "multirate"]
    assert (data["prompts"], data["new_tokens"]) == (3, 6)
    assert data["provenance"]["accelerator"] == "fast"
    assert data["provenance"]["prompt_set"]["name"] == "prompts.jsonl"
    assert str(tmp_path) not in out
    assert "9 of 9 runs, about 0:00 left" in err and "saved" in err


def test_table(run: Run, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments, "--methods", "plain, multirate") == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if "4 / 0 / 0" in line] == [
        "plain", "multirate",
    ]  # fmt: skip
    assert "roofline fraction 0." in out
    assert re.search(r"multirate: 1\.\d tokens a draft", out) and "10th-90th percentile" in out
    assert all(len(line) <= 80 for line in out.splitlines()[:8])


def test_the_command_takes_a_template(
    run: Run, arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, {"mr": "ab"}, {"mr": "cd"}, {"mr": "ef"})
    assert run(*arguments, "--prompts", str(file), "--template", "{mr}b", "--json") == 0
    assert json.loads(capsys.readouterr().out)["prompts"] == 3
    assert run(*arguments, "--prompts", str(file), "--template", "{table}") == 2
    assert "line 1: has no field 'table'; it has mr" in capsys.readouterr().err


@pytest.mark.parametrize(("limit", "few"), [("1", True), ("2", True), ("3", False)])
def test_few_prompts_have_no_intervals(
    run: Run,
    arguments: tuple[str, ...],
    limit: str,
    few: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = (*arguments, "--limit", limit, "--methods", "plain,multirate")
    assert run(*arguments) == 0
    out = capsys.readouterr().out
    table, said = out.split("\n\n", 1)
    interval = r"\(\d+\.\d+-\d+\.\d+\)"
    assert len(re.findall(interval, table)) == (0 if few else 4)
    below = [line.split() for line in table.splitlines()[-3::2]]  # below each method's line
    assert (below == [["-", "-"]] * 2) is few
    assert ("Fewer than 3 prompts say nothing" in said) is few
    assert run(*arguments, "--json") == 0
    methods = json.loads(capsys.readouterr().out)["methods"]
    assert (methods["multirate"]["speedup_vs_plain_ci"] is None) is few
    assert methods["plain"]["speedup_vs_plain"] == 1.0


def test_a_table_by_category(
    run: Run, arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"category": "qa", "prompt": "AB"}, {"category": "rag", "prompt": "CD"}]
    extra = ("--prompts", str(write(tmp_path, *rows)), "--methods", "plain,multirate")
    assert run(*arguments, *extra, "--by-category") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines if line.split()[:1] in (["qa"], ["rag"])] == [
        ["qa", "1", "multirate"], ["rag", "1", "multirate"],
    ]  # fmt: skip
    assert run(*arguments, *extra, "--by-category", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert list(data) == [
        "provenance", "prompts", "new_tokens", "methods", "cost_card", "categories",
    ]  # fmt: skip
    assert list(data["categories"]["rag"]["methods"]) == ["plain", "multirate"]


def test_a_figure_of_the_numbers(
    run: Run, arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, plot = tmp_path / "r.json", tmp_path / "new" / "r.png"
    extra = ("--methods", "plain,multirate", "--output", str(output), "--plot", str(plot))
    assert run(*arguments, *extra) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    report = json.loads(output.read_text())
    speed, length = figures._figure(report).axes
    plain, multirate = report["methods"].values()
    assert [bar.get_width() for bar in speed.patches] == [1.0, multirate["speedup_vs_plain"]]
    assert [list(line.get_xdata()) for line in speed.lines[:2]] == [
        plain["speedup_vs_plain_ci"], multirate["speedup_vs_plain_ci"],
    ]  # fmt: skip
    assert [bar.get_width() for bar in length.patches] == [0, multirate["mean_acceptance_length"]]
    assert [text.get_text() for text in length.texts] == [
        "-", f"{multirate['mean_acceptance_length']:.2f}",
    ]  # fmt: skip
    svg = figures.draw_speculative(report, ".svg")
    assert svg == figures.draw_speculative(report, ".svg") and b"</svg>" in svg


def test_without_drafting_methods_no_accelerator_is_loaded(
    run: Run, prompt_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("tiny", "--prompts", str(prompt_file), "--limit", "1", "--methods", "plain",
               "--max-new-tokens", "2", "--json") == 0  # fmt: skip
    assert json.loads(capsys.readouterr().out)["provenance"]["accelerator"] is None


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--methods", "plain,nosuch"], "Unknown method 'nosuch'"),
        (["--methods", ", "], "No method was named"),
        (["--limit", "0"], "limit=0 is not allowed"),
        (["--max-new-tokens", "-1"], "max_new_tokens=-1 is not allowed"),
        (["--prompts", "nosuch"], "no prompt set and no file 'nosuch'"),
        (["--output", "."], "is a folder"),
        (["--plot", "r.jpeg"], "r.jpeg has no ending of a figure"),
        (["--plot", "r.png", "--methods", "multirate"], "--plot shows speed-ups against plain"),
        (["--by-category"], "No row of prompts.jsonl has a category"),
        (["--batch", "0"], "batch=0 is not allowed"),
        (["--batch", "2", "--methods", "plain,transformers-lookup"], "one prompt at a time"),
        (["--turns", "2", "--prompts", "gsm8k"], "No row of gsm8k has a second turn"),
        (["--accelerator", "none"], "'multirate' needs an accelerator"),
        (["--methods", "plain,eagle"], "'eagle' needs data/rivals/tiny-eagle"),
        (["--methods", "plain,paper"], "'paper' needs data/accelerators/tiny-paper"),
        (["--methods", "medusa"], "'medusa' needs data/rivals/tiny-medusa"),
        (["--methods", "deed"], "'deed' needs data/rivals/tiny-deed"),
    ],
)
def test_mistakes_are_told_before_a_model_is_loaded(
    run: Run,
    arguments: tuple[str, ...],
    extra: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("multirate.load", lambda *_, **__: pytest.fail("a model was loaded"))
    assert run(*arguments, *extra) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and "Traceback" not in err


def test_an_interrupted_run_leaves_nothing(
    run: Run,
    arguments: tuple[str, ...],
    register: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = []

    def interrupted(ids: list[int], new: int) -> Output:
        calls.append(ids)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return Output([1])

    register("stops", interrupted)
    folder = tmp_path / "out"
    assert run(*arguments, "--methods", "stops", "--output", str(folder / "r.json")) == 130
    out, err = capsys.readouterr()
    assert out == "" and "Interrupted" in err and "Traceback" not in err
    assert not folder.exists()


# ------------------------------------------------------------------------------ batches, contexts, turns


def test_batches_give_what_single_prompts_give(engine: Engine, prompt_file: Path) -> None:
    prompts = read_prompts(prompt_file)
    sizes = []
    for name in ("plain", "multirate", "transformers"):
        method = METHODS[name].make(engine, options("plain"))
        ids = prompts.encode(engine)
        together = method.run(ids, NEW)
        assert [o.token_ids for o in together] == [
            method.run([own], NEW)[0].token_ids for own in ids
        ], name
        sizes.append(sum(len(output.token_ids) for output in together))
    report = bench_speculative(
        engine, prompts, options("plain", "multirate", "transformers", batch=3)
    )
    assert report.prompts == 4 and report.methods["transformers"].identical == 4
    assert report.provenance["batch"] == 3
    assert report.provenance["decoding"] == "greedy, batches of 3"
    assert Sample([Output([1, 2]), Output([3])], 2.0).tokens_per_second == 1.5


def test_transformers_batches_end_where_each_prompt_ends(engine: Engine) -> None:
    engine = make_engine()
    stock, plain = (
        METHODS[name].make(engine, options("plain")) for name in ("transformers", "plain")
    )
    batch = [[40, 41, 42], [50]]
    free = [output.token_ids for output in plain.run(batch, NEW)]
    engine.base.model.generation_config.eos_token_id = free[0][3]
    ends = [own.index(free[0][3]) + 1 if free[0][3] in own else NEW for own in free]
    assert ends[0] != ends[1]
    for method in (stock, plain):
        assert [o.token_ids for o in method.run(batch, NEW)] == [
            own[:end] for own, end in zip(free, ends, strict=True)
        ]


def test_prompts_are_lengthened_to_a_context(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts_module, "context_text", lambda: "abcdefgh" * 5)
    system = {"role": "system", "content": "S"}
    rows = [
        {"prompt": "AB"},
        {"text": "CD"},
        {"messages": [system, *user("E")]},
        {"text": "F" * 25},
    ]
    found = read_prompts(write(tmp_path, *rows)).encode(engine, context=20)
    # To the tiny tokenizer the line breaks between texts are one unknown token, shown as "!".
    assert [engine.tokenizer.decode(ids).replace(" ", "") for ids in found] == [
        "u:abcdefghabcdef!AB;", "abcdefghabcdefgha!CD", "s:S;u:abcdefghabc!E;", "F" * 25,
    ]  # fmt: skip
    with pytest.raises(
        MultirateError, match=r"line 1: context=41 is longer than the text .* 40 tok"
    ):
        read_prompts(write(tmp_path, *rows)).encode(engine, context=41)
    with pytest.raises(MultirateError, match=rf"context={MAX_POSITIONS} leaves no room"):
        bench_speculative(
            engine, read_prompts(write(tmp_path, *rows)), options("plain", context=MAX_POSITIONS)
        )


def test_later_turns_come_behind_plain_answers(engine: Engine, tmp_path: Path) -> None:
    file = write(tmp_path, {"turns": ["AB", "CD", "EF"], "category": "qa"}, {"prompt": "G"})
    prompts = read_prompts(file).with_turns(engine, 2, new=3)
    answer = engine.generate("AB", strategy="plain", max_new_tokens=3).text
    assert [row.content for row in prompts.rows] == [
        user("AB"), [*user("AB"), {"role": "assistant", "content": answer}, *user("CD")], user("G"),
    ]  # fmt: skip
    assert [row.category for row in prompts.rows] == ["qa", "qa", None]
    third = read_prompts(file).with_turns(engine, 3, new=3).rows[2].content
    assert [message["content"] for message in third][::2] == ["AB", "CD", "EF"]
    assert read_prompts(file).with_turns(engine, 1, new=3) == read_prompts(file)
    report = bench_speculative(engine, read_prompts(file), options("plain", turns=2))
    assert report.prompts == 3 and report.provenance["decoding"].endswith("at a time, 2 turns")


def test_some_of_each_category(tmp_path: Path) -> None:
    rows = [{"prompt": str(i), "category": "ab"[i % 3 == 0]} for i in range(9)]
    found = read_prompts(write(tmp_path, *rows), limit=7, per_category=2)
    assert [row.content[0]["content"] for row in found.rows] == ["0", "1", "2", "3"]
    with pytest.raises(MultirateError, match="per_category=0"):
        read_prompts("mt_bench", per_category=0)


def test_spec_bench_has_six_tasks(tmp_path: Path) -> None:
    kinds = ["writing", "math", "translation", "summarization", "qa", "math_reasoning", "rag"]
    rows = [{"question_id": i, "turns": ["x"], "category": kind} for i, kind in enumerate(kinds)]
    found = [row.category for row in read_prompts(write(tmp_path, *rows)).rows]
    assert found == ["multi_turn", "multi_turn", *kinds[2:]]
    found = [row.category for row in read_prompts(write(tmp_path, *rows[:4])).rows]
    assert found == kinds[:4]
