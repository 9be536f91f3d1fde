#!/usr/bin/env python
"""Store a GGUF file's model in another type, with llama.cpp itself (llama-cpp-python).

    make_gguf.py model.Q4_1.gguf Q8_0 model.Q8_0.gguf

Without an input (`-`) it is the embedded model's file. From a quantised file the weights stay what that
file says, rounded once more: good for comparing speeds, not qualities.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import llama_cpp
from gguf import LlamaFileType

from multirate.models.embedded import embedded_gguf

TYPES = {kind.name.removeprefix("MOSTLY_").removeprefix("ALL_"): kind for kind in LlamaFileType}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="a .gguf file, or - for the embedded model's")
    parser.add_argument("type", choices=sorted(TYPES), metavar="TYPE", help="Q4_1, Q8_0, BF16, ...")
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    source = embedded_gguf() if options.source == "-" else Path(options.source)

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = int(TYPES[options.type])
    settings.allow_requantize = True
    settings.nthread = os.cpu_count() or 1
    partial = options.output.with_suffix(".partial")
    if llama_cpp.llama_model_quantize(bytes(source), bytes(partial), settings) != 0:
        partial.unlink(missing_ok=True)
        raise SystemExit(f"llama.cpp could not store {source} as {options.type}.")
    os.replace(partial, options.output)


if __name__ == "__main__":
    main()
