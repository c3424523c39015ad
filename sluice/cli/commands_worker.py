"""The commands for workers, engines, models and tokenizers: `worker`, `engines`, `conformance`, `tiny-model` and
`diff-tokenizers`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.commands_live import AsJson, console
from sluice.cli.trust import Tls, TlsCa, TlsCert, TlsKey, Trust
from sluice.cli.up.plan import BadFlag


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    passed_on = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command("worker", context_settings=passed_on)(worker)
    app.command("engines")(engines)
    app.command("diff-tokenizers")(diff_tokenizers)
    app.command("conformance")(conformance)
    app.command("tiny-model")(tiny_model)


def worker() -> None:
    """Start one worker, which registers with --routers; the flags are those of `python -m services.worker`.

    In addition --tls DIR stands for its TLS flags, with the certificates that `sluice certs DIR` made.
    """
    try:
        from sluice.cli import worker as command
    except ImportError as error:
        raise BadFlag(f"worker needs the package {error.name}: install sluice-llm[worker]") from error
    command.run_worker(sys.argv[sys.argv.index("worker") + 1 :])  # as they stand: `--` begins the engine's own flags


def engines(
    as_table: Annotated[bool, typer.Option("--table", help="what each honours, as a table")] = False,
    write: Annotated[Path | None, typer.Option(help="write the table into this document instead")] = None,
) -> None:
    """List the engines by name."""
    from sluice.cli import engines as command

    if write is not None and not write.is_file():
        raise BadFlag(f"--write {write} does not exist")
    raise typer.Exit(command.run(as_table, write))


def diff_tokenizers(
    left: Annotated[str, typer.Argument(metavar="A", help="SOURCE[@PROCESSOR], such as ./model@hf")],
    right: Annotated[str, typer.Argument(metavar="B", help="the same for the other side, such as ./model@vllm")],
    chats: Annotated[
        Path | None, typer.Option(help="file with a chat a line, JSON with messages; by default a fixed set")
    ] = None,
    vllm_python: Annotated[str, typer.Option(help="interpreter that has vllm, if not this one")] = "",
    sglang_python: Annotated[str, typer.Option(help="interpreter that has sglang, if not this one")] = "",
) -> None:
    """Show where two tokenizers make different prompts, side by side; exit code 1 when they do."""
    try:
        from services.preprocess.tokenizers.engine import EngineOptions
        from sluice.cli import diff
    except ImportError as error:
        raise BadFlag(f"diff-tokenizers needs the package {error.name}: install sluice-llm[preprocess]") from error
    engines = {"vllm": EngineOptions(python=vllm_python), "sglang": EngineOptions(python=sglang_python)}
    if chats is not None and not chats.is_file():
        raise BadFlag(f"--chats {chats} does not exist")
    raise typer.Exit(
        diff.run(left, right, diff.read_chats(chats) if chats is not None else diff.default_chats(), engines)
    )


def tiny_model(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="where to write it; made when missing")],
) -> None:
    """Write a model folder to try engines with: a tiny tokenizer, a chat template, random weights. No download."""
    try:
        from sluice.cli import tiny_model as command

        typer.echo(command.run(folder))
    except ImportError as error:
        raise BadFlag(f"tiny-model needs the package {error.name}: install sluice-llm[worker]") from error


def conformance(
    address: Annotated[str, typer.Argument(help="host:port of the worker's gRPC server")] = "",
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="also write the results as JUnit XML")] = None,
    rule: Annotated[list[str] | None, typer.Option(metavar="NAME", help="only this rule; may be repeated")] = None,
    list_rules: Annotated[bool, typer.Option("--list", help="print every rule and what it proves")] = False,
    patience: Annotated[float, typer.Option(help="multiplies every deadline, for slow engines")] = 1.0,
    router_listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="be a router here, for a worker started with it as --routers")
    ] = "",
    prefill_peer: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="a prefill worker of the same model, to try a decode worker with")
    ] = "",
    stop_command: Annotated[
        str, typer.Option(metavar="COMMAND", help="stops the worker, such as 'kill PID'; then the drain is tried, last")
    ] = "",
    tls: Tls = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    as_json: AsJson = False,
) -> None:
    """Try every rule of the worker contract on a running worker; exit code 1 when one is broken."""
    try:
        from sluice.cli import conformance as command
    except ImportError as error:
        raise BadFlag(f"conformance needs the package {error.name}: install sluice-llm[worker]") from error
    if list_rules:
        command.list_rules(console(), as_json)
        return
    if not address:
        raise BadFlag("conformance needs the ADDRESS of a worker, such as 127.0.0.1:50061")
    options = command.Options(
        address=address,
        junit=junit,
        rules=tuple(rule or ()),
        patience=patience,
        router_listen=router_listen,
        prefill_peer=prefill_peer,
        stop_command=stop_command,
        trust=Trust(tls, tls_ca, tls_cert, tls_key),
        as_json=as_json,
    )
    raise typer.Exit(command.run(options, console()))
