"""The accelerator folder: what is saved comes back, and every mistake has its message."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from multirate.config.accelerator import AcceleratorConfig, preset_config
from multirate.config.errors import MultirateError
from multirate.models.base import BaseModel
from multirate.models.loading import config_fingerprint
from multirate.streams import folder as folder_module
from multirate.streams.accelerator import Accelerator
from multirate.streams.folder import CONFIG_FILE, FILES, WEIGHTS_FILE

LEAN = {"entry": "gate", "layer_kind": "lean", "gates": (0, 2, 4), "num_heads": 2}
TIED = {"entry": "gate", "layer_kind": "tied", "gates": (1, 3)}


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return tiny_base()


def tiny_base(name: str = "owner/tiny", **changes: Any) -> BaseModel:
    model = tiny_model("llama", **changes)
    model.config.name_or_path = name
    return BaseModel(model)


def make(base: BaseModel, **changes: Any) -> Accelerator:
    """An accelerator whose every number differs from where it starts."""
    fields = {"rank": 3, "draft_vocab_size": 40, "expected_acceptance": (0.5, 0.4), **changes}
    preset = "paper" if fields.get("layer_kind") == "lean" else "carry"
    if fields.get("entry") == "gate":
        fields["carry_layers"] = ()
    config = preset_config(
        preset,
        num_layers=base.num_layers,
        hidden_size=base.hidden_size,
        vocab_size=base.vocab_size,
        num_attention_heads=4,
        **fields,
    )
    accelerator = Accelerator(config, base)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in accelerator.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        for name, buffer in accelerator.named_buffers():
            if buffer.is_floating_point():
                assert name.endswith("scale")
                buffer.copy_(0.1 + torch.rand(buffer.shape, generator=generator))
    if config.draft_vocab_size is not None:
        ids = torch.randperm(base.vocab_size, generator=generator)[: config.draft_vocab_size]
        accelerator.set_draft_ids(ids)
    return accelerator


@pytest.fixture
def saved(base: BaseModel, tmp_path: Path) -> Path:
    return make(base).save_pretrained(tmp_path / "accelerator", dtype=torch.float32)


@pytest.fixture
def nan_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """New accelerators hold NaN only, so that a number that was not loaded shows."""
    initialise = Accelerator.__init__

    def start_as_nan(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        with torch.no_grad():
            for tensor in self.state_dict().values():
                tensor.fill_(float("nan") if tensor.is_floating_point() else -1)

    monkeypatch.setattr(Accelerator, "__init__", start_as_nan)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def contents(folder: Path) -> dict[str, bytes]:
    files = (p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / CONFIG_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS_FILE)


# ------------------------------------------------------------------------------ round trips


@pytest.mark.usefixtures("nan_start")
@pytest.mark.parametrize(
    "changes",
    [{}, {"draft_vocab_size": None}, LEAN, TIED],
    ids=["carry", "all-ids", "lean", "tied"],
)
def test_what_is_saved_comes_back(base: BaseModel, tmp_path: Path, changes: dict[str, Any]) -> None:
    accelerator = make(base, **changes)
    accelerator.save_pretrained(tmp_path / "a", dtype=torch.float32)
    loaded = Accelerator.from_pretrained(tmp_path / "a", base)
    expected, found = accelerator.state_dict(), loaded.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert not loaded.training
    assert ("draft_ids" in found) == (changes.get("draft_vocab_size", 40) is not None)


@pytest.mark.usefixtures("nan_start")
def test_a_loaded_accelerator_drafts_as_before(base: BaseModel, tmp_path: Path) -> None:
    accelerator = make(base, **TIED)
    accelerator.save_pretrained(tmp_path / "a", dtype=torch.float32)
    loaded = Accelerator.from_pretrained(str(tmp_path / "a"), base)
    ids, block = torch.tensor([[5, 6, 7]]), base.block([0], 3)

    def logits(stream: Accelerator) -> torch.Tensor:
        arena = base.arena(rows=1, max_len=3)
        return stream.advance(stream.enter(ids, None, block, arena), block, arena, None)  # type: ignore[arg-type]

    with torch.no_grad():
        assert torch.equal(logits(loaded), logits(accelerator))


def test_trained_weights_are_stored_in_the_type_asked_for(base: BaseModel, tmp_path: Path) -> None:
    accelerator = make(base)
    accelerator.save_pretrained(tmp_path / "a")
    stored = load_file(tmp_path / "a" / WEIGHTS_FILE)
    trained = dict(accelerator.named_parameters())
    assert {stored[name].dtype for name in trained} == {torch.bfloat16}
    assert torch.equal(stored["entry.first.scale"], accelerator.entry.first.scale)  # type: ignore[union-attr]
    loaded = Accelerator.from_pretrained(tmp_path / "a", base)
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, trained[name].bfloat16().float())


def test_loaded_weights_have_the_base_models_type_unless_another_is_asked_for(saved: Path) -> None:
    base = BaseModel(tiny_model("llama").bfloat16())

    def dtypes(**options: Any) -> set[torch.dtype]:
        state = Accelerator.from_pretrained(saved, base, **options).state_dict()
        assert state.pop("draft_ids").dtype == torch.long
        return {tensor.dtype for tensor in state.values()}

    assert dtypes() == {torch.bfloat16}
    assert dtypes(dtype=torch.float32) == {torch.float32}


def test_the_config_says_what_it_belongs_to(base: BaseModel, saved: Path) -> None:
    config = AcceleratorConfig.from_dict(json.loads((saved / CONFIG_FILE).read_text()))
    assert config.base_model_name_or_path == "owner/tiny"
    assert config.base_fingerprint == config_fingerprint(base.config)
    assert config.library_version == version("multirate")
    assert config.expected_acceptance == (0.5, 0.4)
    assert Accelerator.from_pretrained(saved, base).config == config


def test_a_base_model_named_before_keeps_its_name(base: BaseModel, tmp_path: Path) -> None:
    accelerator = make(base, base_model_name_or_path="owner/other", revision="abc")
    config = json.loads((accelerator.save_pretrained(tmp_path / "a") / CONFIG_FILE).read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("owner/other", "abc")


def test_loading_leaves_the_random_numbers_alone(base: BaseModel, saved: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    Accelerator.from_pretrained(saved, base)
    assert torch.equal(torch.rand(4), expected)


# ------------------------------------------------------------------------------ the model card


def test_the_model_card_has_the_hubs_metadata(base: BaseModel, tmp_path: Path) -> None:
    folder = make(base).save_pretrained(
        tmp_path / "fast", license="mit", command="multirate train owner/tiny --data a.jsonl"
    )
    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "multirate"
    assert (card.data.base_model, card.data.license) == ("owner/tiny", "mit")
    assert {"m2r2", "speculative-decoding", "custom_generate"} <= set(card.data.tags)
    assert 'custom_generate="./fast", trust_remote_code=True' in card.content
    assert "multirate train owner/tiny --data a.jsonl" in card.content
    assert "probability 0.50, 0.40" in card.content
    assert "1.70 tokens a step with 2 drafts" in card.content  # 1 + 0.5 + 0.5 * 0.4
    assert f"{make(base).num_parameters():,}" in card.content


@pytest.mark.parametrize("name", ["/data/models/tiny", "./tiny", "tiny", ""])
def test_a_local_name_is_no_hub_metadata(name: str, tmp_path: Path) -> None:
    folder = make(tiny_base(name)).save_pretrained(tmp_path / "a")
    assert ModelCard.load(folder / "README.md").data.base_model is None


def test_the_embedded_model_has_a_hub_id(tmp_path: Path) -> None:
    folder = make(tiny_base("smollm2-135m")).save_pretrained(tmp_path / "a")
    card = ModelCard.load(folder / "README.md")
    assert card.data.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "multirate generate smollm2-135m" in card.content


# ------------------------------------------------------------------------------ where to save


def test_a_folder_holds_these_files_and_its_parents_are_made(
    base: BaseModel, tmp_path: Path
) -> None:
    folder = make(base).save_pretrained(tmp_path / "new" / "parents" / "a")
    assert contents(folder).keys() == set(FILES)
    assert [p.name for p in folder.parent.iterdir()] == ["a"]
    usual = tmp_path / "usual"
    usual.mkdir()
    assert folder.stat().st_mode == usual.stat().st_mode


def test_an_empty_folder_is_used(base: BaseModel, tmp_path: Path) -> None:
    make(base).save_pretrained(tmp_path)
    assert contents(tmp_path).keys() == set(FILES)


def test_an_accelerator_is_replaced_only_if_asked(base: BaseModel, saved: Path) -> None:
    before = contents(saved)
    with pytest.raises(MultirateError, match="holds an accelerator already"):
        make(base, rank=2).save_pretrained(saved)
    assert contents(saved) == before
    make(base, rank=2).save_pretrained(saved, overwrite=True)
    assert Accelerator.from_pretrained(saved, base).config.rank == 2
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]


def test_a_link_stays_a_link(base: BaseModel, saved: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(saved)
    make(base, rank=2).save_pretrained(link, overwrite=True)
    assert link.is_symlink()
    assert Accelerator.from_pretrained(saved, base).config.rank == 2


@pytest.mark.parametrize("overwrite", [False, True])
def test_anything_else_is_never_replaced(base: BaseModel, tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(MultirateError, match=r"not empty and holds no accelerator.*empty folder"):
        make(base).save_pretrained(tmp_path, overwrite=overwrite)
    assert contents(tmp_path) == {"thesis.txt": b"years of work"}


def test_other_files_beside_an_accelerator_are_kept(base: BaseModel, saved: Path) -> None:
    (saved / ".git").mkdir()
    (saved / ".git" / "HEAD").write_text("ref")
    before = contents(saved)
    with pytest.raises(MultirateError, match=r"other files \(\.git/HEAD\).*Move them"):
        make(base).save_pretrained(saved, overwrite=True)
    assert contents(saved) == before


def test_a_path_that_is_a_file_is_refused(base: BaseModel, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("text")
    with pytest.raises(MultirateError, match=r"file is a file. Choose another path"):
        make(base).save_pretrained(file, overwrite=True)
    with pytest.raises(MultirateError, match=r"Could not save .*file/below.* Choose a folder"):
        make(base).save_pretrained(file / "below")
    assert contents(tmp_path) == {"file": b"text"}


def failing(error: BaseException, at: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, but its call number `at` (from 0) raises."""
    calls = iter(range(10**6))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at:
            raise error
        return function(*args, **kwargs)

    return call


FAILURES: list[tuple[BaseException, str]] = [
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), r"No space left.*disk with room"),
    (PermissionError(errno.EACCES, os.strerror(errno.EACCES)), r"denied.*may write to"),
    (KeyboardInterrupt(), ""),
]


@pytest.fixture(params=FAILURES, ids=["disk-full", "unwritable", "ctrl-c"])
def failure(request: pytest.FixtureRequest) -> tuple[BaseException, Any]:
    error, message = request.param
    if isinstance(error, KeyboardInterrupt):
        return error, pytest.raises(KeyboardInterrupt)
    return error, pytest.raises(MultirateError, match=message)


@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_save_that_fails_leaves_nothing(
    base: BaseModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: tuple[BaseException, Any],
    at: int,
) -> None:
    monkeypatch.setattr(os, "fsync", failing(failure[0], at, os.fsync))
    with failure[1] as raised:
        make(base).save_pretrained(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
    if isinstance(raised.value, MultirateError):
        assert str(tmp_path / "a") in str(raised.value)


@pytest.mark.parametrize("function", ["os.fsync", "pathlib.Path.rename"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_replacement_that_fails_keeps_the_old_one(
    base: BaseModel,
    saved: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: tuple[BaseException, Any],
    function: str,
    at: int,
) -> None:
    before = contents(saved)
    real = os.fsync if function == "os.fsync" else Path.rename
    monkeypatch.setattr(function, failing(failure[0], at, real))
    with failure[1]:
        make(base, rank=2).save_pretrained(saved, overwrite=True)
    assert contents(saved) == before
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]


def test_weights_that_are_not_finite_are_not_saved(base: BaseModel, tmp_path: Path) -> None:
    accelerator = make(base)
    with torch.no_grad():
        accelerator.entry.first.linear.bias[0] = 1e6  # type: ignore[union-attr, index]
    with pytest.raises(MultirateError, match=r"not finite in torch.float16: entry.first.linear.bi"):
        accelerator.save_pretrained(tmp_path / "a", dtype=torch.float16)
    assert list(tmp_path.iterdir()) == []
    accelerator.save_pretrained(tmp_path / "a", dtype=torch.bfloat16)


# ------------------------------------------------------------------------------ loading mistakes


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.pop(name)  # type: ignore[return-value]


def put(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[1] = float("nan")
    return tensor


def with_first_id(value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda ids: torch.cat([torch.tensor([value]), ids[1:]])


BIAS = "entry.first.linear.bias"


@pytest.mark.usefixtures("nan_start")
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop(BIAS), rf"it lacks: {BIAS}\."),
        (drop("draft_ids"), r"it lacks: draft_ids\."),
        (lambda tensors: tensors.clear(), r"it lacks: draft_ids, .* \(\d\d in all\)"),
        (lambda t: t.update(stranger=torch.ones(2)), r"more than the config names: stranger\."),
        (put(BIAS, lambda t: t[1:]), rf"another shape or type: {BIAS} \[31\], not \[32\]"),
        (put(BIAS, lambda t: t.long()), rf"another shape or type: {BIAS}"),
        (put(BIAS, with_nan), rf"not finite: {BIAS}"),
        (put("draft_ids", with_first_id(97)), r"draft vocabulary names token 97, outside .* 97"),
        (put("draft_ids", with_first_id(-1)), r"draft vocabulary names token -1, outside"),
        (put("draft_ids", lambda t: torch.cat([t[1:2], t[1:]])), r"names a token twice"),
        (put("draft_ids", lambda t: t[1:]), r"draft_ids \[39\], not \[40\]"),
        (put("draft_ids", lambda t: t.float()), r"another shape or type: draft_ids"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    base: BaseModel, saved: Path, edit: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    edit_weights(saved, edit)
    with pytest.raises(MultirateError, match=message) as raised:
        Accelerator.from_pretrained(saved, base)
    assert str(saved / WEIGHTS_FILE) in str(raised.value)
    assert "multirate train" in str(raised.value)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_weights_are_an_error(base: BaseModel, saved: Path, keep: int) -> None:
    file = saved / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(MultirateError, match=r"accelerator\.safetensors, which may be truncated"):
        Accelerator.from_pretrained(saved, base)


def test_corrupt_weights_are_an_error(base: BaseModel, saved: Path) -> None:
    file = saved / WEIGHTS_FILE
    data = bytearray(file.read_bytes())
    data[8:20] = b"not a header"
    file.write_bytes(data)
    with pytest.raises(MultirateError, match=r"accelerator\.safetensors, which may be .* corrupt"):
        Accelerator.from_pretrained(saved, base)


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_missing_file_is_named(base: BaseModel, saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(MultirateError, match=rf"{name}.*multirate train"):
        Accelerator.from_pretrained(saved, base)


@pytest.mark.parametrize("text", ["", "{", '"text"', "[1]", "\x00\xff"])
def test_a_damaged_config_is_an_error(base: BaseModel, saved: Path, text: str) -> None:
    (saved / CONFIG_FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(MultirateError, match=rf"{CONFIG_FILE} is damaged: .*again"):
        Accelerator.from_pretrained(saved, base)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "rank=0 must be"),
        ({"entry": "door"}, "entry='door' is not known"),
        ({"gates": 3}, "wrong type"),
        ({"gates": [3, 1]}, "gates"),
        ({"draft_vocab_size": 98}, "draft_vocab_size=98 must be from 1 to 97"),
    ],
)
def test_a_config_value_that_is_not_allowed_is_named_with_its_file(
    base: BaseModel, saved: Path, changes: dict[str, object], message: str
) -> None:
    edit_config(saved, **changes)
    with pytest.raises(MultirateError, match=message) as raised:
        Accelerator.from_pretrained(saved, base)
    assert str(saved / CONFIG_FILE) in str(raised.value)


def test_another_base_model_is_refused_by_name(saved: Path) -> None:
    other = tiny_base("owner/other", rms_norm_eps=1e-3)  # of the same shape
    with pytest.raises(
        MultirateError,
        match=r"made for owner/tiny, but the loaded model is owner/other.*owner/tiny",
    ):
        Accelerator.from_pretrained(saved, other)
    edit_config(saved, base_fingerprint="")  # nothing left to tell them apart by
    Accelerator.from_pretrained(saved, other)


def test_without_a_fingerprint_the_shapes_must_agree(saved: Path) -> None:
    edit_config(saved, base_fingerprint="")
    with pytest.raises(MultirateError, match=r"hidden_size=32, but the loaded model has 64"):
        Accelerator.from_pretrained(saved, tiny_base(hidden_size=64))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["adapter_config.json", "adapter_model.safetensors"], "PEFT adapter: merge it"),
        (["config.json", "model.safetensors"], "It is a model: give it as the model"),
        ([], "multirate train"),
    ],
)
def test_a_folder_of_another_kind_says_what_it_is(
    base: BaseModel, tmp_path: Path, files: list[str], message: str
) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(MultirateError, match=rf"is no accelerator folder.*{message}"):
        Accelerator.from_pretrained(tmp_path, base)


@pytest.mark.parametrize("name", ["accelerator", "./accelerator", "a/b/c", "", "~nobody-here/a"])
def test_a_folder_that_is_not_there_is_an_error(base: BaseModel, name: str) -> None:
    with pytest.raises(MultirateError, match="There is no accelerator folder"):
        Accelerator.from_pretrained(name, base)
    with pytest.raises(MultirateError, match="There is no accelerator folder"):
        Accelerator.from_pretrained(Path("owner/name"), base)


def test_a_file_is_no_folder(base: BaseModel, saved: Path) -> None:
    with pytest.raises(MultirateError, match="is a file, not an accelerator folder"):
        Accelerator.from_pretrained(saved / WEIGHTS_FILE, base)


# ------------------------------------------------------------------------------ the hub


@pytest.fixture
def hub_cache(
    saved: Path, tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--owner--fast"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    saved.rename(repository / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    yield commit


@pytest.mark.usefixtures("nan_start")
def test_a_hub_id_is_loaded(base: BaseModel, hub_cache: str) -> None:
    for revision in (None, "main", hub_cache):
        loaded = Accelerator.from_pretrained("owner/fast", base, revision=revision)
        assert all(bool(t.isfinite().all()) for t in loaded.state_dict().values())


@pytest.mark.usefixtures("offline")
def test_a_hub_id_that_is_not_there_says_so(base: BaseModel) -> None:
    with pytest.raises(MultirateError, match=r"no folder 'owner/none', and the hub .*connection"):
        Accelerator.from_pretrained("owner/none", base)


class FakeHub:
    """Stands in for `HfApi`: keeps what would be uploaded."""

    def __init__(self, token: Any = None) -> None:
        self.token = token
        hubs.append(self)

    def create_repo(self, repo_id: str, **options: Any) -> Any:
        self.created = options
        return SimpleNamespace(repo_id=f"owner/{repo_id}" if "/" not in repo_id else repo_id)

    def upload_folder(self, *, folder_path: Path, **options: Any) -> Any:
        self.files, self.uploaded = contents(Path(folder_path)), options
        return SimpleNamespace(commit_url="https://huggingface.co/owner/fast/commit/1")


hubs: list[FakeHub] = []


def test_the_whole_folder_is_uploaded(
    base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "HfApi", FakeHub)
    accelerator = make(base)
    address = accelerator.push_to_hub("fast", private=True, token="secret", dtype=torch.float32)
    hub = hubs.pop()
    assert address == "https://huggingface.co/owner/fast/commit/1"
    assert (hub.token, hub.created) == ("secret", {"private": True, "exist_ok": True})
    assert hub.uploaded["repo_id"] == "owner/fast"
    assert hub.files.keys() == set(FILES)
    assert b'custom_generate="owner/fast"' in hub.files["README.md"]
    assert b"secret" not in b"".join(hub.files.values())
    for name, data in hub.files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    loaded = Accelerator.from_pretrained(tmp_path, base).state_dict()
    assert all(torch.equal(loaded[k], tensor) for k, tensor in accelerator.state_dict().items())


def test_an_upload_that_fails_says_what_to_do(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: FakeHub, repo_id: str, **options: Any) -> None:
        raise ConnectionError("no route to host\nmore")

    monkeypatch.setattr(folder_module, "HfApi", FakeHub)
    monkeypatch.setattr(FakeHub, "create_repo", refuse)
    with pytest.raises(MultirateError, match=r"owner/fast: no route to host\. .*hf auth login"):
        make(base).push_to_hub("owner/fast")
