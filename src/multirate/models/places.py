"""Where a model is that is named by a hub id, a local folder, a `.gguf` file, or `smollm2-135m`."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoConfig, PreTrainedConfig

from multirate.config.errors import MultirateError
from multirate.models import hf
from multirate.models.architectures import SUPPORTED_MODEL_TYPES
from multirate.models.embedded import EMBEDDED_NAME, embedded_gguf
from multirate.models.gguf import convert_gguf

ACCEPTED = (
    "a Hugging Face hub id (owner/name), a local folder with config.json, a .gguf file, or "
    f"{EMBEDDED_NAME} (the embedded model)"
)
_ALIKE = 0.8  # as difflib counts; a mistyped letter or two


@dataclass(frozen=True)
class Place:
    """Where a named model is: in a folder, or without one on the hub.

    Attributes:
        source: the model as it was named.
        folder: with its files in transformers' format.
        revision: hub commit, or content key of a GGUF file; None for a plain folder.
        converted: whether the folder was made of a GGUF file, and lies in our cache.
    """

    source: str
    folder: Path | None = None
    revision: str | None = None
    converted: bool = False

    @property
    def location(self) -> str:
        """What transformers is asked for."""
        return str(self.folder or self.source)

    @property
    def hub_revision(self) -> str:
        """The commit to read from the hub; folders have none."""
        return self.revision if self.revision and self.folder is None else "main"

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The model's config, read once.

        Raises:
            MultirateError: it cannot be read.
        """
        what = _not_on_hub(self.source)
        if self.folder is not None:
            what = f"Could not read {self.folder / 'config.json'}"
        with (
            hf.quiet(progress_bars=self.folder is None),
            hf.reading(
                what,
                fix="Copy or download the model again. "
                f"Supported model types: {', '.join(SUPPORTED_MODEL_TYPES)}.",
            ),
        ):
            return AutoConfig.from_pretrained(
                self.location, revision=self.hub_revision, trust_remote_code=False
            )


def locate(model: str | Path | Place) -> Place:
    """Find out which of the accepted forms a model's name has; a GGUF file is converted now.

    Raises:
        MultirateError: no such model, its file cannot be converted, or the hub does not give it.
    """
    if isinstance(model, Place):
        return model
    source = str(model)
    if model == EMBEDDED_NAME:
        return _converted(source, convert_gguf(embedded_gguf(), name=EMBEDDED_NAME))
    path = Path(os.path.expanduser(source))  # Path.expanduser raises for an unknown ~user
    if path.is_dir() and source.strip():
        if not (path / "config.json").is_file():
            raise MultirateError(_no_config(path))
        return Place(source, path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise MultirateError(f"{source} is a file, but not a .gguf file. Give {ACCEPTED}.")
        return _converted(source, convert_gguf(path))
    # The hub has no names like it: models there are owner/name, but for a few old ones.
    if difflib.SequenceMatcher(None, source.lower(), EMBEDDED_NAME).ratio() > _ALIKE:
        raise MultirateError(f"There is no model at {source!r}. Did you mean {EMBEDDED_NAME}?")
    if isinstance(model, Path) or not _may_be_hub_id(source):
        raise MultirateError(f"There is no model at {source!r}. Give {ACCEPTED}.")
    return Place(source, revision=_commit(source))


def _commit(hub_id: str) -> str | None:
    """The commit that a hub id stands for now: one for config, weights and tokenizer.

    Asked for once: each of transformers' loaders would try to reach the hub for half a minute.
    """
    fix = f"Check the name, the connection and your access rights. Give {ACCEPTED}."
    with hf.reading(_not_on_hub(hub_id), fix=fix):
        return HfApi().resolve_revision(hub_id).resolved


def _not_on_hub(name: str) -> str:
    return f"There is no file or folder {name!r}, and the hub did not give that model"


def _converted(source: str, folder: Path) -> Place:
    return Place(source, folder, revision=folder.name.rpartition("-")[2], converted=True)


def _no_config(folder: Path) -> str:
    message = f"The folder {folder} has no config.json, so it is not a model folder."
    gguf = sorted(folder.glob("*.gguf"))
    if gguf:
        return f"{message} Did you mean {gguf[0]}?"
    return f"{message} Give {ACCEPTED}."


def _may_be_hub_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return Path(name).suffix not in {".gguf", ".safetensors", ".json", ".bin"}
