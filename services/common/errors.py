"""Typed errors: one taxonomy from the engine to the HTTP client.

Domain code raises `SluiceError`; `grpc_errors` carries it over the wire and the gateway renders it for HTTP.
"""

from __future__ import annotations

import reprlib
from enum import IntEnum
from typing import Any

MOST_MESSAGE = 2_000
"""Longest message of an error, characters: what is over it is left out, wherever the message came from."""

MOST_VALUE = 200
"""Longest value of a caller in a message, characters."""

_CUT = "…"

LONGEST_NAME = 256
"""Characters of a name that a peer chooses: of a worker, model, adapter, capability or owner."""
LONGEST_ADDRESS = 300


class ErrorKind(IntEnum):
    """The numbers of `sluice.v1.ErrorKind`."""

    INTERNAL_UNKNOWN = 0
    INVALID_ARGUMENT = 1
    NOT_FOUND = 2
    TOO_LARGE = 3
    OVERLOADED = 4
    UNAVAILABLE = 5
    FAILED_PRECONDITION = 6
    DEADLINE_EXCEEDED = 7
    CANCELLED = 8
    INTERNAL = 9
    UNAUTHENTICATED = 10
    PERMISSION_DENIED = 11
    CANNOT_CONNECT = 20
    CONNECTION_TIMEOUT = 21
    DISCONNECTED = 22
    ENGINE_SHUTDOWN = 23
    STREAM_INCOMPLETE = 24
    RESPONSE_TIMEOUT = 25


_HTTP_STATUS = {
    ErrorKind.INVALID_ARGUMENT: 400,
    ErrorKind.NOT_FOUND: 404,
    ErrorKind.TOO_LARGE: 413,
    ErrorKind.OVERLOADED: 429,
    ErrorKind.UNAVAILABLE: 503,
    ErrorKind.FAILED_PRECONDITION: 400,
    ErrorKind.DEADLINE_EXCEEDED: 504,
    ErrorKind.CANCELLED: 499,
    ErrorKind.UNAUTHENTICATED: 401,
    ErrorKind.PERMISSION_DENIED: 403,
    ErrorKind.CANNOT_CONNECT: 502,
    ErrorKind.CONNECTION_TIMEOUT: 502,
    ErrorKind.DISCONNECTED: 502,
    ErrorKind.ENGINE_SHUTDOWN: 502,
    ErrorKind.STREAM_INCOMPLETE: 502,
    ErrorKind.RESPONSE_TIMEOUT: 504,
}

_RETRYABLE = {
    ErrorKind.UNAVAILABLE,
    ErrorKind.CANNOT_CONNECT,
    ErrorKind.CONNECTION_TIMEOUT,
    ErrorKind.DISCONNECTED,
    ErrorKind.ENGINE_SHUTDOWN,
    ErrorKind.STREAM_INCOMPLETE,
}


class SluiceError(Exception):
    """Something went wrong that a caller should hear about, in one sentence.

    Args:
        kind: decides the gRPC status, the HTTP status and whether a retry makes sense.
        message: one sentence in plain words; says what to do where there is something to do. Shortened to
            `MOST_MESSAGE` characters.
        param: the field of the caller's request at fault, such as ``messages[0].role``; empty for none. Shortened to
            `MOST_VALUE` characters.
        code: stable machine-readable code, such as ``model_not_found``; empty for none.
        retry_after_ms: how long to wait before a retry, milliseconds; 0 when unknown.
        retryable: another replica may succeed right away; by default derived from the kind.
    """

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        param: str = "",
        code: str = "",
        retry_after_ms: int = 0,
        retryable: bool | None = None,
    ) -> None:
        message = shortened(message, MOST_MESSAGE)
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = shortened(param)
        self.code = shortened(code)
        self.retry_after_ms = retry_after_ms
        self.retryable = kind in _RETRYABLE if retryable is None else retryable

    @property
    def http_status(self) -> int:
        """The HTTP status a client of the gateway sees."""
        return _HTTP_STATUS.get(self.kind, 500)


def with_field(error: SluiceError, param: str, message: str) -> SluiceError:
    """Returns the same error about another field."""
    return SluiceError(
        error.kind,
        message,
        param=param,
        code=error.code,
        retry_after_ms=error.retry_after_ms,
        retryable=error.retryable,
    )


def word(error: SluiceError) -> str:
    """Returns the code of an error or, without one, its kind in lower case."""
    return error.code or error.kind.name.lower()


def shortened(text: str, most: int = MOST_VALUE) -> str:
    """Returns the text, or its beginning and "…" when it is longer than `most` characters."""
    return text if len(text) <= most else text[: most - len(_CUT)] + _CUT


def quoted(value: Any) -> str:
    """Returns a caller's value as it may stand in a message: its `repr`, shortened to about `MOST_VALUE` characters.

    The whole `repr` of a large value is never built.
    """
    return repr(shortened(value)) if isinstance(value, str) else shortened(reprlib.repr(value))


def invalid(message: str, *, param: str = "", code: str = "") -> SluiceError:
    """The request can never work."""
    return SluiceError(ErrorKind.INVALID_ARGUMENT, message, param=param, code=code)


def not_found(message: str, *, param: str = "", code: str = "") -> SluiceError:
    """A named thing is not known here."""
    return SluiceError(ErrorKind.NOT_FOUND, message, param=param, code=code)


def unavailable(message: str, *, code: str = "", retry_after_ms: int = 1000) -> SluiceError:
    """Nobody can serve this now; a retry later may work."""
    return SluiceError(ErrorKind.UNAVAILABLE, message, code=code, retry_after_ms=retry_after_ms)


def overloaded(message: str, *, retry_after_ms: int = 1000) -> SluiceError:
    """Shed to protect what is running."""
    return SluiceError(ErrorKind.OVERLOADED, message, code="overloaded", retry_after_ms=retry_after_ms)


def internal(message: str) -> SluiceError:
    """A defect of ours; the message must not carry internals."""
    return SluiceError(ErrorKind.INTERNAL, message)


def escaped(text: str) -> str:
    """Returns text on one line: everything that is not printable is written as an escape sequence, such as ``\\n``."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def sentence(text: str, most: int) -> str:
    """Returns text for an error message: white space becomes one space, the rest is escaped, and it is cut at `most`
    characters."""
    if len(text) <= most and text.isprintable():
        return text
    shown = escaped(" ".join(text[: 4 * most].split()))
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def check_name(name: str, param: str, most: int = LONGEST_NAME) -> None:
    """Checks a name that a peer chose.

    Args:
        param: the field that holds it.

    Raises:
        SluiceError: INVALID_ARGUMENT when it is longer than `most` characters or has any that is not printable.
    """
    if len(name) > most:
        raise invalid(f"{param} has {len(name)} characters; the most is {most}.", param=param)
    if not name.isprintable():
        raise invalid(f"{param} must be printable: no line breaks or other control characters.", param=param)
