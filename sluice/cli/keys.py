"""`sluice keys`: creates, lists, changes and revokes API keys in the file that gateways read."""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from services.common.base.errors import SluiceError
from services.gateway.admission import keys, scopes
from services.gateway.admission.keys import ApiKey
from sluice.cli.errors import BadFlag

ID_WIDTH = 12
PIPED_WIDTH = 10_000
"""Width of the output if it is not a terminal, so that rows are not wrapped."""


def create(path: Path, name: str, **fields: Any) -> str:
    """Adds a key to the file, creating it if needed; returns the key, which cannot be shown again.

    Args:
        fields: scopes, tenant and limits, named as in ApiKey.

    Raises:
        BadFlag: a field is out of range, or the file cannot be read or written.
    """
    with _errors_as_bad_flag(), _locked(path):
        shown, record = keys.create(name, **fields)
        keys.write(path, [*(keys.read(path) if path.exists() else []), record])
    return shown


def change(path: Path, key_id: str, **changes: Any) -> ApiKey:
    """Changes scopes, tenant or limits of a key, given its id or the whole key; returns the changed key.

    Raises:
        BadFlag: the file has no such key, a field is out of range, or the file cannot be read or written.
    """
    with _errors_as_bad_flag():
        return _replace(path, key_id, lambda key: keys.changed(key, **changes))


def revoke(path: Path, key_id: str) -> ApiKey:
    """Revokes a key, given its id or the whole key; raises BadFlag if the file does not have it."""
    with _errors_as_bad_flag():
        return _replace(path, key_id, lambda key: replace(key, revoked=True))


def _replace(path: Path, key_id: str, change: Callable[[ApiKey], ApiKey]) -> ApiKey:
    key_id = key_id.split("-")[1] if key_id.startswith(f"{keys.PREFIX}-") else key_id
    with _locked(path):
        by_id = {key.id: key for key in keys.read(path)}
        if key_id not in by_id:
            raise BadFlag(f"{path} has no key {key_id}; `sluice keys list` shows the ids")
        by_id[key_id] = change(by_id[key_id])
        keys.write(path, by_id.values())
    return by_id[key_id]


def show(path: Path, as_json: bool = False) -> None:
    """Prints the keys with their scopes, tenants and limits; raises BadFlag if the file cannot be read."""
    with _errors_as_bad_flag():
        listed = keys.read(path)
    if as_json:
        print(json.dumps([_document(key) for key in listed], indent=1))
        return
    table = Table(
        Column("id", no_wrap=True, min_width=ID_WIDTH),
        "name",
        "created",
        "scopes",
        "tenant",
        "requests/min",
        "tokens/min",
        "concurrency",
        "models",
        "priority",
        "weight",
        "",
    )
    for key in listed:
        table.add_row(*_row(key))
    Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH).print(table)


def _document(key: ApiKey) -> dict[str, Any]:
    """Returns a key as JSON fields: everything except the digest of its secret."""
    return {name: value for name, value in keys.record(key).items() if name != "hash"} | {"tenant": key.owner}


def _row(key: ApiKey) -> Sequence[str]:
    limits = (key.requests_per_minute, key.tokens_per_minute, key.concurrency)
    return (
        key.id,
        key.name,
        datetime.fromtimestamp(key.created_unix_s, UTC).strftime("%Y-%m-%d"),
        ", ".join(scopes.ordered(key.scopes)) or "none",
        key.tenant or "separate",
        *(str(limit) if limit else "–" for limit in limits),
        ", ".join(key.models) or "all",
        str(key.priority),
        str(key.weight),
        "revoked" if key.revoked else "",
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Locks the file against concurrent changes."""
    if path.is_dir():
        raise BadFlag(f"--file {path} is a folder; name a file in it")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _errors_as_bad_flag() -> Iterator[None]:
    try:
        yield
    except SluiceError as error:
        raise BadFlag(error.message) from error
    except OSError as error:
        raise BadFlag(f"The API keys cannot be read or written: {error.strerror or error}") from error
