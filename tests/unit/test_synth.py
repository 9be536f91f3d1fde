"""Self-written training text: what is written, that a run goes on where it stopped, what is refused."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_cli import TEMPLATE, save_model, tokenizer
from tiny_models import tiny_model
from transformers import GenerationConfig
from typer.testing import CliRunner

from multirate.cli.main import app
from multirate.config.errors import MultirateError
from multirate.decode.engine import Engine
from multirate.models.base import BaseModel
from multirate.models.forms import batch_dtype
from multirate.models.loading import read_end_token_ids
from multirate.train.data import read_rows
from multirate.train.synth import SynthOptions, synthesize
from multirate.train.writers import Request, TorchWriter, VllmWriter

END = 2


def turn(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def chat_tokenizer() -> Any:
    result = tokenizer()
    result.eos_token = result.convert_ids_to_tokens(END)
    return result


class ScriptedWriter:
    """Gives scripted answers and remembers what it was asked."""

    ends, context_length = (END,), 64

    def __init__(self, *batches: Sequence[str]) -> None:
        self.batches, self.requests = list(batches), []
        self.tokenizer = chat_tokenizer()

    def complete(self, requests: Sequence[Request]) -> list[list[int]]:
        self.requests += requests
        texts = self.batches.pop(0) if self.batches else ["?"] * len(requests)
        return [[*self.tokenizer(text).input_ids, END] for text in texts[: len(requests)]]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ----------------------------------------------------------------------------------- the writer


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return BaseModel(tiny_model("llama"))


def test_greedy_rows_are_what_the_engine_writes(base: BaseModel) -> None:
    """Whatever the batch: rows of other lengths beside it, some of which end early."""
    prompts = [[5, 6, 7], [9] * 9, [11, 3], [40, 41, 42, 43, 44]]
    requests = [Request(ids, 12, 0.0, 0) for ids in prompts]
    written = TorchWriter(base, {END}, straggler_share=0).complete(requests)
    engine = Engine(base, tokenizer=tokenizer())
    for ids, new in zip(prompts, written, strict=True):
        expected = engine.generate(ids, max_new_tokens=12).token_ids
        assert new[:-1] == expected[: len(new) - 1]
        assert len(new) == 12 or new[-1] == END


def test_sampled_rows_follow_their_own_seed_and_the_model(base: BaseModel) -> None:
    ids = [5, 6, 7]
    writer = TorchWriter(base, {END}, straggler_share=0)
    alone = writer.complete([Request(ids, 6, 1.0, 3)])[0]
    among = writer.complete([Request(ids, 6, 1.0, seed) for seed in range(8)])
    assert among[3] == alone
    assert len({tuple(row) for row in among}) > 1

    requests = [Request(ids, 1, 0.7, seed) for seed in range(4000)]
    counts = Counter(row[0] for row in writer.complete(requests))
    logits = base.model(torch.tensor([ids])).logits[0, -1].float()
    probs = torch.softmax(logits / 0.7, dim=-1)
    for token, prob in enumerate(probs.tolist()):
        spread = (4000 * prob * (1 - prob)) ** 0.5
        assert abs(counts[token] - 4000 * prob) < 5 * spread + 1, token


def test_stragglers_are_cut(base: BaseModel) -> None:
    """Three rows at their limit end the batch; the fourth may not hold it up."""
    requests = [Request([5, 6], 2, 0.0, 0)] * 3 + [Request([7, 8], 30, 0.0, 0)]
    written = TorchWriter(base, (), straggler_share=0.25).complete(requests)
    assert [len(row) for row in written] == [2, 2, 2, 2]


def test_any_of_the_end_tokens_ends_a_row(base: BaseModel) -> None:
    request = Request([5, 6, 7], 20, 0.0, 0)
    (whole,) = TorchWriter(base, ()).complete([request])
    end = whole[4]
    (cut,) = TorchWriter(base, (END, end)).complete([request])
    assert cut == whole[: whole.index(end) + 1]


def test_end_tokens_are_those_of_the_generation_config_too(model: Path, tmp_path: Path) -> None:
    """As in Phi-3 and Gemma: the tokenizer's own end token is that of documents."""
    assert read_end_token_ids(model) == {END}
    folder = shutil.copytree(model, tmp_path / "model")
    GenerationConfig(eos_token_id=[5, 7]).save_pretrained(folder)
    assert read_end_token_ids(folder) == {END, 5, 7}


def test_the_fastest_dtype_of_a_cpu_is_one_of_two() -> None:
    assert batch_dtype("cpu") in (torch.float32, torch.bfloat16)


# --------------------------------------------------------------------------------- what is written


def test_given_prompts_are_answered_once_each_and_marked(tmp_path: Path) -> None:
    out = tmp_path / "text.jsonl"
    prompts = [turn(f"question {i}") for i in range(6)] + [turn("  QUESTION 3 ")]
    writer = ScriptedWriter(["one", "two", "three", "four"], ["five", "six"])
    options = SynthOptions(tokens=1000, batch_rows=4)
    steps = list(synthesize(out, writer, writer.tokenizer, options, prompts=prompts))
    rows = lines(out)
    assert [row["messages"][1]["content"] for row in rows] == [
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
    ]
    assert {row["messages"][0]["content"] for row in rows} == {f"question {i}" for i in range(6)}
    assert [row["tokens"] for row in rows] == [4, 4, 6, 5, 5, 4]
    assert all(row["complete"] for row in rows)
    assert steps[-1].tokens == 28 and steps[-1].rows == 6
    for row, request in zip(rows, writer.requests, strict=True):
        assert (request.temperature == 0) == row["greedy"]
    assert len(read_rows(out, chat_tokenizer())) == 6  # what `train` reads


def test_greedy_and_sampled_answers_are_mixed_as_asked(tmp_path: Path) -> None:
    prompts = [turn(f"question {i}") for i in range(400)]
    for share in (0.0, 0.25, 1.0):
        writer, out = ScriptedWriter(), tmp_path / f"{share}.jsonl"
        options = SynthOptions(tokens=10**6, greedy_share=share)
        list(synthesize(out, writer, writer.tokenizer, options, prompts=prompts))
        found = sum(row["greedy"] for row in lines(out)) / 400
        assert abs(found - share) < 0.07
    writer, out = ScriptedWriter(), tmp_path / "two.jsonl"
    options = SynthOptions(tokens=10**6, answers=2)
    list(synthesize(out, writer, writer.tokenizer, options, prompts=prompts[:20]))
    kinds = Counter(request.temperature == 0 for request in writer.requests)
    assert kinds == {True: 20, False: 20}  # one of each
    assert len({request.seed for request in writer.requests}) == 40
    for share, greedy in ((0.0, 0), (0.9, 20)):  # never the same greedy answer twice
        writer = ScriptedWriter()
        options = SynthOptions(tokens=10**6, answers=4, greedy_share=share)
        out = tmp_path / f"four {share}.jsonl"
        list(synthesize(out, writer, writer.tokenizer, options, prompts=prompts[:20]))
        assert Counter(r.temperature == 0 for r in writer.requests)[True] == greedy
        assert len(writer.requests) == 80


def test_an_answer_that_was_cut_off_is_not_complete_and_an_empty_one_is_left_out(
    tmp_path: Path,
) -> None:
    class Cut(ScriptedWriter):
        def complete(self, requests: Sequence[Request]) -> list[list[int]]:
            return [self.tokenizer("abc").input_ids, [END]]

        def __init__(self) -> None:
            super().__init__()
            decode = self.tokenizer.decode  # a token that holds a part of a character only
            self.tokenizer.decode = lambda ids: decode(ids) + "\ufffd" * bool(ids)

    writer, out = Cut(), tmp_path / "text.jsonl"
    options = SynthOptions(tokens=100)
    list(synthesize(out, writer, writer.tokenizer, options, prompts=[turn("a"), turn("b")]))
    (row,) = lines(out)
    assert row["messages"][1]["content"] == "abc" and not row["complete"]


def test_prompts_that_are_too_long_are_left_out(tmp_path: Path) -> None:
    writer, out = ScriptedWriter(), tmp_path / "text.jsonl"
    options = SynthOptions(tokens=100, max_prompt_tokens=10)
    prompts = [turn("x" * 10), turn("y" * 11)]
    steps = list(synthesize(out, writer, writer.tokenizer, options, prompts=prompts))
    assert [row["messages"][0]["content"] for row in lines(out)] == ["x" * 10]
    assert steps[-1].too_long == 1


def test_prompt_and_answer_keep_to_the_context(tmp_path: Path) -> None:
    writer, out = ScriptedWriter(), tmp_path / "text.jsonl"
    writer.context_length = 15
    options = SynthOptions(tokens=100, max_prompt_tokens=50, max_answer_tokens=8)
    prompts = [turn("x" * n) for n in (2, 10, 11, 12)]  # and 5 characters of the template
    prompts.append([{"role": "system", "content": "s" * 20}, *turn("x")])
    *_, last = synthesize(out, writer, writer.tokenizer, options, prompts=prompts)
    assert [(len(r.ids), r.max_new_tokens) for r in writer.requests] == [(5, 8), (13, 2), (14, 1)]
    assert last.too_long == 2


def test_without_prompts_the_model_invents_them(tmp_path: Path) -> None:
    invented = ["what is it?", "tell me more", "tell me more", "oh"]
    writer = ScriptedWriter(invented, ["a b", "c d", "e f", "g h"])
    out = tmp_path / "text.jsonl"
    options = SynthOptions(tokens=14, batch_rows=4, answers=2)
    list(synthesize(out, writer, writer.tokenizer, options))
    header = chat_tokenizer()("u:").input_ids
    assert all(request.ids == header for request in writer.requests[:4])
    assert len({request.seed for request in writer.requests[:4]}) == 4
    asked = Counter(row["messages"][0]["content"] for row in lines(out))
    assert asked == {"what is it?": 2, "tell me more": 2}  # "oh" is too short to be a prompt


def test_a_model_that_invents_nothing_new_ends_the_run(tmp_path: Path) -> None:
    class Parrot(ScriptedWriter):
        def complete(self, requests: Sequence[Request]) -> list[list[int]]:
            self.requests += requests
            return [[*self.tokenizer("again and again").input_ids, END] for _ in requests]

    writer, out = Parrot(), tmp_path / "text.jsonl"
    options = SynthOptions(tokens=10**6, batch_rows=2, answers=1)
    list(synthesize(out, writer, writer.tokenizer, options))
    assert len(lines(out)) == 1


# ------------------------------------------------------------------------------------ going on


def test_a_run_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    """Also in the middle of a line; what was answered is not asked again."""
    prompts = [turn(f"question {i}") for i in range(5)]
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    options = SynthOptions(tokens=10**6, batch_rows=2)
    writer = ScriptedWriter(["aa", "bb"], ["cc", "dd"], ["ee"])
    list(synthesize(whole, writer, writer.tokenizer, options, prompts=prompts))
    text = whole.read_text(encoding="utf-8")
    two = "".join(line + "\n" for line in text.splitlines()[:2])
    parts.write_text(two + text.splitlines()[2][:30], encoding="utf-8")
    writer = ScriptedWriter(["cc", "dd"], ["ee"])
    steps = list(synthesize(parts, writer, writer.tokenizer, options, prompts=prompts))
    assert steps[0].rows == 2 and steps[0].new_tokens == 0
    assert len(writer.requests) == 3
    assert parts.read_text(encoding="utf-8") == text
    again = ScriptedWriter()
    list(synthesize(parts, again, again.tokenizer, options, prompts=prompts))
    assert again.requests == []


def test_a_run_goes_on_with_lines_of_any_text(tmp_path: Path) -> None:
    """Unicode's line ends are no line ends; a byte order mark, empty lines and a missing last line end
    do no harm."""
    out = tmp_path / "text.jsonl"
    row = {"messages": [*turn("a\u2028b"), {"role": "assistant", "content": "c\x85d"}], "tokens": 3}
    text = json.dumps(row, ensure_ascii=False)
    other = text.replace("c\x85", "e")
    out.write_bytes(f"\ufeff{text}\r\n\r\n{other}".encode())
    writer = ScriptedWriter(["ff"])
    options = SynthOptions(tokens=9)
    steps = list(synthesize(out, writer, writer.tokenizer, options, prompts=[turn("g")]))
    assert [(step.rows, step.tokens) for step in steps] == [(2, 6), (3, 9)]
    assert out.read_bytes().count(b"\n") == 4


def test_two_runs_of_one_file(tmp_path: Path) -> None:
    """The second would take a line that is being written for one that a kill cut short."""
    out, writer = tmp_path / "text.jsonl", ScriptedWriter()
    options = SynthOptions(tokens=9)
    first = synthesize(out, writer, writer.tokenizer, options, prompts=[turn("a")])
    next(first)
    with pytest.raises(MultirateError, match=r"Another run is writing .*text\.jsonl"):
        list(synthesize(out, writer, writer.tokenizer, options, prompts=[turn("b")]))
    list(first)
    assert [path.name for path in tmp_path.iterdir()] == ["text.jsonl"]
    list(synthesize(out, writer, writer.tokenizer, options, prompts=[turn("b")]))
    assert len(lines(out)) == 2


def test_a_full_file_needs_no_model(tmp_path: Path) -> None:
    out = tmp_path / "text.jsonl"
    writer = ScriptedWriter(["abcdef"])
    options = SynthOptions(tokens=7, batch_rows=1)
    list(synthesize(out, writer, writer.tokenizer, options, prompts=[turn("a"), turn("b")]))
    assert len(list(synthesize(out, ScriptedWriter(), writer.tokenizer, options))) == 1


@pytest.mark.parametrize(
    "content",
    [
        "hello\n", '{"text": "raw"}\n', '{"messages": []}\n', '{"messages": [{"role": 1}]}\n',
        "hello", '{"text": "raw"}', '{"a": [1',
        '{"messages": [{"content": null}, {"role": "assistant", "content": "a"}], "tokens": 1}\n',
        '{"messages": [{"content": "\\ud800"}, {"role": "assistant", "content": "a"}], "tokens": 1}',
    ],
)  # fmt: skip
def test_a_file_of_something_else_is_refused_and_kept(tmp_path: Path, content: str) -> None:
    out = tmp_path / "text.jsonl"
    out.write_text(content)
    writer = ScriptedWriter()
    with pytest.raises(MultirateError, match=r"line 1 .*another output file"):
        list(synthesize(out, writer, writer.tokenizer, SynthOptions(tokens=1), prompts=[]))
    assert out.read_text() == content


# ---------------------------------------------------------------------------- the command line


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["synth", *map(str, arguments)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synth") / "model"
    save_model(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


def test_the_command_writes_text_and_says_where_it_stands(model: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "text.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(9)))
    options = ("--tokens", "60", "--batch-rows", "4", "--max-answer-tokens", "9")
    result = run(model, out, "--prompts", prompts, *options)
    assert result.exit_code == 0, result.output
    rows = lines(out)
    assert sum(row["tokens"] for row in rows) >= 60
    assert "min left" in result.stderr and f"{len(rows)} answers" in result.stderr
    result = run(model, out, "--prompts", prompts, "--tokens", "10000")
    assert "answer tokens" in result.stderr and "used up" in result.stderr
    assert len(lines(out)) == 9


def test_a_template_makes_the_prompts(model: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "text.jsonl"
    data.write_text("".join(json.dumps({"n": i}) + "\n" for i in range(3)))
    options = ("--tokens", "60", "--max-answer-tokens", "4", "--template", "say {n}")
    assert run(model, out, "--prompts", data, *options).exit_code == 0
    asked = {row["messages"][0]["content"] for row in lines(out)}
    assert asked == {"say 0", "say 1", "say 2"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tokens", "0"), "tokens=0"),
        (("--tokens", "9", "--greedy-share", "2"), "greedy_share=2"),
        (("--tokens", "9", "--temperature", "0"), "temperature=0"),
        (("--tokens", "9", "--engine", "jax"), "Allowed: torch, vllm"),
        (("--tokens", "9", "--max-prompt-tokens", "2"), "max_prompt_tokens=2"),
        (("--tokens", "9", "--max-prompt-tokens", "0"), "max_prompt_tokens=0"),
        (
            ("--tokens", "9", "--greedy-share", "1", "--answers", "2"),
            "answers=2 with greedy_share=1",
        ),
        (("--tokens", "9", "--seed", "-1"), "seed=-1"),
        (("--tokens", "9", "--prompts", "nowhere.jsonl"), "no file 'nowhere.jsonl'"),
        (("--tokens", "9", "--batch-rows", "0"), "batch_rows=0"),
    ],
)
def test_a_users_mistake_is_named(
    model: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    result = run(model, tmp_path / "out.jsonl", *options)
    assert isinstance(result.exception, MultirateError)
    assert message in str(result.exception)
    assert not (tmp_path / "out.jsonl").exists()


def test_an_output_that_cannot_be_written_is_refused_before_the_model_works(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multirate.cli.synth._writer", None)
    for out in (tmp_path, tmp_path / "no" / "folder.jsonl", Path("/dev/full")):
        result = run(model, out, "--tokens", "9")
        assert isinstance(result.exception, MultirateError), result.output


def test_nothing_written_is_said(model: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "text.jsonl"
    prompts.write_text(json.dumps({"prompt": "x" * 30}))
    result = run(model, out, "--tokens", "9", "--prompts", prompts, "--max-prompt-tokens", "20")
    assert "0 answers" in result.stderr and "1 prompts that were too long" in result.stderr


def test_a_template_without_a_user_header_cannot_invent(tmp_path: Path) -> None:
    writer = ScriptedWriter()
    writer.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(MultirateError, match="nothing before a user's turn"):
        list(synthesize(tmp_path / "a", writer, writer.tokenizer, SynthOptions(tokens=9)))


def test_a_model_without_chat_template_is_refused(tmp_path: Path) -> None:
    assert TEMPLATE
    folder = save_model(tmp_path / "model")
    plain = tokenizer()
    plain.chat_template = None
    plain.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    result = run(folder, tmp_path / "out.jsonl", "--tokens", "9")
    assert isinstance(result.exception, MultirateError)
    assert "no chat template" in str(result.exception)


# --------------------------------------------------------------------------------------- vLLM


def test_vllm_is_asked_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with vLLM's own names: LLM(...).generate(prompts, params)[i].outputs[0].token_ids."""
    asked: dict[str, Any] = {}

    class LLM:
        def __init__(self, **options: Any) -> None:
            asked["load"] = options

        def generate(self, prompts: Any, params: Any, *, use_tqdm: bool) -> list[Any]:
            asked.update(prompts=prompts, params=params)
            outputs = [SimpleNamespace(token_ids=(7, 8, p["prompt_token_ids"][0])) for p in prompts]
            return [SimpleNamespace(outputs=[output]) for output in outputs]

    fake = SimpleNamespace(LLM=LLM, SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    writer = VllmWriter("a-model", {END}, context_length=64, dtype="float32", seed=5)
    assert writer.complete([Request([3], 9, 0.0, 1), Request([4], 8, 0.7, 2)]) == [
        [7, 8, 3],
        [7, 8, 4],
    ]
    assert asked["load"] == {"model": "a-model", "dtype": "float32", "seed": 5}
    assert [(p.max_tokens, p.temperature, p.seed) for p in asked["params"]] == [
        (9, 0.0, 1),
        (8, 0.7, 2),
    ]
    assert all(p.stop_token_ids == [END] for p in asked["params"])


def test_vllm_that_is_missing_or_fails_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MultirateError, match="not installed"):
        VllmWriter("a-model", {END}, context_length=64)

    def broken(**_: Any) -> None:
        raise RuntimeError("no kernel for this CPU")

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=broken))
    with pytest.raises(MultirateError, match="no kernel for this CPU"):
        VllmWriter("a-model", {END}, context_length=64)
