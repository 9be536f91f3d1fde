"""The accelerator folder: how an accelerator is saved, loaded and shared.

    accelerator_config.json       its shape, and the base model it belongs to
    accelerator.safetensors       its weights and its draft vocabulary; nothing of the base model
    README.md                     model card
    custom_generate/generate.py   lets transformers' `generate` run it
    custom_generate/requirements.txt

A folder is there whole or not at all: it is written under another name and renamed. Loading trusts
nothing: whatever does not fit is an error before the first token.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors.torch import load, save
from torch import Tensor

from multirate.config.accelerator import AcceleratorConfig
from multirate.config.errors import MultirateError
from multirate.models import hf
from multirate.models.base import BaseModel
from multirate.models.loading import config_fingerprint
from multirate.streams import card
from multirate.streams.accelerator import Accelerator
from multirate.streams.defaults import DEFAULT, require_default

CONFIG_FILE = "accelerator_config.json"
WEIGHTS_FILE = "accelerator.safetensors"
GENERATE_FILE = "custom_generate/generate.py"
REQUIREMENTS_FILE = "custom_generate/requirements.txt"
FILES = (CONFIG_FILE, WEIGHTS_FILE, "README.md", GENERATE_FILE, REQUIREMENTS_FILE)

_NAMES_SHOWN = 3
_AGAIN = "Copy or download the folder again, or make it again with `multirate train`."


def save_accelerator(
    accelerator: Accelerator,
    path: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    license: str = "apache-2.0",
    command: str | None = None,
    overwrite: bool = False,
    name: str | None = None,
) -> Path:
    """Save an accelerator as a folder, whole or not at all.

    Args:
        accelerator: not changed.
        path: the folder to make; its parents are made too.
        dtype: of the trained weights in the file.
        license: of the accelerator, an identifier of the hub's list, for the model card.
        command: the command line that made it, for the model card.
        overwrite: replace an accelerator that is there. Anything else that is there is refused.
        name: what the model card's examples load; by default the folder.

    Returns:
        Path: the folder.

    Raises:
        MultirateError: the path is taken or cannot be written, or the weights are not finite. What
            was there before is there still.
    """
    target = Path(os.path.expanduser(path)).resolve()  # the folder is replaced, not a link to it
    try:
        require_free(target, overwrite=overwrite)
        contents = _contents(
            accelerator,
            dtype=dtype,
            license=license,
            command=command,
            name=name or f"./{target.name}",
        )
        target.parent.mkdir(parents=True, exist_ok=True)
        write_folder(target, contents)
    except OSError as error:
        raise MultirateError(
            f"Could not save the accelerator in {target}: {error.strerror or error}. Choose a folder "
            f"that you may write to, on a disk with room."
        ) from error
    return target


def load_accelerator(
    name: str | Path,
    base: BaseModel,
    *,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    **hub: Any,
) -> Accelerator:
    """Load an accelerator for the base model it was made for.

    Args:
        name: an accelerator folder, the hub id of one, or "default": the one that ships with
            multirate for this base model.
        base: the loaded base model.
        revision: branch, tag or commit on the hub.
        dtype: of the weights; None for the base model's, so that one forward pass never mixes two.
            Give float32 to train it further.
        hub: `token`, `cache_dir` or `local_files_only` of `huggingface_hub.snapshot_download`.

    Returns:
        Accelerator: in eval mode, on the base model's device.

    Raises:
        MultirateError: no such folder, hub id or default, a missing, damaged or incomplete file, weights
            that do not fit the config, or another base model.
    """
    model = base.config.name_or_path
    folder = find_folder(name, model=model, revision=revision, **hub)
    config = read_config(folder)
    require_base(config, base, folder=folder)
    file = folder / WEIGHTS_FILE
    tensors = _read_weights(file)
    with torch.random.fork_rng(devices=[]):  # initial weights are drawn: not from the user's
        accelerator = Accelerator(config, base)
    _require_fitting(tensors, accelerator.state_dict(), file)
    try:
        if "draft_ids" in tensors:
            accelerator.set_draft_ids(tensors["draft_ids"])
    except MultirateError as error:
        raise MultirateError(f"{file}: {error}") from None
    accelerator.load_state_dict(tensors)
    return accelerator.to(dtype=dtype or base.dtype).eval()


def push_accelerator(
    accelerator: Accelerator,
    repo_id: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    license: str = "apache-2.0",
    command: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    commit_message: str = "Upload multirate accelerator",
) -> str:
    """Upload an accelerator to the Hugging Face hub; its repository is made if it is not there.

    Args:
        accelerator: not changed.
        repo_id: `owner/name`, or `name` in your own space.
        dtype: as for `save_accelerator`.
        license: as for `save_accelerator`.
        command: as for `save_accelerator`.
        private: whether a new repository is private; None for the owner's default.
        revision: branch to commit to.
        token: access token; None for the one that `hf auth login` stored.
        commit_message: of the upload.

    Returns:
        str: address of the commit.

    Raises:
        MultirateError: the hub refused it or was not reached.
    """
    fix = "Check the name, the connection, and that you are logged in (hf auth login)."
    with hf.reading(f"Could not upload the accelerator to {repo_id}", fix=fix):
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        with tempfile.TemporaryDirectory() as parent:
            folder = save_accelerator(
                accelerator,
                Path(parent) / "accelerator",
                dtype=dtype,
                license=license,
                command=command,
                name=repo_id,
            )
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                revision=revision,
                commit_message=commit_message,
            )
    return str(commit.commit_url)


def find_folder(
    name: str | Path, *, model: str = "", revision: str | None = None, **hub: Any
) -> Path:
    """The local folder of an accelerator, downloaded first where `name` is a hub id.

    Args:
        name: folder, hub id or "default".
        model: name of the base model, which "default" depends on.
        revision: branch, tag or commit on the hub.
        hub: as for `load_accelerator`.

    Raises:
        MultirateError: there is no such folder, no such repository on the hub, or no default for
            the base model.
    """
    if name == DEFAULT:
        return require_default(model)
    path = Path(os.path.expanduser(name))  # Path.expanduser raises for an unknown ~user
    accepted = (
        "Give a folder that save_pretrained or `multirate train` made, or a hub id (owner/name)."
    )
    if path.is_dir() and str(name).strip():
        return path
    if path.is_file():
        raise MultirateError(f"{name} is a file, not an accelerator folder. {accepted}")
    if isinstance(name, Path) or not _is_hub_id(name):
        raise MultirateError(f"There is no accelerator folder {str(name)!r}. {accepted}")
    with hf.reading(
        f"There is no folder {name!r}, and the hub did not give that accelerator",
        fix=f"Check the name, the connection and your access rights. {accepted}",
    ):
        # With its code and card, so that the snapshot is a whole folder.
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(FILES), **hub))


def read_config(folder: Path) -> AcceleratorConfig:
    """The config of an accelerator folder.

    Raises:
        MultirateError: it is no accelerator folder, or the config is missing or damaged.
    """
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise MultirateError(
            f"{folder} is no accelerator folder: it has no {CONFIG_FILE}{_hint(folder)}"
        )
    with hf.reading(f"{file} is damaged", fix=_AGAIN):
        data = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise TypeError("it holds no JSON object")
        try:
            return AcceleratorConfig.from_dict(data)
        except MultirateError as error:
            raise MultirateError(f"{file}: {error}") from None


def require_base(config: AcceleratorConfig, base: BaseModel, *, folder: Path) -> None:
    """Check that a loaded model is the one an accelerator was made for.

    Raises:
        MultirateError: its config has another fingerprint.
    """
    loaded = config_fingerprint(base.config)
    if config.base_fingerprint in ("", loaded):  # without one, the shapes are all there is to check
        return
    wanted = config.base_model_name_or_path or "an unnamed model"
    name = base.config.name_or_path or "an unnamed model"
    raise MultirateError(
        f"The accelerator in {folder} was made for {wanted}, but the loaded model is {name}, which "
        f"has another config (fingerprint {loaded}, not {config.base_fingerprint}). Load {wanted}, "
        f"or make an accelerator for {name} with `multirate train`."
    )


def require_free(target: Path, *, overwrite: bool) -> None:
    """Check that saving at `target` destroys nothing but an accelerator that may be overwritten.

    Raises:
        MultirateError: it is a file, or a folder with anything else in it.
    """
    if not target.exists():
        return
    if not target.is_dir():
        raise MultirateError(
            f"{target} is a file. Choose another path for the accelerator's folder."
        )
    if not any(target.iterdir()):
        return
    if not (target / CONFIG_FILE).is_file():
        raise MultirateError(
            f"{target} is not empty and holds no accelerator, so it is left alone. Choose a new or "
            f"an empty folder."
        )
    there = {p.relative_to(target).as_posix() for p in target.rglob("*") if not p.is_dir()}
    foreign = sorted(there - set(FILES))
    if foreign:
        raise MultirateError(
            f"{target} holds an accelerator and other files ({_listed(foreign)}), which replacing "
            f"it would delete. Move them away, or choose another folder."
        )
    if not overwrite:
        raise MultirateError(
            f"{target} holds an accelerator already. Choose another folder, or ask for it to be "
            f"replaced (overwrite)."
        )


def _contents(
    accelerator: Accelerator, *, dtype: torch.dtype, license: str, command: str | None, name: str
) -> dict[str, bytes]:
    """Every file of the folder, by its name."""
    base, config = accelerator.base, accelerator.config
    config = dataclasses.replace(
        config,
        base_model_name_or_path=config.base_model_name_or_path or base.config.name_or_path or "",
        revision=config.revision or getattr(base.config, "_commit_hash", None),
        base_fingerprint=config_fingerprint(base.config),
        library_version=version("multirate"),
    )
    trained = {name for name, _ in accelerator.named_parameters()}
    tensors = {
        # Buffers are few numbers that all others are multiplied with, or ids: kept as they are.
        name: (tensor.to(dtype) if name in trained else tensor).cpu().contiguous()
        for name, tensor in accelerator.state_dict().items()
    }
    broken = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    if broken:
        raise MultirateError(
            f"The accelerator's weights are not finite in {dtype}: {_listed(broken)}. Nothing was "
            f"saved. Make it again, with a smaller learning rate if training made them so."
        )
    readme = card.model_card(
        config,
        name=name,
        license=license,
        num_parameters=accelerator.num_parameters(),
        command=command,
    )
    return {
        CONFIG_FILE: (json.dumps(config.to_dict(), indent=2) + "\n").encode(),
        WEIGHTS_FILE: save(tensors, metadata={"format": "pt"}),
        "README.md": readme.encode(),
        GENERATE_FILE: card.GENERATE_PY.encode(),
        REQUIREMENTS_FILE: card.requirements_txt(config.library_version).encode(),
    }


def write_folder(target: Path, contents: dict[str, bytes]) -> None:
    """Put a whole folder at `target`; whatever stops it, no half of one stays behind."""
    stamp = uuid.uuid4().hex[:8]
    new, old = (target.with_name(f".{target.name}.{stamp}.{kind}") for kind in ("new", "old"))
    try:
        for name, data in contents.items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            with open(new / name, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        if target.exists():
            target.rename(old)
        new.rename(target)
    finally:  # also on Ctrl-C
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def remove_leftovers(target: Path) -> None:
    """Remove what a save of `target` left beside it when its process was killed."""
    for kind in ("new", "old"):
        for path in target.parent.glob(f".{glob.escape(target.name)}.*.{kind}"):
            shutil.rmtree(path, ignore_errors=True)


def _read_weights(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise MultirateError(f"{file} is missing. {_AGAIN}")
    with hf.reading(f"Could not read {file}, which may be truncated or corrupt", fix=_AGAIN):
        return load(file.read_bytes())


def _require_fitting(tensors: dict[str, Tensor], expected: dict[str, Tensor], file: Path) -> None:
    """Check names, shapes, kinds and values of all tensors of a weights file."""
    shared = [name for name in expected if name in tensors]
    problems = {
        "it lacks": [name for name in expected if name not in tensors],
        "it has more than the config names": [name for name in tensors if name not in expected],
        "of another shape or type": [
            f"{name} {list(tensors[name].shape)}, not {list(expected[name].shape)}"
            for name in shared
            if tensors[name].shape != expected[name].shape
            or tensors[name].is_floating_point() != expected[name].is_floating_point()
        ],
        "not finite": [name for name in shared if not bool(tensors[name].isfinite().all())],
    }
    found = [f"{problem}: {_listed(names)}" for problem, names in problems.items() if names]
    if found:
        raise MultirateError(
            f"The weights in {file} do not fit {CONFIG_FILE}: {'; '.join(found)}. {_AGAIN}"
        )


def _hint(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return (
            ". It is a PEFT adapter: merge it into the base model with peft "
            "(merge_and_unload) and load the result as the model instead."
        )
    if (folder / "config.json").is_file():
        return ". It is a model: give it as the model, and an accelerator made for it here."
    return f". {_AGAIN}"


def _is_hub_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown}, ... ({len(names)} in all)"
