"""A tiny engine with a tokenizer and an accelerator, and prompt files for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tiny_models import VOCABULARY, tiny_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from multirate.config.accelerator import AcceleratorConfig
from multirate.decode.engine import Engine
from multirate.models.base import BaseModel
from multirate.streams.accelerator import Accelerator


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for every character."""
    vocabulary = {chr(33 + i): i for i in range(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="!"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    words = PreTrainedTokenizerFast(tokenizer_object=backend)
    words.chat_template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    return words


def make_engine() -> Engine:
    """A random float32 model, and a drafter that is right at times: its own layers, with noise."""
    base = BaseModel(tiny_model("llama"))
    base.config.name_or_path = "tiny"
    config = AcceleratorConfig(
        num_layers=base.num_layers,
        hidden_size=base.hidden_size,
        vocab_size=base.vocab_size,
        gates=(0, base.num_layers),
        entry="gate",
        layer_kind="tied",
        rank=2,
    )
    accelerator = Accelerator(config, base)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in accelerator.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return Engine(base, tokenizer=tokenizer(), accelerator=accelerator)


def write(folder: Path, *lines: Any) -> Path:
    """`p.jsonl` of JSON objects, or of lines as they are."""
    file = folder / "p.jsonl"
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    file.write_text("\n".join(texts), encoding="utf-8")
    return file
