"""`multirate generate`: continue one prompt, with or without an accelerator."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multirate.cli.options import (
    AcceleratorChoice,
    Compile,
    Device,
    Dtype,
    Json,
    Model,
    Quantize,
    accelerator_for,
    import_library,
    note,
    write,
    write_json,
)
from multirate.config.errors import MultirateError
from multirate.config.generation import STRATEGIES, GenerationOptions

if TYPE_CHECKING:
    from multirate.decode.results import GenerationResult

STDIN = "-"


def _setting(name: str, *flags: str, **extra: Any) -> Any:
    """The option for a field of `GenerationOptions`, with that field's own help."""
    text = GenerationOptions.__dataclass_fields__[name].metadata["help"]
    return typer.Option(*flags, help=text[0].lower() + text[1:].rstrip("."), **extra)


def generate(
    model: Model,
    text: Annotated[str | None, typer.Argument(metavar="PROMPT", help="the prompt")] = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="the prompt, if it is not an argument")
    ] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="file with the prompt, less a line break at its end; - = stdin, as without any "
            "prompt",
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="system message of the chat")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="continue the prompt as it is: no chat template")
    ] = False,
    accelerator: AcceleratorChoice = None,
    strategy: Annotated[str, _setting("strategy", metavar="|".join(STRATEGIES))] = "auto",
    max_new_tokens: Annotated[int, _setting("max_new_tokens")] = 128,
    temperature: Annotated[float, _setting("temperature")] = 0.0,
    top_k: Annotated[int | None, _setting("top_k")] = None,
    top_p: Annotated[float | None, _setting("top_p")] = None,
    min_p: Annotated[float | None, _setting("min_p")] = None,
    repetition_penalty: Annotated[float, _setting("repetition_penalty")] = 1.0,
    seed: Annotated[int | None, _setting("seed")] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="string that ends the output and is not part of it; may be repeated"),
    ] = None,
    num_draft_tokens: Annotated[int | None, _setting("num_draft_tokens")] = None,
    max_draft_tokens: Annotated[int, _setting("max_draft_tokens")] = 16,
    draft_width: Annotated[int | None, _setting("draft_width")] = None,
    ignore_eos: Annotated[bool, _setting("ignore_eos", "--ignore-eos")] = False,
    dtype: Dtype = None,
    quantize: Quantize = None,
    compile: Compile = "auto",
    device: Device = None,
    as_json: Json = False,
    no_stream: Annotated[
        bool, typer.Option("--no-stream", help="print the text when it is complete")
    ] = False,
) -> None:
    """Continue a prompt. The text goes to stdout as it comes, a line of numbers to stderr."""
    # Everything that can be refused is refused before anything slow starts.
    options = GenerationOptions(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        strategy=strategy,  # type: ignore[arg-type]  # GenerationOptions checks it
        num_draft_tokens=num_draft_tokens,
        max_draft_tokens=max_draft_tokens,
        draft_width=draft_width,
        ignore_eos=ignore_eos,
    )
    if raw and system is not None:
        raise MultirateError(
            "--system is a message of a chat, but --raw uses no chat template. Leave one of them "
            "out, or write the system text into the prompt."
        )
    content = read_prompt(model=model, text=text, prompt=prompt, prompt_file=prompt_file)
    messages: Any = content
    if system is not None:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": content}]

    import multirate

    import_library()
    engine = multirate.load(
        model,
        accelerator_for(model, accelerator),
        dtype=dtype,
        quantize=quantize,
        device=device,
        compile=compile,
    )
    pieces = engine.stream(messages, options, raw=raw)
    result = _show(pieces, as_it_comes=not (as_json or no_stream))
    if as_json:
        write_json(result.to_dict())
        return
    if no_stream:
        write(f"{result.text}\n")
    note(summary(result))


def read_prompt(
    *, model: str, text: str | None, prompt: str | None, prompt_file: str | None
) -> str:
    """The prompt from whichever way it was given; from stdin if it was given in no way.

    Who waits at a terminal is told which model: a lone argument may have been meant as the prompt.

    Raises:
        MultirateError: it was given twice, is empty, is not UTF-8, or its file cannot be read.
    """
    given = {"PROMPT": text, "--prompt": prompt, "--prompt-file": prompt_file}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise MultirateError(f"The prompt was given as {' and as '.join(names)}. Give it once.")
    content = text if text is not None else prompt
    if content is None:
        content = _read(STDIN if prompt_file is None else prompt_file, model)
    try:
        content.encode()
    except UnicodeEncodeError:  # bytes of the command line that are no characters
        raise MultirateError("The prompt is not UTF-8 text. Convert it, or use a file.") from None
    if not content.strip():
        raise MultirateError("The prompt is empty. Give at least one word.")
    return content


def _read(file: str, model: str) -> str:
    """The text of a file or of stdin, without one line break at its end."""
    name = "stdin" if file == STDIN else file
    try:
        if file == STDIN:
            if sys.stdin.isatty():
                note(
                    f"Reading the prompt for the model {model!r} from the terminal; end it with "
                    f"Ctrl-D on a new line."
                )
            data = sys.stdin.buffer.read()
        else:
            data = Path(file).read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise MultirateError(
            f"Cannot read the prompt from {name}: {error.strerror or error}. Give a text file."
        ) from None
    except UnicodeDecodeError as error:
        raise MultirateError(
            f"The prompt from {name} is not UTF-8 text ({error.reason} at byte {error.start}). "
            f"Convert the file to UTF-8."
        ) from None
    return text.removesuffix("\n").removesuffix("\r")


def _show(pieces: Iterable[str | GenerationResult], *, as_it_comes: bool) -> GenerationResult:
    """Run a stream to its end, printing its text if asked; its last item."""
    line_open = False
    try:
        for piece in pieces:
            if not isinstance(piece, str):
                return piece
            if as_it_comes:
                line_open = True
                write(piece)
    finally:  # on Ctrl-C too, so that what follows starts on a line of its own
        if line_open:
            write("\n")
    raise AssertionError("a stream ends with its result")


def summary(result: GenerationResult) -> str:
    """One line about a generation: its speed, and what speculation did."""
    parts = [
        f"{result.new_tokens} tokens",
        f"{result.tokens_per_second:.1f} tokens/s",
        result.strategy,
    ]
    speculation = result.speculation
    if speculation is not None:
        parts.append(f"mean acceptance length {speculation.mean_acceptance_length:.2f}")
    parts.append(f"{result.dtype} on {result.device}")
    parts.append(f"ended by {result.finish_reason}")
    line = f"[{', '.join(parts)}]"
    if speculation is not None and speculation.note is not None:
        line += f" {speculation.note}"
    return line
