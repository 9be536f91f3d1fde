"""multirate: faster decoding of frozen language models with multi-rate residual streams (M2R2).

import multirate

engine = multirate.load("smollm2-135m", accelerator="default")
print(engine.generate("Why is the sky blue?", max_new_tokens=100).text)
"""

from importlib.metadata import version

from multirate.config.errors import MultirateError
from multirate.config.generation import GenerationOptions
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
