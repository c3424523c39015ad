"""The commands for certificates, tokens and API keys: `certs`, `tokens` and `keys`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from sluice.cli.up.plan import BadFlag

SCOPES = "infer, priority, pin-worker, template, operate"
KeysFile = Annotated[
    Path, typer.Option("--file", envvar="SLUICE_GATEWAY_API_KEYS_FILE", help="where the keys are kept, as hashes")
]


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    app.command("certs")(certs)
    app.command("tokens")(tokens)
    keys_app = typer.Typer(rich_markup_mode=None)
    keys_app.callback(invoke_without_command=True)(keys_help)
    for name, command in (
        ("create", keys_create),
        ("list", keys_list),
        ("set", keys_set),
        ("revoke", keys_revoke),
    ):
        keys_app.command(name)(command)
    app.add_typer(keys_app, name="keys")


def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="where they are, or go")],
    name: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="only this certificate; may be repeated; default: all")
    ] = None,
    host: Annotated[
        list[str] | None, typer.Option(metavar="HOST", help="a name or address they carry too; may be repeated")
    ] = None,
    worker: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="also one for this worker alone, worker-ID.pem; may be repeated"),
    ] = None,
    trust_domain: Annotated[
        str,
        typer.Option(metavar="NAME", help="callers are named spiffe://NAME/SERVICE; the services' --tls-trust-domain"),
    ] = "sluice",
    days: Annotated[int, typer.Option(min=1, max=3650, help="how long they are valid")] = 90,
    renew: Annotated[bool, typer.Option("--renew", help="replace those that are there, by the same authority")] = False,
) -> None:
    """Make a development authority and a certificate for each service, for `sluice up --tls DIR`."""
    try:
        from sluice.cli import certs as command
    except ImportError as error:
        raise BadFlag(f"certs needs the package {error.name}: install sluice-llm[cli]") from error
    options = command.Options(
        names=tuple(name or command.NAMES),
        workers=tuple(worker or ()),
        hosts=tuple(host or ()),
        days=days,
        renew=renew,
        trust_domain=trust_domain,
    )
    try:
        for said in command.make(folder, options):
            typer.echo(said)
    except command.BadFolder as error:
        raise BadFlag(str(error)) from error


def tokens(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="where they are, or go")],
    worker: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="tokens for this worker alone, instead of one for all; may be repeated"),
    ] = None,
    scheduler: Annotated[bool, typer.Option("--scheduler", help="also for an external scheduler")] = False,
    rotate: Annotated[
        Literal["prepare", "switch", "finish"] | None,
        typer.Option(
            help="prepare: new tokens are accepted too; switch: the new ones are shown; finish: only they are accepted"
        ),
    ] = None,
) -> None:
    """Make the tokens that services show each other.

    For each service a folder with shown-tokens, for --peer-token-file, and accepted-tokens, for --tokens-file.
    """
    from sluice.cli import tokens as command

    try:
        for said in command.make(folder, command.Options(tuple(worker or ()), scheduler, rotate or "")):
            typer.echo(said)
    except command.BadTokens as error:
        raise BadFlag(str(error)) from error


def keys_help(context: typer.Context) -> None:
    """API keys of the gateway."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def keys_create(
    name: Annotated[str, typer.Argument(help="whose key it is, for people")],
    file: KeysFile,
    requests_per_minute: Annotated[int, typer.Option(help="0: no limit")] = 0,
    tokens_per_minute: Annotated[int, typer.Option(help="of prompts and answers together; 0: no limit")] = 0,
    concurrency: Annotated[int, typer.Option(help="requests at once; 0: no limit")] = 0,
    model: Annotated[list[str] | None, typer.Option(help="a model it may use, repeated; none: all")] = None,
    priority: Annotated[int, typer.Option(help="0 to 9; higher ones leave the line first")] = 0,
    weight: Annotated[int, typer.Option(help="1 to 100; its share of the line")] = 1,
    scope: Annotated[list[str] | None, typer.Option(help=f"what it may do, repeated: {SCOPES}; none: infer")] = None,
    tenant: Annotated[str, typer.Option(help="name that groups keys; empty: a tenant of its own")] = "",
) -> None:
    """Make a key and print it; it cannot be shown again."""
    from sluice.cli import keys

    fields = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrency": concurrency,
        "models": model or [],
        "priority": priority,
        "weight": weight,
        "scopes": _words(scope) or ["infer"],
        "tenant": tenant,
    }
    typer.echo(keys.create(file, name, **fields))


def keys_list(
    file: KeysFile, as_json: Annotated[bool, typer.Option("--json", help="print JSON for scripts")] = False
) -> None:
    """List the keys with their scopes, tenants and limits."""
    from sluice.cli import keys

    keys.show(file, as_json)


def keys_set(
    key: Annotated[str, typer.Argument(help="its id")],
    file: KeysFile,
    requests_per_minute: Annotated[int | None, typer.Option(help="0: no limit")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="of prompts and answers together; 0: no limit")] = None,
    concurrency: Annotated[int | None, typer.Option(help="requests at once; 0: no limit")] = None,
    model: Annotated[list[str] | None, typer.Option(help="the models it may use, repeated")] = None,
    any_model: Annotated[bool, typer.Option("--any-model", help="it may use every model")] = False,
    priority: Annotated[int | None, typer.Option(help="0 to 9; higher ones leave the line first")] = None,
    weight: Annotated[int | None, typer.Option(help="1 to 100; its share of the line")] = None,
    scope: Annotated[list[str] | None, typer.Option(help=f"all that it may do, repeated: {SCOPES}")] = None,
    tenant: Annotated[str | None, typer.Option(help="name that groups keys; empty: a tenant of its own")] = None,
) -> None:
    """Change a key in place; what is not named stays. Gateways notice within a second."""
    from sluice.cli import keys

    if model and any_model:
        raise BadFlag("--model and --any-model exclude each other")
    given = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrency": concurrency,
        "models": [] if any_model else model or None,
        "priority": priority,
        "weight": weight,
        "scopes": _words(scope) or None,
        "tenant": tenant,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    if not changes:
        raise BadFlag("keys set needs a change, such as --scope infer --scope operate")
    changed = keys.change(file, key, **changes)
    typer.echo(f"{changed.id} ({changed.name}) is changed")


def _words(options: list[str] | None) -> list[str]:
    """The words of an option that is repeated, or has several separated by commas."""
    return [word.strip() for option in options or () for word in option.split(",") if word.strip()]


def keys_revoke(key: Annotated[str, typer.Argument(help="its id")], file: KeysFile) -> None:
    """Make a key invalid; gateways notice within a second."""
    from sluice.cli import keys

    revoked = keys.revoke(file, key)
    typer.echo(f"{revoked.id} ({revoked.name}) is revoked")
