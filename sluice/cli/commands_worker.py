"""The commands for workers, engines, models and tokenizers: `worker`, `engines`, `extensions`, `conformance`,
`tiny-model` and `diff-tokenizers`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from sluice.cli.commands_live import AsJson, console
from sluice.cli.errors import BadFlag, needs_extra
from sluice.cli.flags import made, with_flags
from sluice.cli.trust import Trust


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    passed_on = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command("worker", context_settings=passed_on)(worker)
    app.command("engines")(engines)
    app.command("extensions")(extensions)
    app.command("diff-tokenizers")(diff_tokenizers)
    app.command("conformance")(conformance)
    app.command("tiny-model")(tiny_model)


def _import_from_here() -> None:
    """Makes custom classes in the working directory importable, as the processes of `sluice up` do."""
    import services  # noqa: F401 - before the folder is on the path, where another one may have that name

    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def worker() -> None:
    """Start one worker, which registers with --routers; accepts the flags of `python -m services.worker`.

    In addition, --tls DIR sets its TLS flags to the certificates that `sluice certs DIR` created.
    """
    _import_from_here()
    with needs_extra("worker", "worker"):
        from sluice.cli import worker as command
    command.run_worker(sys.argv[sys.argv.index("worker") + 1 :])  # unparsed: the engine's own flags follow `--`


def engines(
    as_table: Annotated[bool, typer.Option("--table", help="print a table of what each engine supports")] = False,
    write: Annotated[Path | None, typer.Option(help="write the table into this document")] = None,
) -> None:
    """List the engines by name, or what they support."""
    from services.worker.engines import engine_names
    from services.worker.engines import table as support

    if write is not None and not write.is_file():
        raise BadFlag(f"--write {write}: the file does not exist")
    if write is not None:
        typer.echo(f"{write} {'was updated' if support.write(write) else 'is up to date'}")
    elif as_table:
        typer.echo(support.table(support.built_in_engines()), nl=False)
    else:
        typer.echo("\n".join(engine_names()))


def extensions(as_json: AsJson = False) -> None:
    """List what installed packages add: engines and policies; exit code 1 if one cannot be used."""
    with needs_extra("extensions", "worker"):
        from sluice.cli import extensions as command
    raise typer.Exit(command.run(as_json, console()))


def diff_tokenizers(
    left: Annotated[str, typer.Argument(metavar="A", help="SOURCE[@PROCESSOR], such as ./model@hf")],
    right: Annotated[str, typer.Argument(metavar="B", help="SOURCE[@PROCESSOR] to compare with, such as ./model@vllm")],
    chats: Annotated[
        Path | None, typer.Option(help="file with one chat per line, as JSON with messages; default: a fixed set")
    ] = None,
    vllm_python: Annotated[str, typer.Option(help="Python interpreter that has vllm; default: this one")] = "",
    sglang_python: Annotated[str, typer.Option(help="Python interpreter that has sglang; default: this one")] = "",
) -> None:
    """Show where two tokenizers produce different prompts, side by side; exit code 1 if they do."""
    _import_from_here()
    with needs_extra("diff-tokenizers", "preprocess"):
        from services.preprocess.tokenizers.engine import EngineOptions
        from sluice.cli import diff
    engines = {"vllm": EngineOptions(python=vllm_python), "sglang": EngineOptions(python=sglang_python)}
    if chats is not None and not chats.is_file():
        raise BadFlag(f"--chats {chats}: the file does not exist")
    raise typer.Exit(
        diff.run(left, right, diff.read_chats(chats) if chats is not None else diff.default_chats(), engines)
    )


def tiny_model(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="folder to write; created if missing")],
) -> None:
    """Write a model folder for testing engines: a tiny tokenizer, a chat template, random weights. No download."""
    with needs_extra("tiny-model", "worker"):
        from sluice.cli import tiny_model as command

        typer.echo(command.run(folder))


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
        from sluice.cli import conformance as command
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
        trust=made(Trust, tls),
        as_json=as_json,
    )
    raise typer.Exit(command.run(options, console()))
