"""The command `conformance`. It imports the kit when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sluice.cli.commands_live import AsJson, console
from sluice.cli.errors import BadFlag, needs_extra
from sluice.cli.flags import made, with_flags
from sluice.cli.trust import Trust


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command("conformance")(conformance)


@with_flags(Trust)
def conformance(
    address: Annotated[str, typer.Argument(help="host:port of the worker's gRPC server")] = "",
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="also write the results as JUnit XML")] = None,
    rule: Annotated[list[str] | None, typer.Option(metavar="NAME", help="test only this rule; may be repeated")] = None,
    list_rules: Annotated[bool, typer.Option("--list", help="print every rule and what it proves")] = False,
    patience: Annotated[float, typer.Option(help="factor for every deadline, for slow engines")] = 1.0,
    router_listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="address on which the kit acts as the worker's router; start the worker with it as --routers",
        ),
    ] = "",
    prefill_peer: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="prefill worker of the same model, to test a decode worker")
    ] = "",
    stop_command: Annotated[
        str,
        typer.Option(
            metavar="COMMAND", help="command that stops the worker, such as 'kill PID', to test its drain at the end"
        ),
    ] = "",
    as_json: AsJson = False,
    **tls: Any,
) -> None:
    """Test a running worker against every rule of the worker contract; exit code 1 if one is violated."""
    with needs_extra("conformance", "worker"):
        from sluice.cli.conformance import report
    if list_rules:
        report.list_rules(console(), as_json)
        return
    if not address:
        raise BadFlag("conformance needs the ADDRESS of a worker, such as 127.0.0.1:50061")
    options = report.Options(
        address=address,
        junit=junit,
        rules=tuple(rule or ()),
        patience=patience,
        router_listen=router_listen,
        prefill_peer=prefill_peer,
        stop_command=stop_command,
        trust=made(Trust, tls),
        as_json=as_json,
    )
    raise typer.Exit(report.run(options, console()))
