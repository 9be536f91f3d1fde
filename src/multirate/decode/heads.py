"""Draft heads of rival methods: the base's own final norm and LM head behind small trained modules.

What Medusa and DEED share: a projection to a reduced vocabulary, and a folder of weights.

    rival_config.json     method, shape and base model
    rival.safetensors     trained weights and the draft vocabulary

Shapes: D hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from multirate.config.errors import MultirateError
from multirate.models import hf
from multirate.models.base import BaseModel
from multirate.models.loading import config_fingerprint
from multirate.models.packing import draft_packer
from multirate.streams.folder import write_folder

CONFIG_FILE = "rival_config.json"
WEIGHTS_FILE = "rival.safetensors"
_AGAIN = "Make it again with scripts/train_rival.py, or download the folder again."


class DraftHead(nn.Module):
    """Final norm and LM head of the base model, for some of its tokens only.

    Args:
        base: the model, whose weights may be packed already.
        ids: LongTensor `[Vd]`, the tokens that may be drafted.
    """

    def __init__(self, base: BaseModel, ids: Tensor) -> None:
        super().__init__()
        self.ids = ids.to(base.device)
        self.__dict__["base"] = base
        self.__dict__["rows"] = packed_like(base, _head_rows(base, self.ids))

    base: BaseModel
    rows: nn.Module

    def norm(self, h: Tensor) -> Tensor:
        """The final norm: h_N or its like, `[..., D]`."""
        return cast(Tensor, self.base.final_norm(h))

    def forward(self, normed: Tensor) -> Tensor:
        """A normed state `[..., D]` to logits `[..., Vd]`."""
        if isinstance(self.rows, nn.Linear):  # heads are trained in float32 beside any model
            normed = normed.to(self.rows.weight.dtype)
        return self.base.soft_cap(cast(Tensor, self.rows(normed)))


def _head_rows(base: BaseModel, ids: Tensor) -> nn.Linear:
    """The LM head's rows for some tokens."""
    with torch.inference_mode(False), torch.no_grad():
        head: nn.Module = base.lm_head
        if isinstance(head, nn.Linear):
            weight = head.weight[ids]
        else:  # packed: what it makes of the unit vectors is its weights
            units = torch.eye(base.hidden_size, dtype=base.dtype, device=base.device)
            weight = head(units).T[ids]
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
        return linear


def fill_heads(heads: nn.Module, linears: nn.ModuleList, tensors: dict[str, Tensor]) -> None:
    """Give heads their trained weights, in the form that the base's weights have; for decoding only.

    Args:
        heads: with a `head`, the `DraftHead` behind them.
        linears: the linear layers that they consist of.
        tensors: their state dict.
    """
    base = cast(DraftHead, heads.head).base
    heads.load_state_dict(tensors)
    heads.to(base.dtype).requires_grad_(False)
    for i, linear in enumerate(linears):
        linears[i] = packed_like(base, cast(nn.Linear, linear))


def packed_like(base: BaseModel, linear: nn.Linear) -> nn.Module:
    """A linear layer in the form that the base's own weights have."""
    if not base.packed:
        return linear
    return draft_packer(base.dtype_name, base.device)(linear)


def save_heads(
    path: str | Path,
    *,
    base: BaseModel,
    method: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> Path:
    """Save a rival's weights as a folder, whole or not at all; floats in float16.

    Args:
        path: the folder; one of the same kind that is there is replaced.
        base: the model that they belong to.
        method: "medusa" or "deed".
        config: numbers that belong to the weights.
        tensors: weights, and "draft_ids".

    Raises:
        MultirateError: the path holds something else, or cannot be written.
    """
    target = Path(os.path.expanduser(path)).resolve()
    if target.exists() and not (target / CONFIG_FILE).is_file():
        raise MultirateError(f"{target} is there and holds no rival's weights. Choose another.")
    full = {**config, "method": method, "base_model": base.config.name_or_path or ""}
    full["base_fingerprint"] = config_fingerprint(base.config)
    parts = {k: (v.half() if v.is_floating_point() else v).contiguous() for k, v in tensors.items()}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_folder(
            target,
            {
                CONFIG_FILE: (json.dumps(full, indent=2) + "\n").encode(),
                WEIGHTS_FILE: save(parts, metadata={"format": "pt"}),
            },
        )
    except OSError as error:
        raise MultirateError(f"Could not save {target}: {error.strerror or error}.") from error
    return target


def load_heads(
    path: str | Path, base: BaseModel, method: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a rival's folder: its config, and its weights in the base's type, on its device.

    Raises:
        MultirateError: there is no such folder, it is damaged, or it belongs to another method or
            base model.
    """
    folder = Path(os.path.expanduser(path))
    if not (folder / CONFIG_FILE).is_file():
        raise MultirateError(
            f"There are no weights of {method} in {folder}. Make them with scripts/train_rival.py "
            f"{method}, or run where data/ of the repository is."
        )
    with hf.reading(f"{folder} is damaged", fix=_AGAIN):
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        tensors = load((folder / WEIGHTS_FILE).read_bytes())
        found, fingerprint = config["method"], config["base_fingerprint"]
    if found != method:
        raise MultirateError(f"{folder} holds weights of {found}, not of {method}.")
    if fingerprint != config_fingerprint(base.config):
        raise MultirateError(
            f"The weights of {method} in {folder} were made for {config.get('base_model')}, not for "
            f"{base.config.name_or_path}. Make them for this model with scripts/train_rival.py."
        )
    return config, {
        k: v.to(base.device, base.dtype if v.is_floating_point() else None)
        for k, v in tensors.items()
    }
