"""The seam to transformers' loaders: quiet output, and failures that a user can read.

A loader of somebody else's files can fail with anything (safetensors, struct, JSON, pickle and
network errors), and says little about the fix. Whatever reads a model goes through `reading`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import logging

from multirate.config.errors import MultirateError
from multirate.models.architectures import SUPPORTED_MODEL_TYPES, architecture_of

_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")
_NAMES_SHOWN = 3


@contextmanager
def quiet(*, progress_bars: bool = False) -> Iterator[None]:
    """Keep transformers silent but for errors, and without progress bars unless they are wanted."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not progress_bars:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def reading(what: str, *, fix: str) -> Iterator[None]:
    """Turn any failure of the block into a `MultirateError`: `what` failed, why, and the fix.

    Args:
        what: a clause, such as "Could not read the weights of DIR".
        fix: a sentence on what to do about it.
    """
    try:
        yield
    except MultirateError:
        raise
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise MultirateError(f"{what}: {reason.rstrip('.')}. {fix}") from error


def require_supported(config: PreTrainedConfig, *, source: str) -> None:
    """Check that a config belongs to a causal language model of a supported architecture.

    Raises:
        MultirateError: it does not; the message names the class or type, and what is supported.
    """
    classes = config.architectures or []
    if classes and not any(name.endswith(_CAUSAL_SUFFIXES) for name in classes):
        raise MultirateError(
            f"{source} is not a causal language model: its config names {', '.join(classes)}. "
            f"Use a ...ForCausalLM model of one of these types: {', '.join(SUPPORTED_MODEL_TYPES)}."
        )
    architecture_of(config)


def require_complete(loading_info: dict[str, Any], *, source: str) -> None:
    """Check that every weight of the model came from its files.

    transformers fills what is missing or misshapen with random numbers and only prints a table.

    Args:
        loading_info: second result of `from_pretrained(..., output_loading_info=True)`.
        source: what was loaded, for the message.

    Raises:
        MultirateError: weights are missing or have another shape than the config says.
    """
    misshapen = [key if isinstance(key, str) else key[0] for key in loading_info["mismatched_keys"]]
    names = sorted({*loading_info["missing_keys"], *misshapen})
    if names:
        shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
        raise MultirateError(
            f"The weights of {source} do not fit its config: {len(names)} are missing or have "
            f"another shape ({shown}). Get the config and the weights from the same model."
        )
