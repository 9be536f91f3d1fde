"""The `multirate` command: what it prints, what it refuses, and how it stops."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import typer
from test_gguf import tiny_llama, write_gguf
from tiny_models import MAX_POSITIONS, VOCABULARY, tiny_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import multirate
from multirate.cli.generate import summary
from multirate.cli.main import app, main
from multirate.config.accelerator import preset_config
from multirate.config.generation import GenerationOptions
from multirate.decode.compare import Comparison
from multirate.decode.engine import Engine
from multirate.decode.loop import SpeculationCounts
from multirate.decode.results import GenerationResult, Speculation
from multirate.models.quantized import quantize_weight
from multirate.streams import defaults
from multirate.streams.accelerator import Accelerator
from multirate.streams.folder import CONFIG_FILE, FILES, WEIGHTS_FILE
from multirate.train.checkpoint import training_folder

FAST = ("--dtype", "float32", "--device", "cpu")
NEW = ("--max-new-tokens", "8", "--ignore-eos")
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"

RESULT_KEYS = [
    "text", "prompt_tokens", "new_tokens", "seconds", "tokens_per_second", "strategy", "dtype",
    "device", "finish_reason",
]  # fmt: skip
SPECULATION_KEYS = [
    "num_drafts", "num_draft_tokens", "num_accepted_tokens", "mean_acceptance_length",
    "acceptance_rate", "per_position_acceptance_rate", "num_plain_steps", "note",
]  # fmt: skip


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Cli = Callable[..., Outcome]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs the command in this process."""
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):  # main sets them for its process
        monkeypatch.setenv(name, "error")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def run(*arguments: str | Path, stdin: bytes = b"") -> Outcome:
        monkeypatch.setattr(sys, "argv", ["multirate", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        code: Any = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code
        return Outcome(int(code or 0), *capsys.readouterr())

    return run


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for every character."""
    vocabulary = {chr(32 + i): i for i in range(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE)


def save_model(folder: Path, **changes: Any) -> Path:
    tiny_model("llama", **changes).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("cli") / "model")


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return multirate.load(model, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def accelerator(model: Path, engine: Engine) -> Path:
    base = engine.base
    config = preset_config(
        "carry",
        num_layers=base.num_layers,
        hidden_size=base.hidden_size,
        vocab_size=base.vocab_size,
        num_attention_heads=4,
        rank=3,
        draft_vocab_size=40,
        expected_acceptance=(0.5, 0.25),
    )
    torch.manual_seed(0)
    return Accelerator(config, base).save_pretrained(model.parent / "accelerator")


@pytest.fixture
def broken(accelerator: Path, tmp_path: Path) -> Path:
    """A copy of the accelerator whose weights file is cut short."""
    folder = tmp_path / "broken"
    shutil.copytree(accelerator, folder)
    weights = folder / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 90, (600,), generator=generator).tolist()
    file.write_text("".join(chr(32 + i) for i in ids))
    return file


# ------------------------------------------------------------------------------ the command line


def test_the_option_set_is_frozen() -> None:
    """A change here is a change of the interface: add, but do not rename or remove."""
    shared = ["--accelerator", "--json"]
    expected = {
        "generate": [
            "model", "text", "--prompt", "--prompt-file", "--system", "--raw", "--strategy",
            "--max-new-tokens", "--temperature", "--top-k", "--top-p", "--min-p",
            "--repetition-penalty", "--seed", "--stop", "--num-draft-tokens", "--max-draft-tokens",
            "--draft-width", "--ignore-eos", "--dtype", "--quantize", "--compile", "--device",
            "--no-stream",
            *shared,
        ],
        "demo": ["--prompt", "--max-new-tokens", "--dtype", "--quantize", "--compile", "--json"],
        "synth": [
            "model", "output", "--tokens", "--prompts", "--template", "--answers", "--greedy-share",
            "--temperature", "--batch-rows", "--max-answer-tokens",
            "--max-prompt-tokens", "--seed", "--engine", "--dtype", "--device",
        ],
        "train": [
            "model", "--data", "--output", "--preset", "--start-from", "--heldout-data", "--loss-on",
            "--max-length", "--max-tokens", "--epochs", "--batch-tokens",
            "--gradient-accumulation", "--learning-rate", "--warmup-share",
            "--weight-decay", "--clip", "--ema-decay", "--draft-steps", "--step-decay",
            "--reach-weighting", "--prediction-weight", "--distillation-weight",
            "--distillation-loss", "--closed-form", "--closed-form-tokens",
            "--heldout-rows", "--eval-steps", "--patience", "--draft-vocab-size",
            "--rank", "--gates", "--carry-layers", "--seed", "--dtype", "--device",
            "--save-seconds", "--resume", "--teacher-cache", "--teacher-cache-gb",
            "--report-to", "--overwrite",
        ],
        "analyze": [
            "model", "--output", "--accelerator", "--data", "--figures", "--tokens",
            "--rank", "--epochs", "--max-length", "--seed", "--dtype", "--device",
            "--overwrite", "--json",
        ],
        "info": ["model", *shared],
    }  # fmt: skip
    group: Any = typer.main.get_command(app)
    found = {
        name: sorted(flag for parameter in command.params for flag in parameter.opts)
        for name, command in group.commands.items()
        if name in expected
    }
    assert found == {name: sorted(flags) for name, flags in expected.items()}
    assert [flag for parameter in group.params for flag in parameter.opts] == ["--version"]


def test_defaults_are_the_librarys(cli: Cli) -> None:
    group: Any = typer.main.get_command(app)
    defaults = {p.name: p.default for p in group.commands["generate"].params}
    options = GenerationOptions()
    for name in set(GenerationOptions.__dataclass_fields__) - {"stop"}:
        assert defaults[name] == getattr(options, name), name


def test_help_and_version_need_no_torch() -> None:
    code = (
        "import sys, multirate.cli.main; "
        "print(sorted({'torch', 'transformers', 'safetensors', 'numpy'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_importing_sets_the_libraries_aside_once_and_leaves_collection_on() -> None:
    code = (
        "import gc; from multirate.cli.options import import_library; import_library()\n"
        "assert gc.isenabled() and gc.get_freeze_count() > 100_000, gc.get_freeze_count()\n"
        "count = gc.get_freeze_count(); more = [[] for _ in range(1000)]; import_library()\n"
        "assert gc.get_freeze_count() <= count"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def commands() -> dict[tuple[str, ...], Any]:
    """Every command and group, by the words that name it."""
    root: Any = typer.main.get_command(app)
    found = {(): root} | {(name,): command for name, command in root.commands.items()}
    bench = {("bench", name): command for name, command in found[("bench",)].commands.items()}
    return found | bench


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_helps_of_80_columns_cut_nothing(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = cli(*words, "--help")
    command = commands()[words]
    said = found.out.split()
    options = [p for p in command.params if p.param_type_name == "option"]
    names = {flag for p in options for flag in (*p.opts, *p.secondary_opts)}
    assert found.code == 0 and names <= {name for word in said for name in word.split("/")}
    assert "\u2026" not in found.out and max(map(len, found.out.splitlines())) <= 80
    for own in getattr(command, "commands", {}).values():
        assert own.help.partition("\n")[0] in " ".join(said)


def test_version(cli: Cli) -> None:
    assert cli("--version") == (0, f"multirate {version('multirate')}\n", "")


def test_help_lists_the_commands(cli: Cli) -> None:
    found = cli("--help")
    assert found.code == 0
    assert all(
        name in found.out for name in ("generate", "demo", "synth", "train", "analyze", "info")
    )


@pytest.mark.parametrize(
    "arguments", [["frobnicate"], ["generate"], ["generate", "m", "p", "--top-k", "few"]]
)
def test_usage_errors(cli: Cli, arguments: list[str]) -> None:
    found = cli(*arguments)
    assert (found.code, found.out) == (2, "")
    assert "Usage: multirate" in found.err


# ------------------------------------------------------------------------------ generate


def test_text_is_the_librarys_and_numbers_go_to_stderr(
    cli: Cli, model: Path, engine: Engine
) -> None:
    expected = engine.generate("abc", max_new_tokens=8, ignore_eos=True)
    for extra in ((), ("--no-stream",)):
        found = cli("generate", model, "abc", *NEW, *FAST, *extra)
        assert (found.code, found.out) == (0, f"{expected.text}\n")
        assert found.err.count("\n") == 1
        assert found.err.startswith("[8 tokens, ")
        assert found.err.endswith(" tokens/s, plain, float32 on cpu, ended by length]\n")


def test_compiling_is_announced_and_an_unknown_mode_refused(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    found = cli("generate", model, "abc", *NEW, *FAST, "--compile", "fast")
    assert (found.code, found.out) == (2, "")
    assert "'fast'" in found.err and "auto, layers, model, graphs, none" in found.err

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("multirate.models.ahead._compile", fail)
    monkeypatch.setenv("MULTIRATE_CACHE", str(tmp_path))
    found = cli("generate", model, "abc", *NEW, *FAST, "--compile", "layers")
    assert found.code == 0 and found.out
    assert "compiling a decoder layer" in found.err
    assert "layers run eagerly: no compiler" in found.err


def test_the_ways_to_give_a_prompt(cli: Cli, model: Path, engine: Engine, tmp_path: Path) -> None:
    expected = f"{engine.generate('a b', max_new_tokens=8, ignore_eos=True).text}\n"
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbfa b\r\n")
    ways: list[tuple[list[str], bytes]] = [
        (["a b"], b""),
        (["--prompt", "a b"], b""),
        (["--prompt-file", str(file)], b""),
        (["--prompt-file", "-"], b"a b\n"),
        ([], b"a b"),
    ]
    for arguments, stdin in ways:
        found = cli("generate", model, *arguments, *NEW, *FAST, stdin=stdin)
        assert (found.code, found.out) == (0, expected), arguments


def test_raw_and_system(cli: Cli, model: Path) -> None:
    def prompt_tokens(*arguments: str) -> int:
        found = cli("generate", model, "abc", *arguments, *NEW, *FAST, "--json")
        return int(json.loads(found.out)["prompt_tokens"])

    assert prompt_tokens("--raw") == len("abc")
    assert prompt_tokens() == len("u:abc;")
    assert prompt_tokens("--system", "xy") == len("s:xy;u:abc;")
    found = cli("generate", model, "abc", "--raw", "--system", "xy")
    assert found.code == 2 and "--system" in found.err


def test_every_setting_arrives(cli: Cli, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    asked: list[GenerationOptions] = []
    stream = Engine.stream

    def spy(self: Engine, prompt: Any, options: GenerationOptions, **rest: Any) -> Any:
        asked.append(options)
        return stream(self, prompt, options, **rest)

    monkeypatch.setattr(Engine, "stream", spy)
    found = cli(
        "generate", model, "abc", "--max-new-tokens", "5", "--temperature", "0.5", "--top-k", "7",
        "--top-p", "0.9", "--min-p", "0.01", "--repetition-penalty", "1.5", "--seed", "3",
        "--stop", "xyz", "--stop", "~~~~", "--num-draft-tokens", "2", "--max-draft-tokens", "4",
        "--ignore-eos", "--strategy", "plain", *FAST,
    )  # fmt: skip
    assert found.code == 0
    assert asked == [
        GenerationOptions(
            max_new_tokens=5, temperature=0.5, top_k=7, top_p=0.9, min_p=0.01,
            repetition_penalty=1.5, seed=3, stop=("xyz", "~~~~"), num_draft_tokens=2,
            max_draft_tokens=4, ignore_eos=True, strategy="plain",
        )
    ]  # fmt: skip


def test_json_is_the_whole_output(cli: Cli, model: Path, accelerator: Path, engine: Engine) -> None:
    expected = engine.generate("abc", max_new_tokens=8, ignore_eos=True)
    plain = cli("generate", model, "abc", *NEW, *FAST, "--json")
    assert (plain.code, plain.err) == (0, "")
    data = json.loads(plain.out)
    assert list(data) == RESULT_KEYS
    assert data["text"] == expected.text
    assert (data["strategy"], data["new_tokens"], data["dtype"]) == ("plain", 8, "float32")

    fast = cli("generate", model, "abc", "--accelerator", accelerator, "--num-draft-tokens", "2",
               *NEW, *FAST, "--json")  # fmt: skip
    assert (fast.code, fast.err) == (0, "")
    data = json.loads(fast.out)
    assert list(data) == [*RESULT_KEYS, "speculation"]
    assert list(data["speculation"]) == SPECULATION_KEYS
    assert (data["text"], data["strategy"]) == (expected.text, "speculative")


def test_json_tells_that_drafting_stopped_as_the_summary_does() -> None:
    counts = SpeculationCounts(num_drafts=2, num_draft_tokens=6, num_accepted_tokens=3)
    notes = []
    for plain_steps in (0, 5):
        speculation = Speculation.of([replace(counts, num_plain_steps=plain_steps)])
        result = GenerationResult(
            "a", [1], 1, 0.5, "speculative", "int4", "cpu", "length", speculation
        )
        data = result.to_dict()["speculation"]
        assert data["num_plain_steps"] == plain_steps
        notes.append(data["note"])
        assert (data["note"] or "]") in summary(result)
    assert notes[0] is None and "stopped by itself for 5 of 7 steps" in notes[1]


def test_summary_of_speculation(cli: Cli, model: Path, accelerator: Path) -> None:
    found = cli("generate", model, "abc", "--accelerator", accelerator, "--num-draft-tokens", "2",
                *NEW, *FAST)  # fmt: skip
    assert found.code == 0
    assert "speculative, mean acceptance length 1." in found.err or (
        "speculative, mean acceptance length 2." in found.err
    )


def test_our_warnings_are_one_line(cli: Cli, model: Path) -> None:
    found = cli("generate", model, "abc", "--top-k", "3", *NEW, *FAST)
    assert found.code == 0
    first, second = found.err.splitlines()
    assert first.startswith("Warning: top_k has no effect on greedy decoding")
    assert second.startswith("[8 tokens")


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "The prompt is empty"),
        (["  \n"], "The prompt is empty"),
        ([], "The prompt is empty"),  # nothing on stdin
        (["abc", "--prompt", "abc"], "given as PROMPT and as --prompt"),
        (["--prompt-file", "/proc/none.txt"], "Cannot read the prompt from /proc/none.txt"),
        (["--prompt-file", ""], "Cannot read the prompt"),
        (["abc\udcff"], "not UTF-8"),
        (["abc", "--strategy", "magic"], "choose one of auto, plain, speculative"),
        (["abc", "--strategy", "speculative"], "needs an accelerator"),
        (["abc", "--max-new-tokens", "-5"], "max_new_tokens=-5"),
        (["abc", "--max-new-tokens", "0"], "max_new_tokens=0"),
        (["abc", "--num-draft-tokens", "-1"], "num_draft_tokens=-1"),
        (["abc", "--max-draft-tokens", "-1"], "max_draft_tokens=-1"),
        (["abc", "--temperature", "nan"], "temperature=nan"),
        (["abc", "--temperature", "-1"], "temperature=-1"),
        (["abc", "--top-p", "nan"], "top_p=nan"),
        (["abc", "--stop", ""], "empty string"),
        (["a" * MAX_POSITIONS], f"context holds {MAX_POSITIONS}"),
        (["abc", "--dtype", "float7"], "Unknown dtype 'float7'"),
        (["abc", "--device", "abacus"], "No device 'abacus'"),
        (["abc", "--accelerator", "default"], "Models that one ships for: "),
        (["abc", "--accelerator", "./nowhere"], "no accelerator folder './nowhere'"),
    ],
)
def test_what_generate_refuses(cli: Cli, model: Path, arguments: list[str], message: str) -> None:
    found = cli("generate", model, *arguments)
    assert (found.code, found.out) == (2, "")
    assert found.err.startswith("Error: ") and message in found.err
    assert "Traceback" not in found.err


def test_a_message_with_brackets_is_no_markup(cli: Cli, model: Path) -> None:
    found = cli("generate", model, "abc", "--accelerator", "./[/bold]")
    assert found.code == 2 and "'./[/bold]'" in found.err


def test_a_prompt_that_is_no_text(cli: Cli, model: Path) -> None:
    found = cli("generate", model, stdin=b"ab\xff")
    assert found.code == 2 and "from stdin is not UTF-8 text" in found.err


@pytest.mark.parametrize("command", ["generate", "info"])
def test_a_truncated_accelerator(cli: Cli, model: Path, broken: Path, command: str) -> None:
    prompt = ["--prompt", "abc"] if command == "generate" else []
    found = cli(command, model, *prompt, "--accelerator", broken)
    assert (found.code, found.out) == (2, "")
    assert f"Could not read {broken / WEIGHTS_FILE}" in found.err


def test_an_accelerator_of_another_base(cli: Cli, accelerator: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", intermediate_size=64)
    found = cli("generate", other, "abc", "--accelerator", accelerator)
    assert (found.code, found.out) == (2, "")
    assert "was made for" in found.err and f"the loaded model is {other}" in found.err


def test_a_model_that_is_not_there(cli: Cli, tmp_path: Path) -> None:
    found = cli("generate", tmp_path / "none", "abc")
    assert found.code == 2 and "There is no model at" in found.err


# ------------------------------------------------------------------------------ default


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, accelerator: Path) -> Path:
    """A package that ships the tiny accelerator for a model named `tiny`."""
    package = tmp_path / "package"
    (package / "accelerators" / ".tiny.1234.new").mkdir(parents=True)
    shutil.copytree(accelerator, package / "accelerators" / "tiny")
    monkeypatch.setattr(defaults, "files", lambda name: {"multirate": package}[name])
    return package / "accelerators" / "tiny"


def test_default_is_found_by_the_models_name(
    monkeypatch: pytest.MonkeyPatch, shipped: Path, engine: Engine
) -> None:
    assert defaults.shipped_accelerators() == {"tiny": shipped}
    assert defaults.default_accelerator("tiny") == shipped
    assert defaults.default_accelerator("../accelerators/tiny") is None
    monkeypatch.setattr(engine.base.config, "_name_or_path", "tiny")
    assert Accelerator.from_pretrained("default", engine.base).config.rank == 3
    monkeypatch.setattr(engine.base.config, "_name_or_path", "other")
    with pytest.raises(multirate.MultirateError, match=r"ships for other.*ships\s+for: tiny\."):
        Accelerator.from_pretrained("default", engine.base)


def test_a_package_without_accelerators(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(defaults, "files", lambda name: tmp_path)
    assert defaults.default_accelerator("tiny") is None
    with pytest.raises(multirate.MultirateError, match="ships for: none"):
        defaults.require_default("tiny")


@pytest.mark.usefixtures("shipped")
def test_the_shipped_accelerator_is_used_unless_told_otherwise(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    monkeypatch.chdir(model.parent)
    os.symlink("model", "tiny")
    try:
        arguments = ("generate", "tiny", "abc", *NEW, *FAST, "--json", "--num-draft-tokens", "2")
        used = {
            choice: json.loads(cli(*arguments, *choice).out)["strategy"]
            for choice in ((), ("--accelerator", "default"), ("--accelerator", "none"))
        }
    finally:
        os.unlink("tiny")
    assert list(used.values()) == ["speculative", "speculative", "plain"]


# ------------------------------------------------------------------------------ demo


@pytest.fixture
def demo_engine(monkeypatch: pytest.MonkeyPatch, engine: Engine, accelerator: Path) -> Engine:
    """The tiny model in the embedded one's place."""
    stream = Accelerator.from_pretrained(accelerator, engine.base)
    fast = Engine(engine.base, tokenizer=engine.tokenizer, accelerator=stream)

    def load(model: str, accelerator: str, **how: str) -> Engine:
        assert (model, accelerator) == ("smollm2-135m", "default")
        assert how == {"dtype": None, "quantize": None, "compile": "auto"}
        return fast

    monkeypatch.setattr(multirate, "load", load)
    return fast


DEMO = ("demo", "--prompt", "abc", "--max-new-tokens", "12")


@pytest.mark.parametrize(("columns", "together"), [("140", True), ("70", False)])
def test_demo_shows_both_outputs(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, demo_engine: Engine, columns: str, together: bool
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    found = cli(*DEMO)
    assert (found.code, found.err) == (0, "")
    lines = found.out.splitlines()
    assert any("plain" in line and "accelerated" in line for line in lines) is together
    expected = demo_engine.generate("abc", strategy="plain", max_new_tokens=12)
    assert found.out.count(expected.text.strip()) == 2
    assert found.out.count(" tokens/s (") == 2
    assert "Speed-up: " in found.out and "drafted tokens accepted" in found.out
    assert f"Outputs: identical, all {expected.new_tokens} tokens" in found.out


def test_demo_takes_turns_and_leaves_measuring_to_the_warm_up(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, demo_engine: Engine
) -> None:
    events: list[str] = []
    generate, measure = Engine.generate, Engine._measure

    def spy(self: Engine, *args: Any, **settings: Any) -> Any:
        events.append(f"{settings['strategy']} {settings['max_new_tokens']}")
        return generate(self, *args, **settings)

    def spy_measure(self: Engine, *args: Any) -> Any:
        events.append("measure")
        return measure(self, *args)

    monkeypatch.setattr(Engine, "generate", spy)
    monkeypatch.setattr(Engine, "_measure", spy_measure)
    assert cli(*DEMO).code == 0
    warm_up = ["plain 8", "speculative 8", "measure"]
    assert events == warm_up + ["plain 12", "speculative 12"] * 3


def test_demo_json(cli: Cli, demo_engine: Engine) -> None:
    found = cli(*DEMO, "--json")
    data = json.loads(found.out)
    assert (found.code, found.err) == (0, "")
    assert (data["prompt"], data["runs"], data["identical"]) == ("abc", 3, True)
    assert (data["first_difference"], data["gap"], data["near_tie"]) == (None, None, None)
    assert list(data["plain"]) == RESULT_KEYS
    assert list(data["accelerated"]) == [*RESULT_KEYS, "speculation"]
    speeds = [data[name]["tokens_per_second"] for name in ("accelerated", "plain")]
    assert data["speedup"] == pytest.approx(speeds[0] / speeds[1])


@pytest.mark.parametrize(
    ("comparison", "code", "verdict"),
    [
        (Comparison(False, 4, 2e-6, True), 0, "first difference at token 5, a near-tie"),
        (Comparison(False, 4, 0.5, False), 1, "first difference at token 5, no near-tie"),
        (Comparison(False, 4, None, False), 1, "first difference at token 5, where one of them"),
    ],
)
@pytest.mark.usefixtures("demo_engine")
def test_demo_judges_a_difference(
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    comparison: Comparison,
    code: int,
    verdict: str,
) -> None:
    monkeypatch.setattr("multirate.decode.compare.compare_outputs", lambda *a, **k: comparison)
    found = cli(*DEMO)
    assert found.code == code and f"Outputs: {verdict}" in found.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--prompt", " "], "The prompt is empty"), (["--max-new-tokens", "-1"], "max_new_tokens=-1")],
)
def test_what_demo_refuses(cli: Cli, arguments: list[str], message: str) -> None:
    found = cli("demo", *arguments)
    assert (found.code, found.out) == (2, "") and message in found.err


# ------------------------------------------------------------------------------ info


def test_info_without_a_model(cli: Cli) -> None:
    found = cli("info", "--json")
    data = json.loads(found.out)
    assert (found.code, list(data)) == (0, ["system", "available"])
    assert data["system"]["torch"] == torch.__version__
    assert "llama" in data["available"]["model_types"]
    assert list(data["available"]) == ["model_types", "smollm2-135m", "accelerators"]
    assert cli("info").code == 0


def test_info_of_a_model_and_its_accelerator(
    cli: Cli, model: Path, accelerator: Path, engine: Engine
) -> None:
    found = cli("info", model, "--accelerator", accelerator, "--json")
    data = json.loads(found.out)
    assert (found.code, list(data)) == (0, ["system", "model", "accelerator"])
    base = engine.base
    parameters = base.model.num_parameters()
    expected = {
        "name": str(model), "supported": True, "num_layers": 4, "hidden_size": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY,
        "context_length": MAX_POSITIONS, "parameters": parameters,
    }  # fmt: skip
    assert {name: data["model"][name] for name in expected} == expected
    trained = Accelerator.from_pretrained(accelerator, base).num_parameters()
    expected = {
        "folder": str(accelerator), "base_model": str(model), "fits_model": True, "entry": "carry",
        "layer_kind": "tied", "num_layers": 2, "rank": 3, "gates": [2, 4], "rates": [1.0],
        "draft_vocab_size": 40, "parameters": trained, "share_of_base": trained / parameters,
        "expected_acceptance": [0.5, 0.25], "expected_acceptance_length": 1.625,
    }  # fmt: skip
    assert {name: data["accelerator"][name] for name in expected} == expected
    table = cli("info", model, "--accelerator", accelerator)
    assert table.code == 0 and "1.62" in table.out and f"{parameters:,}" in table.out


@pytest.mark.parametrize("packs", [True, False])
def test_info_tells_what_is_used_and_its_bytes(
    cli: Cli, model: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, packs: bool
) -> None:
    monkeypatch.setattr("multirate.models.forms.can_pack", lambda device: packs)
    facts = json.loads(cli("info", model, "--json").out)["model"]
    found = (facts["dtype"], facts["weight_bytes"], facts["step_weight_bytes"])
    kv = engine.base.arena(rows=1, max_len=1).nbytes  # float32
    parameters, embeddings, norms = engine.base.model.num_parameters(), VOCABULARY * 32, 9 * 32
    if packs:  # norms are float32
        total = 2 * parameters + 2 * norms
        assert found == ("packed", total, total - 2 * embeddings)
        assert facts["kv_bytes_per_token"] == kv
    else:
        assert found == ("bfloat16", 2 * parameters, 2 * (parameters - embeddings))
        assert facts["kv_bytes_per_token"] == kv // 2
    rows = [line.split() for line in cli("info", model).out.splitlines()]
    assert ["dtype", found[0]] in rows


@pytest.mark.parametrize("exact", [True, False])
def test_info_tells_4_bits_where_they_are_exact(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, exact: bool
) -> None:
    monkeypatch.setenv("MULTIRATE_CACHE", str(tmp_path))
    monkeypatch.setattr("multirate.models.forms.can_pack", lambda device: True)
    monkeypatch.setattr("multirate.models.forms.has_kernel", lambda: True)
    llama = tiny_llama()
    for module in llama.model.modules() if exact else ():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = quantize_weight(module.weight, 4).groups().flatten(1)
    facts = json.loads(cli("info", write_gguf(tmp_path / "a.gguf", llama), "--json").out)["model"]
    head = llama.lm_head.weight.numel()
    linears = sum(p.numel() for p in llama.model.layers.parameters() if p.dim() == 2)
    norms = 5 * 32 * 4
    step = linears * 5 // 8 + head * 17 // 16 if exact else 2 * (linears + head)
    assert facts["dtype"] == ("int4" if exact else "packed")
    assert facts["step_weight_bytes"] == step + norms


def test_info_of_an_accelerator_alone(cli: Cli, accelerator: Path, tmp_path: Path) -> None:
    data = json.loads(cli("info", "--accelerator", accelerator, "--json").out)
    assert list(data) == ["system", "accelerator"]
    assert (data["accelerator"]["fits_model"], data["accelerator"]["share_of_base"]) == (None, None)


def test_info_of_models_that_do_not_fit(cli: Cli, accelerator: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", intermediate_size=64)
    data = json.loads(cli("info", other, "--accelerator", accelerator, "--json").out)
    assert data["accelerator"]["fits_model"] is False

    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    found = cli("info", other, "--json")
    data = json.loads(found.out)
    assert (found.code, data["model"]["supported"], data["model"]["parameters"]) == (0, False, None)
    assert cli("info", other).code == 0

    found = cli("info", tmp_path / "none")
    assert found.code == 2 and "There is no model at" in found.err


# ------------------------------------------------------------------------------ train


def train_arguments(model: Path, text: Path, output: Path, *more: str) -> list[str]:
    return [
        "train", str(model), "--data", str(text), "--output", str(output), "--max-length", "24",
        "--heldout-rows", "2", "--closed-form-tokens", "200", "--batch-tokens", "96",
        "--epochs", "0.1", "--rank", "2", *FAST, *more,
    ]  # fmt: skip


def test_train_saves_an_accelerator_that_generate_uses(
    cli: Cli, model: Path, text: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out" / "accelerator"
    found = cli(*train_arguments(model, text, output))
    assert (found.code, found.out) == (0, ""), found.err
    assert "mean acceptance length" in found.err and f"saved {output}" in found.err
    assert f"multirate train {model} --data {text}" in (output / "README.md").read_text()
    used = cli("generate", model, "abc", "--accelerator", output, *NEW, *FAST, "--json")
    assert json.loads(used.out)["strategy"] == "speculative"


def test_train_goes_on_from_an_accelerator(
    cli: Cli, model: Path, text: Path, tmp_path: Path
) -> None:
    first, more = tmp_path / "first", tmp_path / "more"
    assert cli(*train_arguments(model, text, first)).code == 0
    arguments = train_arguments(model, text, more, "--start-from", str(first))
    refused = cli(*arguments)
    assert refused.code == 2 and "rank cannot be given beside start_from" in refused.err
    at = arguments.index("--rank")
    del arguments[at : at + 2]
    nowhere = cli(*[x.replace(str(first), "./nowhere") for x in arguments])
    assert nowhere.code == 2 and "no accelerator folder './nowhere'" in nowhere.err
    assert "texts" not in nowhere.err  # before anything was read
    found = cli(*arguments)
    assert found.code == 0 and "closed form from" not in found.err, found.err
    assert (more / CONFIG_FILE).read_text().count('"rank": 2') == 1


def test_a_template_without_prompts_is_refused(cli: Cli, model: Path, tmp_path: Path) -> None:
    found = cli("synth", model, tmp_path / "x.jsonl", "--tokens", "9", "--template", "About {name}")
    assert found.code == 2 and "which --prompts names. Give both." in found.err


def test_train_keeps_to_the_context_of_the_model(cli: Cli, model: Path, tmp_path: Path) -> None:
    text, options = tmp_path / "text.txt", ("--heldout-rows", "1", "--epochs", "0")
    text.write_text("abcd" * MAX_POSITIONS)
    found = cli("train", model, "--data", text, "--output", tmp_path / "out", *options, *FAST)
    assert found.code == 0 and "4 texts" in found.err, found.err


@pytest.mark.parametrize("place", ["below a file", "/proc"])
def test_train_into_a_folder_that_cannot_be_written(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, model: Path, text: Path, place: str
) -> None:
    monkeypatch.setattr("multirate.models.loading.load_pretrained", None)  # refused before it loads
    parent = Path("/proc/multirate") if place == "/proc" else text
    found = cli(*train_arguments(model, text, parent / "accelerator"))
    assert (found.code, found.out) == (2, "")
    assert "Error: " in found.err and str(parent / "accelerator") in found.err
    assert "Traceback" not in found.err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--epochs", "-1"), "epochs=-1"),
        (("--epochs", "nan"), "epochs=nan"),
        (("--batch-tokens", "-1"), "batch_tokens=-1"),
        (("--closed-form-tokens", "-1"), "closed_form_tokens=-1"),
        (("--heldout-rows", "0"), "heldout_rows=0"),
        (("--heldout-rows", "1000"), "1000 are kept back"),
        (("--learning-rate", "nan"), "learning_rate=nan"),
        (("--draft-steps", "0"), "draft_steps=0"),
        (("--preset", "magic"), "preset='magic'"),
        (("--rank", "-1"), "rank=-1"),
        (("--data", "nowhere.jsonl"), "No such data file: nowhere.jsonl"),
        (("--loss-on", "prompts"), "loss_on='prompts'"),
        (("--distillation-loss", "l2"), "distillation_loss='l2'"),
        (("--ema-decay", "1"), "ema_decay=1"),
        (("--report-to", "paper"), "report_to='paper'"),
    ],
)
def test_what_train_refuses(
    cli: Cli, model: Path, text: Path, tmp_path: Path, more: tuple[str, ...], message: str
) -> None:
    found = cli(*train_arguments(model, text, tmp_path / "out", *more))
    assert (found.code, found.out) == (2, "")
    assert message in found.err
    assert list(tmp_path.iterdir()) == [text]


# ------------------------------------------------------------------------------ stopping


def interrupt(*args: Any, **kwargs: Any) -> Any:
    raise KeyboardInterrupt


def test_ctrl_c_while_text_streams(cli: Cli, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    def stream(self: Engine, *args: Any, **kwargs: Any) -> Iterator[str]:
        yield "half a"
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "stream", stream)
    assert cli("generate", model, "abc", *FAST) == (130, "half a\n", "Interrupted.\n")
    assert cli("generate", model, "abc", *FAST, "--json") == (130, "", "Interrupted.\n")


@pytest.mark.parametrize("place", ["generate", "info"])
def test_ctrl_c_while_loading(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, model: Path, place: str
) -> None:
    monkeypatch.setattr("multirate.models.places.AutoConfig.from_pretrained", interrupt)
    prompt = ["abc"] if place == "generate" else []
    assert cli(place, model, *prompt) == (130, "", "Interrupted.\n")


def test_ctrl_c_while_train_saves_can_be_resumed(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, model: Path, text: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"

    def interrupted(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("multirate.streams.folder.Path.rename", interrupted)
    found = cli(*train_arguments(model, text, output))
    assert (found.code, found.out) == (130, "")
    assert "before anything was saved" in found.err and found.err.endswith("Interrupted.\n")
    assert sorted(tmp_path.iterdir()) == [training_folder(output), text]
    monkeypatch.undo()
    refused = cli(*train_arguments(model, text, output))
    assert refused.code == 2 and "--resume" in refused.err
    resumed = cli(*train_arguments(model, text, output, "--resume"))
    assert resumed.code == 0 and "resumed at step 0" in resumed.err


def test_ctrl_c_while_train_trains_leaves_the_last_save(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, model: Path, text: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr("multirate.train.loop.TrainingRun.train_step", interrupt)
    output = tmp_path / "out"
    found = cli(*train_arguments(model, text, output))
    assert (found.code, found.out) == (130, "")
    assert f"{output} holds the best accelerator so far; --resume" in found.err
    assert sorted(tmp_path.iterdir()) == [output, training_folder(output), text]
    there = {p.relative_to(output).as_posix() for p in output.rglob("*") if p.is_file()}
    assert there == set(FILES)
    assert multirate.load(model, output, dtype="float32", device="cpu").accelerator is not None
    assert json.loads((output / CONFIG_FILE).read_text())["expected_acceptance"]


def test_sigint_stops_a_running_generate(tmp_path: Path) -> None:
    model = save_model(tmp_path / "long", max_position_embeddings=100_000)
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "  # if ignored
        "from multirate.cli.main import main; main()"
    )
    arguments = [
        "generate", str(model), "abc", "--max-new-tokens", "90000", "--ignore-eos", *FAST,
        "--compile", "none",
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert process.stdout.read(3)  # it is generating
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, b"Interrupted.\n")
    assert out.endswith(b"\n")


def test_a_reader_that_has_gone_is_no_error(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", closefd=False) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        found = cli("generate", model, "abc", *NEW, *FAST)
        assert (found.code, found.err) == (1, "")
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, writer)  # for what is still in the file's buffer
    os.close(devnull)
    os.close(writer)


def test_a_defect_shows_its_traceback(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(Engine, "stream", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        cli("generate", model, "abc", *FAST)
