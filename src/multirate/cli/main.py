"""The `multirate` command. Thin: every command is a call into the library.

A user's mistake prints one message without a traceback and exits with code 2; Ctrl-C exits with 130.
"""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from multirate.cli.fit import fit
from multirate.config.errors import MultirateError

app = typer.Typer(
    name="multirate",
    help="Faster decoding of frozen language models with multi-rate residual streams (M2R2).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(fit)


@app.callback()
def root() -> None:
    """Keeps `multirate COMMAND` even while there is only one command."""


def main() -> None:
    """Entry point of the `multirate` script."""
    errors = Console(stderr=True, highlight=False)
    try:
        app()
    except MultirateError as error:
        errors.print(f"[bold red]Error:[/] {error}", soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        errors.print("Interrupted.")
        sys.exit(130)
