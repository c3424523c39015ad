"""Typed errors: one taxonomy from the engine to the HTTP client.

Domain code raises `SluiceError`; `services.common.rpc.errors` carries it over gRPC and the gateway renders it for HTTP.
"""

from __future__ import annotations

import reprlib
from enum import IntEnum
from typing import Any

from services.common.base.sendable_text import sendable

MAX_MESSAGE_LENGTH = 2_000
"""Characters of the message of an error, also of another service; the rest is dropped."""

MAX_VALUE = 200
"""Characters of a caller's value in a message, and of an error's `param`; the rest is dropped."""

_ELLIPSIS = "…"

MAX_NAME_LENGTH = 256
"""Characters of the name of a worker, model, adapter or owner; a longer one is refused with INVALID_ARGUMENT."""
MAX_ADDRESS_LENGTH = 300
"""Characters of the address of a worker; a longer one is refused with INVALID_ARGUMENT."""


class ErrorKind(IntEnum):
    """Error kinds, with the numbers of `sluice.v1.ErrorKind`."""

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
    ErrorKind.OVERLOADED: 503,
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

SESSION_CLOSED = "session_closed"
"""Code of the loss of a session that the peer has ended in order."""
SHUTTING_DOWN = "shutting_down"
"""Code of requests that a process does not finish, because it was told to stop."""
NOT_STARTED = "not_started"
"""Code of requests that a worker refuses because its engine has failed; it has not run them."""
ENGINE_UNHEALTHY = "engine_unhealthy"
"""Code of requests that run on an engine which does not generate."""
STEP_FAILED = "step_failed"
"""Code of requests in a step of an engine that failed as a whole."""

BODY_TIMEOUT = "body_timeout"
"""Code of DEADLINE_EXCEEDED errors of a client that sends its body too slowly; their HTTP status is 408."""
RATE_LIMIT_CODES = frozenset(("rate_limit_exceeded", "request_over_token_limit"))
"""Codes of OVERLOADED errors that concern a limit of the client instead of the server; their HTTP status is 429."""

_RETRYABLE = {
    ErrorKind.UNAVAILABLE,
    ErrorKind.CANNOT_CONNECT,
    ErrorKind.CONNECTION_TIMEOUT,
    ErrorKind.DISCONNECTED,
    ErrorKind.ENGINE_SHUTDOWN,
    ErrorKind.STREAM_INCOMPLETE,
}


class SluiceError(Exception):
    """An error reported to the caller, in one sentence.

    Args:
        kind: determines the gRPC status, the HTTP status and whether a retry makes sense.
        message: one sentence that states what is wrong and, where possible, what to do; at most `MAX_MESSAGE_LENGTH`
            characters.
        param: the request field at fault, such as ``messages[0].role``; empty for none. Truncated to `MAX_VALUE`
            characters.
        code: stable machine-readable code, such as ``model_not_found``; empty for none.
        retry_after_ms: how long to wait before a retry, milliseconds; 0 when unknown.
        retryable: whether another replica may succeed right away; by default derived from the kind.
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
        message = sendable(shortened(message, MAX_MESSAGE_LENGTH))
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = sendable(shortened(param))
        self.code = sendable(shortened(code))
        self.retry_after_ms = retry_after_ms
        self.retryable = kind in _RETRYABLE if retryable is None else retryable

    def copy(self) -> SluiceError:
        """Returns an equal error to raise elsewhere: a shared one would retain the frames of all that raise it."""
        return SluiceError(
            self.kind,
            self.message,
            param=self.param,
            code=self.code,
            retry_after_ms=self.retry_after_ms,
            retryable=self.retryable,
        )

    @property
    def http_status(self) -> int:
        """The HTTP status returned to clients of the gateway."""
        if self.kind is ErrorKind.OVERLOADED and self.code in RATE_LIMIT_CODES:
            return 429
        if self.code == BODY_TIMEOUT:
            return 408
        return _HTTP_STATUS.get(self.kind, 500)


class NoAnswerError(SluiceError):
    """A peer could not be reached or has not answered: whatever it would have decided is unknown.

    Errors that a peer sends are plain `SluiceError`s, of whatever kind; they are its decision.
    """


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


def shortened(text: str, most: int = MAX_VALUE) -> str:
    """Returns the text, truncated to `most` characters and ending in "…" when it is longer."""
    return text if len(text) <= most else text[: most - len(_ELLIPSIS)] + _ELLIPSIS


def first_line(error: object, most: int) -> str:
    """Returns the first line of a message or an exception's message, at most `most` characters."""
    return str(error).strip().split("\n", 1)[0][:most]


def quoted(value: Any) -> str:
    """Returns a caller's value for use in a message: its `repr`, truncated to about `MAX_VALUE` characters.

    The full `repr` of a large value is never built.
    """
    return repr(shortened(value)) if isinstance(value, str) else shortened(reprlib.repr(value))


def invalid(message: str, *, param: str = "", code: str = "") -> SluiceError:
    """Returns an error for a request that can never succeed."""
    return SluiceError(ErrorKind.INVALID_ARGUMENT, message, param=param, code=code)


def not_found(message: str, *, param: str = "", code: str = "") -> SluiceError:
    """Returns an error for a named resource that does not exist."""
    return SluiceError(ErrorKind.NOT_FOUND, message, param=param, code=code)


def unavailable(message: str, *, code: str = "", retry_after_ms: int = 1000) -> SluiceError:
    """Returns an error for a request that cannot be served now but may succeed later."""
    return SluiceError(ErrorKind.UNAVAILABLE, message, code=code, retry_after_ms=retry_after_ms)


def no_answer(message: str, *, code: str = "service_unavailable", retry_after_ms: int = 1000) -> NoAnswerError:
    """Returns an UNAVAILABLE error for a peer that cannot be reached."""
    return NoAnswerError(ErrorKind.UNAVAILABLE, message, code=code, retry_after_ms=retry_after_ms)


def overloaded(message: str, *, retry_after_ms: int = 1000) -> SluiceError:
    """Returns an error for a request shed to protect those in progress."""
    return SluiceError(ErrorKind.OVERLOADED, message, code="overloaded", retry_after_ms=retry_after_ms)


def internal(message: str) -> SluiceError:
    """Returns an error for a defect of this software; the message must not reveal internals."""
    return SluiceError(ErrorKind.INTERNAL, message)


def escaped(text: str) -> str:
    r"""Returns text on one line, with non-printable characters as escape sequences such as ``\\n``."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def sentence(text: str, most: int) -> str:
    """Returns text for an error message: whitespace collapsed, the rest escaped, truncated to `most` characters."""
    if len(text) <= most and text.isprintable():
        return text
    sanitized = escaped(" ".join(text[: 4 * most].split()))
    return sanitized if len(sanitized) <= most else f"{sanitized[: most - 1]}…"


def check_name(name: str, param: str, most: int = MAX_NAME_LENGTH) -> None:
    """Checks a name chosen by a peer.

    Args:
        param: the field that contains it.

    Raises:
        SluiceError: INVALID_ARGUMENT when it is longer than `most` characters or contains a non-printable one.
    """
    if len(name) > most:
        raise invalid(f"{param} has {len(name)} characters; send at most {most}.", param=param)
    if not name.isprintable():
        raise invalid(f"{param} must be printable: no line breaks or other control characters.", param=param)
