"""API keys and the file they are kept in.

A key is `sluice-ID-SECRET`. The file holds the SHA-256 of the secret, never the secret. The secret has 256 random bits:
nobody can search those, so a slow hash such as scrypt would protect nothing more and cost every request milliseconds.
The id finds the one record to compare with; that comparison takes the same time wherever the digests differ.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from services.common.errors import ErrorKind, SluiceError, invalid
from services.common.security.file_watcher import WatchedFiles
from services.gateway.admission import scopes
from services.gateway.admission.scopes import Scope

PREFIX = "sluice"
MOST_PRIORITY = 9
MOST_WEIGHT = 100
_ID = re.compile(r"[0-9a-f]{12}")
_HASH = re.compile(r"[0-9a-f]{64}")
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NOBODY = "0" * 64


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is known of one key.

    Attributes:
        id: public part of the key; names it in logs, metrics and limits.
        name: for people.
        hash: hex SHA-256 of the secret part.
        created_unix_s: when it was made.
        requests_per_minute: 0 for no limit; the same for the next two.
        tokens_per_minute: of prompts and outputs together.
        concurrency: requests under way at once.
        models: served names it may use; empty for all.
        priority: 0 to 9; requests of a higher one leave the line first.
        weight: 1 to 100; its share of the line among keys of the same priority.
        revoked: it is known and not valid any more.
        scopes: what its holder may do.
        tenant: groups keys; empty: the key is a tenant of its own.
    """

    id: str
    name: str
    hash: str
    created_unix_s: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrency: int = 0
    models: tuple[str, ...] = ()
    priority: int = 0
    weight: int = 1
    revoked: bool = False
    scopes: frozenset[Scope] = scopes.DEFAULT
    tenant: str = ""

    @property
    def owner(self) -> str:
        """The tenant whose data and whose part of the prefix cache this key reaches; the key's id where it has none."""
        return self.tenant or self.id

    @property
    def limited(self) -> bool:
        """Whether anything about it has to be counted."""
        return bool(self.requests_per_minute or self.tokens_per_minute or self.concurrency)

    def may_use(self, model: str) -> bool:
        """Whether it may use this model, or this LoRA adapter."""
        return Scope.INFER in self.scopes and (not self.models or model in self.models)


ANONYMOUS = ApiKey("anonymous", "anonymous", "", scopes=scopes.ALL)
"""Clients of a gateway without API keys; `--anonymous-scopes` narrows what they may do."""
STRANGER = ApiKey("stranger", "stranger", "", scopes=frozenset())
"""Requests without a valid key to paths that are open to them."""


def create(name: str, **limits: Any) -> tuple[str, ApiKey]:
    """A new key: what its owner must keep, and what the file keeps.

    Args:
        name: for people.
        limits: fields of ApiKey.

    Raises:
        SluiceError: INVALID_ARGUMENT for a field out of range.
    """
    key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    record = _read({"id": key_id, "name": name, "hash": _digest(secret), "created_unix_s": int(time.time()), **limits})
    return f"{PREFIX}-{key_id}-{secret}", record


def changed(key: ApiKey, **changes: Any) -> ApiKey:
    """The key with other scopes, tenant or limits; SluiceError(INVALID_ARGUMENT) for a field out of range."""
    return _read({**record(key), **changes})


def record(key: ApiKey) -> dict[str, Any]:
    """The key as the file has it."""
    return {**asdict(key), "models": list(key.models), "scopes": scopes.ordered(key.scopes)}


def _digest(secret: str) -> str:
    return sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


class KeyRing:
    """The keys that are known now.

    Attributes:
        tenants: how many there are. Those of revoked keys count: what they left in the prefix cache must stay out of
            reach when a file has one valid tenant left.
    """

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys: Mapping[str, ApiKey] = {key.id: key for key in keys}
        self.tenants = len({key.owner for key in self._keys.values()})

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, shown: str) -> ApiKey | None:
        """The valid key that was shown; None when it is none."""
        prefix, _, rest = shown.partition("-")
        key_id, _, secret = rest.partition("-")
        key = self._keys.get(key_id)
        same = hmac.compare_digest(_digest(secret), key.hash if key is not None else _NOBODY)
        return key if same and key is not None and not key.revoked and prefix == PREFIX else None


class KeyFile:
    """The keys of a file that is reloaded as described at WatchedFiles.

    Raises:
        SluiceError: FAILED_PRECONDITION if the initial load fails.
    """

    def __init__(self, path: Path) -> None:
        self._file = WatchedFiles("The API keys file", [path], lambda: KeyRing(read(path)))

    @property
    def ring(self) -> KeyRing:
        """The current keys."""
        return self._file.value


def read(path: Path) -> list[ApiKey]:
    """The keys of a file; SluiceError(FAILED_PRECONDITION) when it is not one."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    except ValueError as error:
        raise _unreadable(path, "it is no JSON") from error
    found = content.get("keys") if isinstance(content, dict) else None
    if not isinstance(found, list):
        raise _unreadable(path, 'it has no list "keys"')
    keys = []
    for number, each in enumerate(found):
        try:
            keys.append(_read(each))
        except SluiceError as error:
            raise _unreadable(path, f"keys[{number}]: {error.message}") from error
    if len({key.id for key in keys}) < len(keys):
        raise _unreadable(path, "two keys have the same id")
    return keys


def write(path: Path, keys: Iterable[ApiKey]) -> None:
    """Replaces the file in one step, readable by its owner only; OSError when that fails."""
    content = {"keys": [record(key) for key in keys]}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


_NAMES = frozenset(field.name for field in fields(ApiKey))
_RANGES = {
    "created_unix_s": (0, 1 << 53),
    "requests_per_minute": (0, 1_000_000_000),
    "tokens_per_minute": (0, 1_000_000_000_000),
    "concurrency": (0, 1_000_000),
    "priority": (0, MOST_PRIORITY),
    "weight": (1, MOST_WEIGHT),
}


def _read(each: Any) -> ApiKey:
    if not isinstance(each, dict):
        raise invalid("a key must be an object.")
    if strange := each.keys() - _NAMES:
        raise invalid(f"{sorted(strange)[0]} is unknown.")
    for name, pattern in (("id", _ID), ("hash", _HASH)):
        if not (isinstance(each.get(name), str) and pattern.fullmatch(each[name])):
            raise invalid(f"{name} is not what `sluice keys create` writes.", param=name)
    if not isinstance(each.get("name"), str) or not each["name"].isprintable() or not 1 <= len(each["name"]) <= 200:
        raise invalid("name must be a text of 1 to 200 characters.", param="name")
    for name, (least, most) in _RANGES.items():
        value = each.get(name, least)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise invalid(f"{name} must be a whole number from {least} to {most}.", param=name)
    models = each.get("models", [])
    if not isinstance(models, list | tuple) or not all(isinstance(model, str) and model for model in models):
        raise invalid("models must be a list of names.", param="models")
    if not isinstance(each.get("revoked", False), bool):
        raise invalid("revoked must be true or false.", param="revoked")
    tenant = each.get("tenant", "")
    if tenant != "" and (not isinstance(tenant, str) or not _TENANT.fullmatch(tenant) or tenant == ANONYMOUS.id):
        raise invalid(
            "tenant must be 1 to 64 letters, digits, dots, dashes or underscores, and not 'anonymous'.", param="tenant"
        )
    names = each.get("scopes", scopes.DEFAULT)
    if not isinstance(names, list | tuple | frozenset):
        raise invalid("scopes must be a list of names.", param="scopes")
    return ApiKey(**{**each, "models": tuple(models), "scopes": scopes.parse(names)})


def _unreadable(path: Path, why: str) -> SluiceError:
    return SluiceError(ErrorKind.FAILED_PRECONDITION, f"The API keys in {path} cannot be read: {why}.")
