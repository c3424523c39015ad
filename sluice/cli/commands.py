"""Collects all commands of `sluice` from the modules `commands_*`, and from extensions: entry points of the group
`sluice.commands`, each a function that registers commands with the application."""

from __future__ import annotations

import sys
from typing import Protocol, cast

import typer

from services.common.packages.extensions import COMMANDS, load_group
from sluice import __version__
from sluice.cli import commands_live, commands_security, commands_sizing, commands_up, commands_worker
from sluice.cli.errors import BadFlag

app = typer.Typer(
    name="sluice",
    help="Serve large language models as a suite of small gRPC services.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

# Some versions of Typer bundle click; this expression finds the base class of its errors in all of them.
_CommandLineError = cast(type[Exception], typer.BadParameter.__mro__[2])


class _HasMessage(Protocol):
    def format_message(self) -> str: ...


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


for _commands in (commands_up, commands_live, commands_sizing, commands_worker, commands_security):
    _commands.add_to(app)


def _add_extensions() -> None:
    """Adds the commands of extensions; one that cannot be used is a sentence on standard error."""
    for add in load_group(COMMANDS, lambda reason: print(f"sluice: {reason}", file=sys.stderr)).usable.values():
        add(app)


_add_extensions()


def invoke(arguments: list[str]) -> int:
    """Runs a command; an invalid command line prints one sentence to standard error and returns exit code 2."""
    if arguments[:1] == ["up"]:
        from services.common.settings.service import spelled_out

        arguments = spelled_out(arguments, commands_up.SWITCHES)
    try:
        return int(app(arguments, standalone_mode=False) or 0)
    except _CommandLineError as error:
        return _refuse(cast(_HasMessage, error).format_message())
    except BadFlag as error:
        return _refuse(str(error))


def _refuse(message: str) -> int:
    sentence = " ".join(message.split())
    print(f"sluice: {sentence if sentence.endswith('.') else sentence + '.'}", file=sys.stderr)
    return 2
