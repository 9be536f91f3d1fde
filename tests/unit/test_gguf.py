"""GGUF conversion and its cache, on a two-layer Llama written as GGUF here."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from multirate.config.errors import MultirateError
from multirate.models import gguf as conversion
from multirate.models.gguf import MANIFEST, cache_folder, convert_gguf
from multirate.models.loading import LoadedModel, config_fingerprint, load_pretrained

BYTES = list(bytes_to_unicode().values())
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *BYTES, "ĠĠ", "he"]
MERGES = ["Ġ Ġ", "h e"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"

HF_TO_GGUF = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 5e4},
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's rotary layout of a query or key projection `[heads * head_dim, D]`."""
    halves = weight.view(heads, 2, -1, weight.shape[-1])
    return halves.transpose(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    leave_out: str = "nothing",
) -> Path:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("a name given by its maker")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    for layer in range(config.num_hidden_layers):
        for ours, theirs in HF_TO_GGUF.items():
            names[f"model.layers.{layer}.{ours}.weight"] = f"blk.{layer}.{theirs}.weight"
    for name, tensor in model.state_dict().items():
        target = names[name]
        if leave_out in target:
            continue
        kind = target.split(".")[-2]
        weight = interleave(tensor, heads[kind]) if kind in heads else tensor
        writer.add_tensor(target, weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MULTIRATE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "converted"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny_llama())


def load(file: Path) -> LoadedModel:
    return load_pretrained(file, dtype="float32", device="cpu")


def test_the_weights_arrive_exactly(file: Path) -> None:
    expected, loaded = tiny_llama(), load(file)
    state = loaded.model.state_dict()
    assert all(torch.equal(state[k], v) for k, v in expected.state_dict().items())
    assert config_fingerprint(loaded.model.config) == config_fingerprint(expected.config)
    ids = torch.arange(12)[None]
    assert torch.equal(loaded.model(ids).logits, expected(ids).logits)


def test_the_model_is_plain_and_can_be_saved_again(file: Path, tmp_path: Path) -> None:
    loaded = load(file)
    assert loaded.source == loaded.model.name_or_path == str(file)
    assert loaded.revision is not None and loaded.revision in convert_gguf(file).name
    assert not hasattr(loaded.model.config, "quantization_config")
    assert "given by its maker" not in loaded.model.config.to_json_string()
    loaded.model.save_pretrained(tmp_path / "again")
    assert load_pretrained(tmp_path / "again", dtype="auto").model.dtype == torch.float32


def test_the_tokenizer_arrives_with_template_and_special_tokens(file: Path) -> None:
    tokenizer = load(file).tokenizer
    assert tokenizer is not None
    assert tokenizer.eos_token_id == 2
    assert tokenizer.model_max_length == 64
    messages = [{"role": "user", "content": "he"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<|im_start|>he<|im_end|>"
    ids = tokenizer(text).input_ids
    assert ids == [1, TOKENS.index("he"), 2]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "he"


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["ĠĠ", "1", "2", "3", "4", "Ġ", "5"]),
        ("gpt-2", ["Ġ", "Ġ", "1", "2", "3", "4", "Ġ", "5"]),
    ],
)
def test_digits_are_taken_out_before_the_split(
    tmp_path: Path, pre: str, expected: list[str]
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), pre=pre)
    tokenizer = load(file).tokenizer
    assert tokenizer is not None
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]
    assert tokenizer.tokenize("  1234 5") == expected


def test_the_file_is_converted_once_and_says_so(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = convert_gguf(file)
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and "converting tiny.gguf" in err
    written = (folder / "model.safetensors").stat()
    assert convert_gguf(file) == folder
    assert (folder / "model.safetensors").stat() == written
    assert capfd.readouterr() == ("", "")


def test_the_key_is_content_and_converter_not_path(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = convert_gguf(file)
    moved = file.rename(tmp_path / "renamed.gguf")
    assert convert_gguf(moved, name="tiny") == first
    monkeypatch.setattr(conversion, "CONVERTER_VERSION", -1)
    assert convert_gguf(moved, name="tiny") != first


def test_racing_conversions_do_the_work_once(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: convert_gguf(file), range(4)))
    assert len(folders) == 1
    assert capfd.readouterr().err.count("converting") == 1
    assert load(file).model.num_parameters() == tiny_llama().num_parameters()


@pytest.mark.parametrize("victim", ["model.safetensors", "tokenizer.json", MANIFEST])
@pytest.mark.parametrize("damage", ["truncated", "gone"])
def test_a_damaged_cache_is_made_again(file: Path, victim: str, damage: str) -> None:
    broken = convert_gguf(file) / victim
    intact = broken.read_bytes()
    if damage == "gone":
        broken.unlink()
    else:
        os.truncate(broken, len(intact) - 1 if victim != MANIFEST else 20)
    state = load(file).model.state_dict()
    assert broken.read_bytes() == intact
    assert all(torch.equal(state[k], v) for k, v in tiny_llama().state_dict().items())


def test_an_interrupted_conversion_leaves_nothing(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(folder: Path, *, source: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_write_manifest", interrupt)
        with pytest.raises(KeyboardInterrupt):
            convert_gguf(file)
    assert not [path for path in cache.iterdir() if path.is_dir()]
    assert (convert_gguf(file) / MANIFEST).is_file()


def test_leftovers_of_a_killed_conversion_are_swept(file: Path, cache: Path) -> None:
    folder = convert_gguf(file)
    (folder / MANIFEST).unlink()
    partial = folder.rename(f"{folder}.partial")
    (partial / "stray").touch()
    assert not (convert_gguf(file) / "stray").exists()
    assert [path for path in cache.iterdir() if path.is_dir()] == [folder]


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.05, 0.5, 0.999])
def test_a_truncated_file_is_named(file: Path, cache: Path, share: float) -> None:
    os.truncate(file, int(file.stat().st_size * share))
    with pytest.raises(MultirateError, match=r"GGUF file .*tiny\.gguf.*download it again"):
        load(file)
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_garbage_is_not_gguf(file: Path) -> None:
    file.write_bytes(b"not a model" * 100)
    with pytest.raises(MultirateError, match=r"GGUF file .*tiny\.gguf.*download it again"):
        load(file)


def test_missing_tensors_are_not_made_up(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), leave_out="blk.1.ffn_up")
    with pytest.raises(MultirateError, match=r"do not fit.*1 are.*layers\.1\.mlp\.up_proj"):
        load(file)


def test_an_unsupported_architecture_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), architecture="gpt2")
    with pytest.raises(MultirateError, match=r"gpt2.*llama, mistral"):
        load(file)


def test_an_unwritable_cache_names_the_variable(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MULTIRATE_CACHE", str(file))  # a file is where the folder should be
    with pytest.raises(MultirateError, match="MULTIRATE_CACHE"):
        load(file)


@pytest.mark.skipif(sys.platform == "win32", reason="home folders are found in another way")
def test_the_cache_is_in_the_home_folder_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MULTIRATE_CACHE")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path("/home/somebody/.cache/multirate/converted")
