"""The `paradraft` command: one file each for decoding, measuring, training, publishing."""

import os
import sys
from io import TextIOWrapper
from itertools import pairwise
from typing import Annotated, Any

import typer
from rich.text import Text
from safetensors import SafetensorError
from typer.core import TyperGroup

from .. import __version__
from . import decode, measure, publish, train
from .options import err_console


class Paradraft(TyperGroup):
    """The command; `--output-dir=~/d` means the home folder, which shells do not write out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a line with its home folders written out."""
        return super().parse_args(
            ctx, [with_home(word, before) for before, word in pairwise(["", *args])]
        )


def with_home(word: str, before: str) -> str:
    """Write out `~` where a word of the command line is an option's value.

    Args:
        word: the word.
        before: the one before it.
    """
    name, sign, value = word.partition("=")
    if sign and name.startswith("--"):
        return f"{name}={os.path.expanduser(value)}"
    return os.path.expanduser(word) if before.startswith("--") and "=" not in before else word


# which extra brings a package
EXTRAS = {
    "datasets": "train",
    "openai": "serve" if sys.argv[1:2] == ["serve"] else "train",
    "matplotlib": "bench",
    "pandas": "bench",
    "fastapi": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
    "llguidance": "serve",
}
app = typer.Typer(
    cls=Paradraft,
    help="Parallel drafters for transformers: the same output from generate, several times faster.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf_paradraft {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Say the version."),
    ] = False,
) -> None:
    """Parallel drafters for transformers: the same output from generate, several times faster."""


for commands in (decode, measure, train, publish):
    app.add_typer(commands.app)


def main() -> None:
    """Run the command; errors that a person can mend are one sentence, not a traceback.

    Characters that a console's character set lacks are shown as `?`.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app()
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(error.name or "")
        if extra is None:
            raise
        err_console.print(
            Text(f"{error.name} is not installed: pip install 'hf-paradraft[{extra}]'"),
            soft_wrap=True,
        )
        raise SystemExit(1) from None
    except (ValueError, OSError, ImportError, SafetensorError) as error:
        err_console.print(Text.assemble(("paradraft: ", "bold red"), str(error)), soft_wrap=True)
        raise SystemExit(1) from None
