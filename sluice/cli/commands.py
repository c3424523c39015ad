"""All commands of `sluice`; they are in `starting`, `operating`, `proving` and `securing`."""

from __future__ import annotations

import sys
from typing import Protocol, cast

import typer

from sluice import __version__
from sluice.cli import commands_live as operating
from sluice.cli import commands_security as securing
from sluice.cli import commands_up as starting
from sluice.cli import commands_worker as proving
from sluice.cli.up.plan import BadFlag

app = typer.Typer(
    name="sluice",
    help="Serve large language models as a suite of small gRPC services.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

# Typer carries its own copy of click in some versions: this is the base of its errors in all of them.
_CommandLineError = cast(type[Exception], typer.BadParameter.__mro__[2])


class _Speaks(Protocol):
    def format_message(self) -> str: ...


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


for _commands in (starting, operating, proving, securing):
    _commands.add_to(app)


def invoke(arguments: list[str]) -> int:
    """Runs a command; a mistake on the command line is one sentence on standard error and exit code 2."""
    try:
        return int(app(arguments, standalone_mode=False) or 0)
    except _CommandLineError as error:
        return _refuse(cast(_Speaks, error).format_message())
    except BadFlag as error:
        return _refuse(str(error))


def _refuse(message: str) -> int:
    sentence = " ".join(message.split())
    print(f"sluice: {sentence if sentence.endswith('.') else sentence + '.'}", file=sys.stderr)
    return 2
