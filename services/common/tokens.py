"""Tokens from settings and files: those that a service accepts, and the one that it shows. None is ever printed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from pydantic import SecretStr

from services.common.errors import ErrorKind, SluiceError
from services.common.watched import WatchedFiles

CALLERS = ("gateway", "preprocess", "router", "worker", "postprocess", "scheduler", "operator")


@dataclass(frozen=True)
class Token:
    """A secret, and the one service that may show it; an empty `caller` is everybody."""

    secret: str = field(repr=False)
    caller: str = ""
    digest: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", sha256(self.secret.encode()).digest())


class TokenFile:
    """Tokens in a file, one a line, each followed by its caller if it has one; see WatchedFiles for changes.

    Raises:
        SluiceError: FAILED_PRECONDITION when it cannot be read at first, holds no token, or names an unknown caller.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = WatchedFiles("The token file", [path], self._read)

    @property
    def tokens(self) -> tuple[Token, ...]:
        """What the file holds now."""
        return self._file.value

    def _read(self) -> tuple[Token, ...]:
        try:
            lines = self._path.read_text("utf-8", "replace").splitlines()
        except OSError as error:
            raise _wrong(f"The token file {self._path} cannot be read: {error.strerror}.") from error
        tokens = tuple(self._token(number, line) for number, line in enumerate(lines, 1) if line.strip())
        if not tokens:
            raise _wrong(f"The token file {self._path} holds no token.")
        return tokens

    def _token(self, number: int, line: str) -> Token:
        secret, *callers = line.split()
        if len(callers) > 1 or not set(callers) <= set(CALLERS):
            raise _wrong(
                f"Line {number} of the token file {self._path} must be a token, or a token and one of "
                f"{', '.join(CALLERS)}."
            )
        return Token(secret, *callers)


Tokens = Callable[[], Iterable[Token]]
"""The tokens that are valid now; for a client, the first is the one to show."""


def tokens_of(token: SecretStr, tokens_file: Path | None) -> Tokens | None:
    """Tokens as the settings give them, both kinds together; None when there are none.

    Raises:
        SluiceError: as TokenFile.
    """
    fixed = (Token(token.get_secret_value()),) if token.get_secret_value() else ()
    if tokens_file is None:
        return (lambda: fixed) if fixed else None
    file = TokenFile(tokens_file)
    return lambda: (*fixed, *file.tokens)


def first_token(token: SecretStr, tokens_file: Path | None) -> Callable[[], str] | None:
    """Gives the token to show, or None; SluiceError as TokenFile."""
    tokens = tokens_of(token, tokens_file)
    return None if tokens is None else lambda: next(iter(tokens())).secret


def _wrong(message: str) -> SluiceError:
    return SluiceError(ErrorKind.FAILED_PRECONDITION, message)
