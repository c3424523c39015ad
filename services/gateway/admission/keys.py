"""API keys and their file.

A key is `sluice-ID-SECRET`. The file stores only the SHA-256 of the secret. The secret has 256 random bits, too many
for a search, so a slow hash such as scrypt would add no protection and cost every request milliseconds. The id finds
the record, and the digests are compared in constant time.
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

from services.common.base.errors import ErrorKind, SluiceError, invalid
from services.common.security.file_watcher import WatchedFiles
from services.gateway.admission import scopes
from services.gateway.admission.scopes import Scope

PREFIX = "sluice"
MAX_PRIORITY = 9
"""Priority of an API key, from 0; a key with a higher one is refused."""
MAX_WEIGHT = 100
"""Weight of an API key, from 1; a key with a higher one is refused."""
_ID = re.compile(r"[0-9a-f]{12}")
_HASH = re.compile(r"[0-9a-f]{64}")
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NO_DIGEST = "0" * 64


@dataclass(frozen=True, slots=True)
class ApiKey:
    """The record of one API key.

    Attributes:
        id: public part of the key, used in logs and limits.
        name: description for operators.
        hash: hex SHA-256 of the secret part.
        created_unix_s: creation time.
        requests_per_minute: limit, 0 for none; likewise the next two.
        tokens_per_minute: limit on prompt and output tokens together.
        concurrency: limit on requests in flight.
        models: names of the models it may use; empty for all.
        priority: 0 to 9; requests of higher priorities leave the queue first.
        weight: 1 to 100; share of the turns in the queue among keys of the same priority.
        revoked: whether it was revoked and is rejected.
        scopes: permissions.
        tenant: name of the tenant; empty for a separate tenant.
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
        """The tenant whose data and cached prefixes the key has access to; the key's id if it names no tenant."""
        return self.tenant or self.id

    @property
    def limited(self) -> bool:
        """Whether the key has any limit."""
        return bool(self.requests_per_minute or self.tokens_per_minute or self.concurrency)

    def may_use(self, model: str) -> bool:
        """Returns whether the key may use a model or LoRA adapter."""
        return Scope.INFER in self.scopes and (not self.models or model in self.models)


ANONYMOUS = ApiKey("anonymous", "anonymous", "", scopes=scopes.ALL)
"""Key of requests to a gateway without API keys; `--anonymous-scopes` restricts its scopes."""
STRANGER = ApiKey("stranger", "stranger", "", scopes=frozenset())
"""Key of requests without a valid API key to paths that need none."""


def create(name: str, **limits: Any) -> tuple[str, ApiKey]:
    """Creates a key and returns its text and its record.

    Args:
        name: description for operators.
        limits: fields of ApiKey.

    Raises:
        SluiceError: INVALID_ARGUMENT if a field is out of range.
    """
    key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    record = _read({"id": key_id, "name": name, "hash": _digest(secret), "created_unix_s": int(time.time()), **limits})
    return f"{PREFIX}-{key_id}-{secret}", record


def changed(key: ApiKey, **changes: Any) -> ApiKey:
    """Returns the key with changed fields; raises SluiceError(INVALID_ARGUMENT) if one is out of range."""
    return _read({**record(key), **changes})


def record(key: ApiKey) -> dict[str, Any]:
    """Returns the key as a JSON object for the file."""
    return {**asdict(key), "models": list(key.models), "scopes": scopes.ordered(key.scopes)}


def _digest(secret: str) -> str:
    return sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


class KeyRing:
    """A set of API keys.

    Attributes:
        tenants: number of tenants, including those of revoked keys, whose cached prefixes must stay inaccessible.
    """

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys: Mapping[str, ApiKey] = {key.id: key for key in keys}
        self.tenants = len({key.owner for key in self._keys.values()})

    def __len__(self) -> int:
        return len(self._keys)

    def by_id(self, key_id: str) -> ApiKey | None:
        """Returns the record of a key that is not revoked, by its public part, else None."""
        key = self._keys.get(key_id)
        return None if key is None or key.revoked else key

    def find(self, credential: str) -> ApiKey | None:
        """Returns the record of a valid key, else None."""
        prefix, _, rest = credential.partition("-")
        key_id, _, secret = rest.partition("-")
        key = self._keys.get(key_id)
        same = hmac.compare_digest(_digest(secret), key.hash if key is not None else _NO_DIGEST)
        return key if same and key is not None and not key.revoked and prefix == PREFIX else None


class KeyFile:
    """The keys of a file, reloaded within a second of a change; an invalid or missing file keeps the previous keys.

    Raises:
        SluiceError: FAILED_PRECONDITION if it cannot be read at first.
    """

    def __init__(self, path: Path) -> None:
        self._rings = WatchedFiles("the file of API keys", (path,), lambda: KeyRing(read(path)))

    @property
    def ring(self) -> KeyRing:
        """The current keys."""
        return self._rings.value


def read(path: Path) -> list[ApiKey]:
    """Returns the keys of a file; raises SluiceError(FAILED_PRECONDITION) if it is invalid."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    except ValueError as error:
        raise _unreadable(path, "it is not valid JSON") from error
    found = content.get("keys") if isinstance(content, dict) else None
    if not isinstance(found, list):
        raise _unreadable(path, 'the list "keys" is missing')
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
    """Replaces the file atomically, readable only by its owner; raises OSError."""
    content = {"keys": [record(key) for key in keys]}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


_NAMES = frozenset(field.name for field in fields(ApiKey))
_RANGES = {
    "created_unix_s": (0, 1 << 53),
    "requests_per_minute": (0, 1_000_000_000),
    "tokens_per_minute": (0, 1_000_000_000_000),
    "concurrency": (0, 1_000_000),
    "priority": (0, MAX_PRIORITY),
    "weight": (1, MAX_WEIGHT),
}


def _read(each: Any) -> ApiKey:
    if not isinstance(each, dict):
        raise invalid("a key must be an object.")
    if unknown := each.keys() - _NAMES:
        raise invalid(f"the field {min(unknown)} is unknown.")
    for name, pattern in (("id", _ID), ("hash", _HASH)):
        if not (isinstance(each.get(name), str) and pattern.fullmatch(each[name])):
            raise invalid(f"{name} is not what `sluice keys create` writes.", param=name)
    if not isinstance(each.get("name"), str) or not each["name"].isprintable() or not 1 <= len(each["name"]) <= 200:
        raise invalid("name must be 1 to 200 printable characters.", param="name")
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
