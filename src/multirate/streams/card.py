"""The texts of an accelerator folder: its model card, and the code that transformers runs."""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from pathlib import Path

from huggingface_hub import ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from multirate.config.accelerator import AcceleratorConfig
from multirate.models.embedded import EMBEDDED_NAME

INSTALL = "pip install multirate"

# Nothing of a folder's own is in it: transformers copies this file away from the folder, and the
# same text in every folder stays right when a folder is moved or uploaded.
GENERATE_PY = f'''"""Speculative decoding with the multirate accelerator in this folder.

transformers runs this file for
`model.generate(..., custom_generate="<this folder or its hub id>", trust_remote_code=True)`.
All code is in the package: {INSTALL}
"""

from multirate.decode.hf import generate_from_folder


def generate(model, **kwargs):
    return generate_from_folder(model, **kwargs)
'''

# The hub's metadata wants hub ids; the embedded model has one.
_HUB_IDS = {EMBEDDED_NAME: "HuggingFaceTB/SmolLM2-135M-Instruct"}


def requirements_txt(version: str) -> str:
    """What the environment of `generate.py` must have; transformers checks it."""
    return f"multirate>={version}\n"


def model_card(
    config: AcceleratorConfig,
    *,
    name: str,
    license: str,
    num_parameters: int,
    command: str | None,
) -> str:
    """The README of an accelerator folder, with the hub's metadata in front.

    Args:
        config: as it is saved.
        name: the folder or hub id that the examples load.
        license: an identifier of the hub's list.
        num_parameters: numbers in the weights file's trained tensors.
        command: the command that made it, if it is known.
    """
    base = config.base_model_name_or_path or "BASE_MODEL"
    metadata = ModelCardData(
        library_name="multirate",
        base_model=_hub_id(base),
        license=license,
        pipeline_tag="text-generation",
        tags=["multirate", "m2r2", "speculative-decoding", "custom_generate"],
    )
    drafts = f"{config.draft_vocab_size or config.vocab_size:,} of {config.vocab_size:,} tokens"
    made = f"\n## Made by\n\n```sh\n{command.strip()}\n```\n" if command else ""
    return f"""---
{metadata.to_yaml()}
---

# Accelerator for {base}

A [multirate](https://arxiv.org/abs/2502.02040) accelerator: a second, faster residual stream that
drafts tokens beside the frozen model `{base}`, which verifies them. The output is the base model's
own: token-identical when greedy in float32, identical in distribution when sampling. Without the
base model this folder does nothing, and with another one it is refused.

## Use

```sh
{INSTALL}
multirate generate {base} --accelerator {name} --prompt "Why is the sky blue?"
```

```python
import multirate

engine = multirate.load("{base}", accelerator="{name}")
print(engine.generate("Why is the sky blue?").text)
```

Or from plain transformers, with a model that is loaded already:

```python
output = model.generate(
    **inputs, max_new_tokens=128, custom_generate="{name}", trust_remote_code=True
)
```

## What is inside

| | |
|---|---|
| parameters | {num_parameters:,} |
| preset | {config.preset} |
| entry | {config.entry} |
| layers | {config.layer_kind}, rank {config.rank}{", own keys and values" * config.own_kv} |
| gates | {", ".join(map(str, config.gates))} of {config.num_layers} layers |
| draft vocabulary | {drafts} |
| base model | `{base}`{f", revision `{config.revision}`" if config.revision else ""} |
| base config fingerprint | `{config.base_fingerprint}` |
| multirate version | {config.library_version} |

## Expected acceptance

{_acceptance(config)}
{made}"""


def _acceptance(config: AcceleratorConfig) -> str:
    if not config.expected_acceptance:
        return "Not measured. The drafter learns it from the text it is used on."
    shown = ", ".join(f"{share:.2f}" for share in config.expected_acceptance)
    drafts = len(config.expected_acceptance)
    length = 1 + sum(accumulate(config.expected_acceptance, mul))
    return (
        f"On held-out text, draft 1, 2, ... is accepted with probability {shown}, given that\n"
        f"those before it were: {length:.2f} tokens a step with {drafts} drafts; plain decoding: 1."
    )


def _hub_id(base: str) -> str | None:
    """The base model's hub id; None where it only has a local name."""
    base = _HUB_IDS.get(base, base)
    try:
        validate_repo_id(base)
    except HFValidationError:
        return None
    return None if "/" not in base or Path(base).exists() else base
