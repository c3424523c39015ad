"""Bearer tokens: digests of the tokens a service accepts, and the tokens it sends, one per service it calls.

A service that receives a token could send it to others. So no token is valid for two services: each is sent to one of
them and accepted there by its digest, which is useless to a reader of the file. Tokens are never logged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from pydantic import SecretStr

from services.common.base.errors import ErrorKind, SluiceError
from services.common.security.file_watcher import WatchedFiles
from services.common.security.identity import CALLERS, OPERATOR, SERVICES, WORKER, Caller, named

DIGEST = "sha256:"
COMMENT = "#"
ID_DIGITS = 12
_DIGEST = re.compile(rf"{DIGEST}[0-9a-f]{{64}}")

T = TypeVar("T")
Reader = Callable[[str, Sequence[tuple[int, str]]], tuple[T, ...]]
"""Parses numbered lines; the first argument names their source in messages."""


@dataclass(frozen=True)
class AcceptedToken:
    """The digest of a token, and the caller it identifies."""

    digest: bytes = field(repr=False)
    caller: Caller


@dataclass(frozen=True)
class ShownToken:
    """A token and the service, or the worker, it is sent to."""

    secret: str = field(repr=False)
    callee: str


AcceptedTokens = Callable[[], Sequence[AcceptedToken]]
"""Returns the currently valid tokens."""
ShownTokens = Callable[[str], str]
"""Returns the token for a service, such as ``router`` or ``worker/w1``; empty: none."""


def digest_of(secret: str) -> str:
    """Returns a token's entry in a file of accepted tokens."""
    return DIGEST + sha256(secret.encode()).hexdigest()


def accepted_tokens(token: SecretStr, tokens_file: Path | None) -> AcceptedTokens | None:
    """Returns the tokens a service accepts according to its settings; None when it checks none.

    Args:
        token: valid for every call.
        tokens_file: has a digest and its caller on each line; reloaded as described at WatchedFiles.

    Raises:
        SluiceError: FAILED_PRECONDITION when the file cannot be read or a line is invalid.
    """
    secret = token.get_secret_value()
    fixed = (_accepted(digest_of(secret), OPERATOR, ""),) if secret else ()
    if tokens_file is None:
        return (lambda: fixed) if fixed else None
    file = _watched_file("tokens file", tokens_file, read_accepted)
    return lambda: (*fixed, *file.value)


def shown_tokens(peer_token: SecretStr, peer_token_file: Path | None) -> ShownTokens | None:
    """Returns the tokens a service sends to those it calls, according to its settings; None when there are none.

    For a worker, the first token for it alone takes precedence over the first one for all workers.

    Raises:
        SluiceError: FAILED_PRECONDITION when a file cannot be read or a token is invalid.
    """
    sources: list[Callable[[], Sequence[ShownToken]]] = []
    if text := peer_token.get_secret_value():
        fixed = read_shown("the peer token", _numbered(text))
        sources.append(lambda: fixed)
    if peer_token_file is not None:
        file = _watched_file("peer token file", peer_token_file, read_shown)
        sources.append(lambda: file.value)
    if not sources:
        return None
    return lambda callee: _select(callee, [token for source in sources for token in source()])


def _select(callee: str, tokens: Sequence[ShownToken]) -> str:
    for name in dict.fromkeys((callee, callee.partition("/")[0])):
        for token in tokens:
            if token.callee == name:
                return token.secret
    return ""


def _watched_file(description: str, path: Path, read: Reader[T]) -> WatchedFiles[tuple[T, ...]]:
    where = f"the {description} {path}"

    def load() -> tuple[T, ...]:
        try:
            text = path.read_text("utf-8", "replace")
        except OSError as error:
            raise _invalid_file(f"The {description} {path} cannot be read: {error.strerror}.") from error
        tokens = read(where, _numbered(text))
        if not tokens:
            raise _invalid_file(f"The {description} {path} contains no token.")
        return tokens

    return WatchedFiles(f"The {description}", [path], load)


def _numbered(text: str) -> list[tuple[int, str]]:
    """Returns the non-empty, non-comment lines with their numbers."""
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return [(number, line) for number, line in lines if line and not line.startswith(COMMENT)]


def read_accepted(where: str, lines: Sequence[tuple[int, str]]) -> tuple[AcceptedToken, ...]:
    """Parses lines of ``sha256:HEX CALLER``; raises SluiceError(FAILED_PRECONDITION) for the first invalid one."""
    accepted: dict[bytes, AcceptedToken] = {}
    for number, line in lines:
        digest, _, name = line.partition(" ")
        caller = named(name.strip())
        if not _DIGEST.fullmatch(digest) or caller is None:
            raise _invalid_file(
                f"Line {number} of {where} must be the digest of a token and its caller, `{DIGEST}HEX CALLER`, with "
                f"one of {', '.join(CALLERS)} or {WORKER}/ID; tokens in plain text are not accepted there. "
                "`sluice tokens` creates the files."
            )
        token = _accepted(digest, *caller)
        previous = accepted.setdefault(token.digest, token)
        if previous.caller != token.caller:
            raise _invalid_file(
                f"Line {number} of {where} assigns the token of {previous.caller.name} to another caller."
            )
    reserved = frozenset(token.caller.worker_id for token in accepted.values()) - {""}
    return tuple(_with_reserved(token, reserved) for token in accepted.values())


def _with_reserved(token: AcceptedToken, worker_ids: frozenset[str]) -> AcceptedToken:
    if token.caller.service != WORKER or token.caller.worker_id:
        return token
    return replace(token, caller=replace(token.caller, reserved=worker_ids))


def _accepted(digest: str, service: str, worker_id: str) -> AcceptedToken:
    hexadecimal = digest.removeprefix(DIGEST)
    return AcceptedToken(bytes.fromhex(hexadecimal), Caller(service, worker_id, f"token {hexadecimal[:ID_DIGITS]}"))


def read_shown(where: str, lines: Sequence[tuple[int, str]]) -> tuple[ShownToken, ...]:
    """Parses lines of ``TOKEN CALLEE``; raises SluiceError(FAILED_PRECONDITION) for the first invalid one."""
    return tuple(_parse_shown(where, number, line) for number, line in lines)


def _parse_shown(where: str, number: int, line: str) -> ShownToken:
    secret, *callees = line.split()
    if len(callees) != 1 or named(callees[0], SERVICES) is None:
        raise _invalid_file(
            f"Line {number} of {where} must be a token and the service it is sent to, one of {', '.join(SERVICES)}, "
            f"or {WORKER}/ID for one worker. A token for several services is not accepted: each could reuse it."
        )
    return ShownToken(_checked_secret(where, number, secret), callees[0])


def _checked_secret(where: str, number: int, secret: str) -> str:
    if not (secret.isascii() and secret.isprintable()):
        raise _invalid_file(f"Line {number} of {where} has characters that cannot be sent; use printable ASCII only.")
    return secret


def _invalid_file(message: str) -> SluiceError:
    return SluiceError(ErrorKind.FAILED_PRECONDITION, message)
