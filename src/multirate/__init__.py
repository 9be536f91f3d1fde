"""multirate: faster decoding of frozen language models with multi-rate residual streams (M2R2).

import multirate

engine = multirate.load("smollm2-135m", accelerator="default")
print(engine.generate("Why is the sky blue?", max_new_tokens=100).text)
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from multirate.config.errors import MultirateError
from multirate.config.generation import GenerationOptions

if TYPE_CHECKING:
    from multirate.decode.engine import Engine, load
    from multirate.decode.results import GenerationResult, Speculation

__version__ = version("multirate")

__all__ = [
    "Engine",
    "GenerationOptions",
    "GenerationResult",
    "MultirateError",
    "Speculation",
    "__version__",
    "load",
]

# Imported when first used: they need torch and transformers, which `multirate --help` must not wait
# for.
_LAZY = {
    "Engine": "multirate.decode.engine",
    "load": "multirate.decode.engine",
    "GenerationResult": "multirate.decode.results",
    "Speculation": "multirate.decode.results",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
