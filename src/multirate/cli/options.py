"""What several commands share: common options, and how a command writes to the terminal."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from multirate.models.embedded import EMBEDDED_NAME
from multirate.streams.defaults import default_accelerator

NO_ACCELERATOR = "none"

MODEL_HELP = f"hub id, folder, .gguf file, or {EMBEDDED_NAME}, the embedded model"
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
AcceleratorChoice = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"accelerator folder or hub id, default = the one that ships for MODEL, or "
        f"{NO_ACCELERATOR}; without this, the one that ships if any does",
    ),
]
Template = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="makes a prompt of each line of FILE, whatever its shape: {name} stands for a field, \\n "
        "for a new line",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="of the weights: packed (float16, float32 arithmetic), bfloat16, float32, float16 or auto "
        "(as stored); default: on x86 CPUs int4 where that is exact, else packed; elsewhere bfloat16"
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        metavar="int8|int4",
        help="weights of so many bits, in place of a --dtype; x86 CPUs (needs g++ once) and CUDA "
        "(needs torchao)",
    ),
]
Compile = Annotated[
    str | None,
    typer.Option(
        "--compile",
        metavar="auto|layers|model|graphs|none",
        help="compile the model, a layer at a time or as one graph, once for a machine; graphs: CUDA "
        "graphs; auto: layers on a CPU that has a C++ compiler",
    ),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...; default: a GPU if there is one")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]


def import_library() -> None:
    """Import torch, transformers and our library, in two thirds of the time that it takes by itself.

    Searching for garbage among a million new objects, none of which is any, takes the rest: now, and
    again when the process ends. For commands, since it sets those objects aside for good.
    """
    gc.disable()
    try:
        import multirate.decode.engine  # noqa: F401
    finally:
        gc.enable()
    if gc.get_freeze_count() == 0:
        gc.freeze()


def accelerator_for(model: str, choice: str | None) -> str | Path | None:
    """What `multirate.load` is given for an --accelerator option; None for none."""
    if choice is None:
        return default_accelerator(model)
    return None if choice == NO_ACCELERATOR else choice


def write(text: str) -> None:
    """Put text on stdout now, so that a reader that has gone is noticed here and not at exit."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(data: dict[str, Any]) -> None:
    """Print one JSON object on stdout."""
    write(_as_json(data))


def _as_json(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def save_json(path: Path, data: dict[str, Any]) -> None:
    """Save the object that `write_json` prints, whole or not at all."""
    from multirate.bench.files import write_whole

    write_whole(path, _as_json(data))
    note(f"saved {path}")


def split_names(text: str) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def note(text: str) -> None:
    """Print a line for the user on stderr."""
    typer.echo(text, err=True)
