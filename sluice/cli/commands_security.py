"""The commands for certificates, tokens and API keys: `certs`, `tokens` and `keys`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from sluice.cli.errors import BadFlag, needs_extra

SCOPES = "infer, priority, pin-worker, template, operate"
KeysFile = Annotated[
    Path, typer.Option("--file", envvar="SLUICE_GATEWAY_API_KEYS_FILE", help="file of the keys, stored as hashes")
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
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="folder of the files")],
    name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="create only this certificate; may be repeated; default: all"),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="additional name or address in the certificates; may be repeated"),
    ] = None,
    worker: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID", help="also create a certificate for this worker alone, worker-ID.pem; may be repeated"
        ),
    ] = None,
    trust_domain: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="NAME in the callers' URIs, spiffe://NAME/SERVICE; must equal the services' --tls-trust-domain",
        ),
    ] = "sluice",
    days: Annotated[int, typer.Option(min=1, max=3650, help="days of validity")] = 90,
    renew: Annotated[
        bool, typer.Option("--renew", help="replace existing certificates, issued by the same authority")
    ] = False,
) -> None:
    """Create a development certificate authority and a certificate for each service, for `sluice up --tls DIR`."""
    with needs_extra("certs", "cli"):
        from sluice.cli import certs as command
    options = command.Options(
        names=tuple(name or command.NAMES),
        workers=tuple(worker or ()),
        hosts=tuple(host or ()),
        days=days,
        renew=renew,
        trust_domain=trust_domain,
    )
    for line in command.make(folder, options):
        typer.echo(line)


def tokens(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="folder of the files")],
    worker: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="create tokens for this worker alone instead of shared ones; may be repeated"),
    ] = None,
    scheduler: Annotated[
        bool, typer.Option("--scheduler", help="also create tokens for an external scheduler")
    ] = False,
    rotate: Annotated[
        Literal["prepare", "switch", "finish"] | None,
        typer.Option(
            help="prepare: new tokens are accepted too; switch: the new ones are sent; finish: only they are accepted"
        ),
    ] = None,
) -> None:
    """Create the tokens that services send to each other.

    Each service gets a folder with shown-tokens, for --peer-token-file, and accepted-tokens, for --tokens-file.
    """
    from sluice.cli import tokens as command

    for line in command.make(folder, command.Options(tuple(worker or ()), scheduler, rotate or "")):
        typer.echo(line)


def keys_help(context: typer.Context) -> None:
    """Manage the API keys of the gateway."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def keys_create(
    name: Annotated[str, typer.Argument(help="descriptive name of the key, such as its owner")],
    file: KeysFile,
    requests_per_minute: Annotated[int, typer.Option(help="maximum requests per minute; 0: no limit")] = 0,
    tokens_per_minute: Annotated[
        int, typer.Option(help="maximum tokens of prompts and outputs per minute; 0: no limit")
    ] = 0,
    concurrency: Annotated[int, typer.Option(help="maximum concurrent requests; 0: no limit")] = 0,
    model: Annotated[
        list[str] | None, typer.Option(help="model that the key may use; may be repeated; default: all")
    ] = None,
    priority: Annotated[int, typer.Option(help="priority in the queue, 0 to 9; higher ones leave it first")] = 0,
    weight: Annotated[int, typer.Option(help="share of the queue, 1 to 100")] = 1,
    scope: Annotated[
        list[str] | None, typer.Option(help=f"scope of the key; may be repeated: {SCOPES}; default: infer")
    ] = None,
    tenant: Annotated[str, typer.Option(help="tenant, a name that groups keys; empty: a separate tenant")] = "",
) -> None:
    """Create a key and print it; it cannot be shown again."""
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
    """List the API keys with their scopes, tenants and limits."""
    from sluice.cli import keys

    keys.show(file, as_json)


def keys_set(
    key: Annotated[str, typer.Argument(help="id of the key, or the whole key")],
    file: KeysFile,
    requests_per_minute: Annotated[int | None, typer.Option(help="maximum requests per minute; 0: no limit")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="maximum tokens of prompts and outputs per minute; 0: no limit")
    ] = None,
    concurrency: Annotated[int | None, typer.Option(help="maximum concurrent requests; 0: no limit")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="model that the key may use, replacing its list; may be repeated")
    ] = None,
    any_model: Annotated[bool, typer.Option("--any-model", help="allow every model")] = False,
    priority: Annotated[
        int | None, typer.Option(help="priority in the queue, 0 to 9; higher ones leave it first")
    ] = None,
    weight: Annotated[int | None, typer.Option(help="share of the queue, 1 to 100")] = None,
    scope: Annotated[
        list[str] | None, typer.Option(help=f"scope of the key, replacing its scopes; may be repeated: {SCOPES}")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(help="tenant, a name that groups keys; empty: a separate tenant")
    ] = None,
) -> None:
    """Change a key in place; unnamed fields are kept. Gateways apply the change within a second."""
    from sluice.cli import keys

    if model and any_model:
        raise BadFlag("--model and --any-model exclude each other; pass only one of them")
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
        raise BadFlag("keys set needs at least one change, such as --scope infer --scope operate")
    changed = keys.change(file, key, **changes)
    typer.echo(f"{changed.id} ({changed.name}) has been changed")


def _words(options: list[str] | None) -> list[str]:
    """Returns the values of an option that may be repeated or contain several, separated by commas."""
    return [word.strip() for option in options or () for word in option.split(",") if word.strip()]


def keys_revoke(key: Annotated[str, typer.Argument(help="id of the key, or the whole key")], file: KeysFile) -> None:
    """Revoke a key; gateways reject it within a second."""
    from sluice.cli import keys

    revoked = keys.revoke(file, key)
    typer.echo(f"{revoked.id} ({revoked.name}) has been revoked")
