"""`sluice keys`: makes, lists and revokes API keys in the file that gateways read."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from services.common.errors import SluiceError
from services.gateway.admission import keys
from services.gateway.admission.keys import ApiKey
from sluice.cli.plan import BadFlag

ID_WIDTH = 12


def create(path: Path, name: str, **limits: Any) -> str:
    """Adds a key to the file, which is made when there is none; returns what its owner must keep: nobody can again.

    Raises:
        BadFlag: a limit is out of range, or the file cannot be read or written.
    """
    with _speaking(), _locked(path):
        shown, record = keys.create(name, **limits)
        keys.write(path, [*(keys.read(path) if path.exists() else []), record])
    return shown


def revoke(path: Path, key_id: str) -> ApiKey:
    """Makes a key invalid, given its id or the whole key; BadFlag when there is none in the file."""
    key_id = key_id.split("-")[1] if key_id.startswith(f"{keys.PREFIX}-") else key_id
    with _speaking(), _locked(path):
        known = {key.id: key for key in keys.read(path)}
        if key_id not in known:
            raise BadFlag(f"There is no key {key_id} in {path}")
        known[key_id] = replace(known[key_id], revoked=True)
        keys.write(path, known.values())
    return known[key_id]


def show(path: Path, console: Console) -> None:
    """Lists the keys and their limits; BadFlag when the file cannot be read."""
    with _speaking():
        found = keys.read(path)
    table = Table(
        Column("id", no_wrap=True, min_width=ID_WIDTH),
        "name",
        "created",
        "requests/min",
        "tokens/min",
        "at once",
        "models",
        "priority",
        "weight",
        "",
    )
    for key in found:
        table.add_row(*_row(key))
    console.print(table)


def _row(key: ApiKey) -> Sequence[str]:
    limits = (key.requests_per_minute, key.tokens_per_minute, key.concurrency)
    return (
        key.id,
        key.name,
        datetime.fromtimestamp(key.created_unix_s, UTC).strftime("%Y-%m-%d"),
        *(str(limit) if limit else "–" for limit in limits),
        ", ".join(key.models) or "all",
        str(key.priority),
        str(key.weight),
        "revoked" if key.revoked else "",
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Nobody else changes the file meanwhile."""
    if path.is_dir():
        raise BadFlag(f"--file {path} is a folder; name a file in it")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _speaking() -> Iterator[None]:
    try:
        yield
    except SluiceError as error:
        raise BadFlag(error.message) from error
    except OSError as error:
        raise BadFlag(f"The API keys cannot be kept: {error.strerror or error}") from error
