"""Bearer tokens: the digests of those that a service accepts, and those that it shows, one for each service it calls.

A service that is shown a token can show it to others. So no token is good for two services: each is shown to one of
them, and accepted there by its digest, which is of no use to a reader of the file. None is ever logged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from pydantic import SecretStr

from services.common.errors import ErrorKind, SluiceError
from services.common.file_watcher import WatchedFiles
from services.common.security.identity import CALLERS, OPERATOR, SERVICES, WORKER, Caller, named

DIGEST = "sha256:"
COMMENT = "#"
ID_DIGITS = 12
_DIGEST = re.compile(rf"{DIGEST}[0-9a-f]{{64}}")

T = TypeVar("T")
Reader = Callable[[str, Sequence[tuple[int, str]]], tuple[T, ...]]
"""Reads numbered lines; the first argument names where they are from, for messages."""


@dataclass(frozen=True)
class AcceptedToken:
    """The digest of a token, and the caller that shows it."""

    digest: bytes = field(repr=False)
    caller: Caller


@dataclass(frozen=True)
class ShownToken:
    """A token, and the one service, or the one worker, that it is for."""

    secret: str = field(repr=False)
    callee: str


AcceptedTokens = Callable[[], Sequence[AcceptedToken]]
"""Returns the tokens that are valid now."""
ShownTokens = Callable[[str], str]
"""Returns the token for a service, such as ``router`` or ``worker/w1``; empty: none."""


def digest_of(secret: str) -> str:
    """Returns what a file of accepted tokens holds of a token."""
    return DIGEST + sha256(secret.encode()).hexdigest()


def accepted_tokens(token: SecretStr, tokens_file: Path | None) -> AcceptedTokens | None:
    """Returns the tokens that a service accepts, as the settings say; None when it checks none.

    Args:
        token: good for every call.
        tokens_file: holds a digest and its caller on each line; see WatchedFiles for changes.

    Raises:
        SluiceError: FAILED_PRECONDITION when the file cannot be read, or a line is not what it should be.
    """
    secret = token.get_secret_value()
    fixed = (_accepted(digest_of(secret), OPERATOR, ""),) if secret else ()
    if tokens_file is None:
        return (lambda: fixed) if fixed else None
    file = _watched("tokens file", tokens_file, read_accepted)
    return lambda: (*fixed, *file.value)


def shown_tokens(
    peer_token: SecretStr, peer_token_file: Path | None, router_token: SecretStr, router_token_file: Path | None
) -> ShownTokens | None:
    """Returns the tokens that a service shows to those that it calls, as the settings say; None when there are none.

    For a worker the first token that is for it alone counts, then the first one for workers; for the router
    `router_token` and the first line of `router_token_file` count before all others.

    Raises:
        SluiceError: FAILED_PRECONDITION when a file cannot be read, or a token is not what it should be.
    """
    sources: list[Callable[[], Sequence[ShownToken]]] = []
    for what, given, path, read in (
        ("router token", router_token, router_token_file, _read_router_token),
        ("peer token", peer_token, peer_token_file, read_shown),
    ):
        if text := given.get_secret_value():
            fixed = read(f"the {what}", _numbered(text))
            sources.append(lambda fixed=fixed: fixed)  # type: ignore[misc]
        if path is not None:
            file = _watched(f"{what} file", path, read)
            sources.append(lambda file=file: file.value)  # type: ignore[misc]
    if not sources:
        return None
    return lambda callee: _for(callee, [token for source in sources for token in source()])


def _for(callee: str, tokens: Sequence[ShownToken]) -> str:
    for wanted in dict.fromkeys((callee, callee.partition("/")[0])):
        for token in tokens:
            if token.callee == wanted:
                return token.secret
    return ""


def _watched(what: str, path: Path, read: Reader[T]) -> WatchedFiles[tuple[T, ...]]:
    where = f"the {what} {path}"

    def load() -> tuple[T, ...]:
        try:
            text = path.read_text("utf-8", "replace")
        except OSError as error:
            raise _wrong(f"The {what} {path} cannot be read: {error.strerror}.") from error
        tokens = read(where, _numbered(text))
        if not tokens:
            raise _wrong(f"The {what} {path} holds no token.")
        return tokens

    return WatchedFiles(f"The {what}", [path], load)


def _numbered(text: str) -> list[tuple[int, str]]:
    """Lines that hold something, with their numbers."""
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return [(number, line) for number, line in lines if line and not line.startswith(COMMENT)]


def read_accepted(where: str, lines: Sequence[tuple[int, str]]) -> tuple[AcceptedToken, ...]:
    """Reads lines of ``sha256:HEX CALLER``; SluiceError(FAILED_PRECONDITION) names the first that is not one."""
    found: dict[bytes, AcceptedToken] = {}
    for number, line in lines:
        digest, _, name = line.partition(" ")
        caller = named(name.strip())
        if not _DIGEST.fullmatch(digest) or caller is None:
            raise _wrong(
                f"Line {number} of {where} must be the digest of a token and its caller, `{DIGEST}HEX CALLER`, with "
                f"one of {', '.join(CALLERS)} or {WORKER}/ID; a token itself is not taken there. "
                "`sluice tokens` makes the files."
            )
        token = _accepted(digest, *caller)
        known = found.setdefault(token.digest, token)
        if known.caller != token.caller:
            raise _wrong(f"Line {number} of {where} gives the token of {known.caller.name} to another caller.")
    reserved = frozenset(token.caller.worker_id for token in found.values()) - {""}
    return tuple(_reserving(token, reserved) for token in found.values())


def _reserving(token: AcceptedToken, worker_ids: frozenset[str]) -> AcceptedToken:
    if token.caller.service != WORKER or token.caller.worker_id:
        return token
    return replace(token, caller=replace(token.caller, reserved=worker_ids))


def _accepted(digest: str, service: str, worker_id: str) -> AcceptedToken:
    hexadecimal = digest.removeprefix(DIGEST)
    return AcceptedToken(bytes.fromhex(hexadecimal), Caller(service, worker_id, f"token {hexadecimal[:ID_DIGITS]}"))


def read_shown(where: str, lines: Sequence[tuple[int, str]]) -> tuple[ShownToken, ...]:
    """Reads lines of ``TOKEN CALLEE``; SluiceError(FAILED_PRECONDITION) names the first that is not one."""
    return tuple(_shown(where, number, line) for number, line in lines)


def _shown(where: str, number: int, line: str) -> ShownToken:
    secret, *callees = line.split()
    if len(callees) != 1 or named(callees[0], SERVICES) is None:
        raise _wrong(
            f"Line {number} of {where} must be a token and the service that it is for, one of {', '.join(SERVICES)}, "
            f"or {WORKER}/ID for one worker. A token for all of them is not taken: each could show it to the others."
        )
    return ShownToken(_sendable(where, number, secret), callees[0])


def _read_router_token(where: str, lines: Sequence[tuple[int, str]]) -> tuple[ShownToken, ...]:
    """Takes the first line: a token alone, or one that is for the router."""
    for number, line in lines[:1]:
        secret, *callees = line.split()
        if callees not in ([], ["router"]):
            raise _wrong(f"Line {number} of {where} must be a token for the router, alone on the line.")
        return (ShownToken(_sendable(where, number, secret), "router"),)
    return ()


def _sendable(where: str, number: int, secret: str) -> str:
    if not (secret.isascii() and secret.isprintable()):
        raise _wrong(f"Line {number} of {where} holds characters that cannot be sent: a token is printable ASCII.")
    return secret


def _wrong(message: str) -> SluiceError:
    return SluiceError(ErrorKind.FAILED_PRECONDITION, message)
