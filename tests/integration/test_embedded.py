"""The embedded model: right weights, right tokenizer, quick to load again."""

import gguf
import pytest
import torch
from gguf.quants import dequantize

from multirate.models.embedded import EMBEDDED_NAME, embedded_gguf
from multirate.models.gguf import convert_gguf
from multirate.models.loading import LoadedModel, load_pretrained, require_chat_template

pytestmark = pytest.mark.real

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def embedded() -> LoadedModel:
    return load_pretrained(EMBEDDED_NAME, dtype="float32", device="cpu")


def test_what_is_loaded(embedded: LoadedModel) -> None:
    config = embedded.model.config
    assert embedded.source == embedded.model.name_or_path == config.name_or_path == EMBEDDED_NAME
    assert (config.num_hidden_layers, config.hidden_size) == (30, 576)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert embedded.model.generation_config.eos_token_id == 2
    assert embedded.model.num_parameters() == 134_515_008


def test_it_is_converted_only_once(
    embedded: LoadedModel, capfd: pytest.CaptureFixture[str]
) -> None:
    assert load_pretrained(EMBEDDED_NAME, device="cpu").model.dtype == torch.bfloat16
    assert capfd.readouterr() == ("", "")
    folder = convert_gguf(embedded_gguf(), name=EMBEDDED_NAME)
    assert folder.name == f"{EMBEDDED_NAME}-{embedded.revision}"


def test_weights_are_the_dequantised_ones(embedded: LoadedModel) -> None:
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(embedded_gguf()).tensors}
    layer = embedded.model.model.layers[29]
    for name, weight in {
        "token_embd.weight": embedded.model.model.embed_tokens.weight,  # Q8_0
        "blk.29.ffn_down.weight": layer.mlp.down_proj.weight,  # Q4_1
        "blk.29.attn_norm.weight": layer.input_layernorm.weight,  # float32
    }.items():
        expected = dequantize(tensors[name].data, tensors[name].tensor_type)
        assert torch.equal(weight, torch.tensor(expected)), name


def test_it_answers(embedded: LoadedModel) -> None:
    tokenizer = embedded.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = embedded.model.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_chat_template(embedded: LoadedModel) -> None:
    require_chat_template(embedded.tokenizer)
    assert embedded.tokenizer is not None
    text = embedded.tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, tokenize=False
    )
    assert text == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = embedded.tokenizer(text).input_ids
    assert [ids.count(i) for i in (1, 2)] == [3, 2]
    assert embedded.tokenizer.decode(ids) == text


def test_special_tokens(embedded: LoadedModel) -> None:
    tokenizer = embedded.tokenizer
    assert tokenizer is not None
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer("<|endoftext|><|im_start|><|im_end|>").input_ids == [0, 1, 2]
    assert tokenizer.decode([1, 2, 0], skip_special_tokens=True) == ""
    assert tokenizer.model_max_length == 8192


def test_digits_are_split_one_by_one(embedded: LoadedModel) -> None:
    tokenizer = embedded.tokenizer
    assert tokenizer is not None
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]
    # Without digits taken out first the spaces would be split from each other: "Ġ", "Ġ", "4".
    assert tokenizer.tokenize("x =  42") == ["x", "Ġ=", "ĠĠ", "4", "2"]


@pytest.mark.parametrize(
    "text", ["Hello , world !", " leading", "naïve café — 東京 🙂", "a\n\n  b\tc", "I'll don't"]
)
def test_text_survives_the_round_trip(embedded: LoadedModel, text: str) -> None:
    assert embedded.tokenizer is not None
    assert embedded.tokenizer.decode(embedded.tokenizer(text).input_ids) == text
