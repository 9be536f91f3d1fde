"""The `multirate` command. Thin: every command is a call into the library.

A user's mistake prints one message without a traceback and exits with code 2; Ctrl-C exits with 130.
"""

from __future__ import annotations

import os
import sys
import warnings
from importlib.metadata import version
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from multirate.cli.analyze import analyze
from multirate.cli.bench import bench
from multirate.cli.demo import demo
from multirate.cli.generate import generate
from multirate.cli.info import info
from multirate.cli.sweep import sweep
from multirate.cli.synth import synth
from multirate.cli.train import train
from multirate.config.errors import MultirateError

INTERRUPTED = 128 + 2  # what a shell reports for a program that SIGINT ended

app = typer.Typer(
    name="multirate",
    help="Faster decoding of frozen language models with multi-rate residual streams (M2R2).",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # its tables cut long names of options in narrow terminals
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(demo)
app.command()(synth)
app.command()(train)
app.command()(info)
app.command()(analyze)
bench.command()(sweep)
app.add_typer(bench)
for command in (*app.registered_commands, *bench.registered_commands):
    # By itself click cuts the first line of a command's text short in a list of commands.
    command.short_help = str(getattr(command.callback, "__doc__", "")).partition("\n")[0]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"multirate {version('multirate')}")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="print the version and exit"
        ),
    ] = False,
) -> None:
    """Faster decoding of frozen language models with multi-rate residual streams (M2R2)."""


def main() -> None:
    """Entry point of the `multirate` script."""
    errors = Console(stderr=True, highlight=False)
    with warnings.catch_warnings():
        _keep_quiet()
        try:
            app(prog_name="multirate")
        except MultirateError as error:
            # A Text, since brackets in a message are no markup.
            message = Text.assemble(("Error:", "bold red"), " ", str(error))
            errors.print(message, soft_wrap=True)
            sys.exit(2)
        except SystemExit as stop:  # typer turns Ctrl-C in a command into this
            if stop.code == INTERRUPTED:
                errors.print("Interrupted.")
            raise
        except KeyboardInterrupt:
            errors.print("Interrupted.")
            sys.exit(INTERRUPTED)


def _keep_quiet() -> None:
    """Show the user our own warnings, one line each, and none of the libraries'."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", category=UserWarning, module=r"multirate\.")
    warnings.showwarning = _show_warning


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    typer.echo(f"Warning: {message}", err=True)


if __name__ == "__main__":  # for `accelerate launch -m multirate.cli.main`
    main()
