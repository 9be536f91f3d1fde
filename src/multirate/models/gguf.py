"""GGUF files, converted once to a Hugging Face folder and kept in a cache.

Reading a GGUF file through transformers takes tens of seconds even for a small model; the
converted folder loads in about one. Weights are dequantised to float32 and stay float32 on disk,
twice the room of bfloat16: dequantised values are not representable in bfloat16, and float32 runs
are the reference that everything lossless is checked against.

The cache, `${MULTIRATE_CACHE:-~/.cache/multirate}/converted`, holds finished folders only: a folder
is written under another name, its files and their sizes are listed in a manifest, and one rename
publishes it. A folder whose files do not match its manifest is made again.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sys
from contextlib import redirect_stderr
from pathlib import Path

import torch
from filelock import FileLock
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedTokenizerBase,
)

from multirate.models import hf
from multirate.models.cache import cache_root

# Part of every cache key: raise it whenever the same file has to convert to something else.
CONVERTER_VERSION = 1
MANIFEST = "multirate-conversion.json"


def cache_folder() -> Path:
    """Where converted models live."""
    return cache_root() / "converted"


def convert_gguf(path: Path, *, name: str | None = None) -> Path:
    """The Hugging Face folder for a GGUF file, converted now unless the cache has it.

    Safe against other processes doing the same: one converts, the others wait and use its result.

    Args:
        path: an existing `.gguf` file.
        name: what the cached folder and the model are called; the file's stem by default.

    Returns:
        Path: a folder `<name>-<key>` with config, float32 safetensors, tokenizer and generation
        config. The key stands for the file's content and the converter's version.

    Raises:
        MultirateError: the file is truncated, not GGUF, or not a supported causal language model,
            or the cache cannot be written.
    """
    name = name or path.stem
    with hf.reading(f"Could not read {path}", fix="Check that you may read the file."):
        digest = _digest(path)
    target = cache_folder() / f"{name}-{digest[:16]}"
    if _is_complete(target):
        return target
    with hf.reading(
        f"Could not write the converted model to {target.parent}",
        fix="Point MULTIRATE_CACHE to a writable folder with room for 4 bytes a weight.",
    ):
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name(f"{target.name}.lock")):
            if not _is_complete(target):
                _convert_into(target, path, name=name)
    return target


def _digest(path: Path) -> str:
    """Hex sha256 over the file's content and the converter's version."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(f"multirate converter {CONVERTER_VERSION}".encode())
    return digest.hexdigest()


def _is_complete(folder: Path) -> bool:
    """Whether every file that the manifest lists is there with its full size."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return all((folder / file).stat().st_size == size for file, size in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _convert_into(target: Path, path: Path, *, name: str) -> None:
    """Convert `path` and publish it as `target`. The caller holds the target's lock."""
    print(
        f"multirate: converting {path.name} to {target} (once; under a minute for a small model)",
        file=sys.stderr,
        flush=True,
    )
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
    partial.mkdir()
    try:
        # One of transformers' progress bars heeds no setting, so its stream is replaced.
        with hf.quiet(), redirect_stderr(io.StringIO()):
            _convert(path, partial, name=name)
        _write_manifest(partial, source=path.name)
        shutil.rmtree(target, ignore_errors=True)  # incomplete, or we would not be here
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert(path: Path, folder: Path, *, name: str) -> None:
    """Write config, dense float32 weights and tokenizer of a GGUF file into an empty folder."""
    source = str(path)
    place = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    with hf.reading(
        f"Could not read the GGUF file {path}",
        fix="If it is truncated or corrupt, copy or download it again.",
    ):
        pre_tokenizer = _metadata(path, "tokenizer.ggml.pre")
        config = AutoConfig.from_pretrained(**place)
        hf.require_supported(config, source=source)
        tokenizer = AutoTokenizer.from_pretrained(**place)
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            **place,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # listed by require_complete, by name
        )
    hf.require_complete(loading_info, source=source)

    # The model is dense now, yet still marked as quantised, which save_pretrained refuses.
    model.hf_quantizer = None
    model.is_quantized = False
    for attribute in ("quantization_config", "_model_name_or_path"):
        if hasattr(model.config, attribute):
            delattr(model.config, attribute)
    model.config.name_or_path = model.name_or_path = name

    _restore_pre_tokenizer(tokenizer, pre_tokenizer)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _metadata(path: Path, key: str) -> object:
    """One metadata value of a GGUF file, None where it has no such key."""
    field = GGUFReader(path).get_field(key)
    return None if field is None else field.contents()


def _restore_pre_tokenizer(tokenizer: PreTrainedTokenizerBase, kind: object) -> None:
    """Split text as the original tokenizer does, where transformers' conversion does not.

    SmolLM's tokenizer takes digits out one by one before the GPT-2 split; transformers builds only
    the latter. They differ on runs of spaces before a digit ("  1") and on numerals beyond 0-9.
    """
    if kind == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )


def _write_manifest(folder: Path, *, source: str) -> None:
    """List the folder's files with their sizes, once all of them are on disk."""
    files = {}
    for file in sorted(folder.iterdir()):
        # A rename may reach the disk before the data it publishes, were the machine to stop now.
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
        files[file.name] = file.stat().st_size
    manifest = {"source": source, "converter_version": CONVERTER_VERSION, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
