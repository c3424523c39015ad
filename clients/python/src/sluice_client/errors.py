"""What can go wrong, as exceptions: one class per group of kinds, all of them SluiceError."""

from __future__ import annotations

from collections.abc import Mapping

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from sluice_client.wire import ErrorDetail, ErrorKind

DETAIL_KEY = "sluice-error-bin"


class SluiceError(Exception):
    """A call failed.

    Attributes:
        kind: what went wrong.
        message: one sentence that says what is wrong and what to do.
        param: the request field at fault; empty for none.
        code: stable and machine-readable, such as ``model_not_found``; empty for none.
        retry_after_s: how long to wait before a retry makes sense; None when unknown.
        retryable: the same request may succeed on another replica or worker right away.
    """

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        param: str = "",
        code: str = "",
        retry_after_s: float | None = None,
        retryable: bool = False,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.retryable = retryable


class InvalidRequestError(SluiceError):
    """The request can never work: an invalid argument or one that is too large."""


class NotFoundError(SluiceError):
    """The model or the worker is not known."""


class OverloadedError(SluiceError):
    """Shed or rate limited: wait for `retry_after_s`."""


class UnavailableError(SluiceError):
    """Nobody can serve this now: no worker, or a service that stops or is not ready."""


class FailedPreconditionError(SluiceError):
    """Valid, but not in this state or not with this engine."""


class DeadlineExceededError(SluiceError):
    """No answer in time."""


class RequestCancelledError(SluiceError):
    """Cancelled by somebody else, such as another caller's Abort."""


class UnauthenticatedError(SluiceError):
    """No or wrong credentials."""


class PermissionDeniedError(SluiceError):
    """Who calls is known, and may not do this."""


class ConnectionFailedError(UnavailableError):
    """The service could not be reached, or the connection to it or to its engine was lost."""


_CLASSES: Mapping[ErrorKind, type[SluiceError]] = {
    ErrorKind.INVALID_ARGUMENT: InvalidRequestError,
    ErrorKind.TOO_LARGE: InvalidRequestError,
    ErrorKind.NOT_FOUND: NotFoundError,
    ErrorKind.OVERLOADED: OverloadedError,
    ErrorKind.UNAVAILABLE: UnavailableError,
    ErrorKind.FAILED_PRECONDITION: FailedPreconditionError,
    ErrorKind.DEADLINE_EXCEEDED: DeadlineExceededError,
    ErrorKind.RESPONSE_TIMEOUT: DeadlineExceededError,
    ErrorKind.CANCELLED: RequestCancelledError,
    ErrorKind.UNAUTHENTICATED: UnauthenticatedError,
    ErrorKind.PERMISSION_DENIED: PermissionDeniedError,
    ErrorKind.CANNOT_CONNECT: ConnectionFailedError,
    ErrorKind.CONNECTION_TIMEOUT: ConnectionFailedError,
    ErrorKind.DISCONNECTED: ConnectionFailedError,
    ErrorKind.ENGINE_SHUTDOWN: ConnectionFailedError,
    ErrorKind.STREAM_INCOMPLETE: ConnectionFailedError,
}

# A status without a detail did not come from Sluice's own code: grpc itself, a proxy, or no Sluice at all.
_KINDS: Mapping[Status, ErrorKind] = {
    Status.INVALID_ARGUMENT: ErrorKind.INVALID_ARGUMENT,
    Status.NOT_FOUND: ErrorKind.NOT_FOUND,
    Status.RESOURCE_EXHAUSTED: ErrorKind.TOO_LARGE,  # grpc's word for a message over the size limit
    Status.UNAVAILABLE: ErrorKind.UNAVAILABLE,
    Status.FAILED_PRECONDITION: ErrorKind.FAILED_PRECONDITION,
    Status.UNIMPLEMENTED: ErrorKind.FAILED_PRECONDITION,
    Status.DEADLINE_EXCEEDED: ErrorKind.DEADLINE_EXCEEDED,
    Status.CANCELLED: ErrorKind.CANCELLED,
    Status.UNAUTHENTICATED: ErrorKind.UNAUTHENTICATED,
    Status.PERMISSION_DENIED: ErrorKind.PERMISSION_DENIED,
}


def error_of(kind: ErrorKind, message: str, *, code: str = "", retryable: bool = False) -> SluiceError:
    """An error of this library's own."""
    return _CLASSES.get(kind, SluiceError)(kind, message, code=code, retryable=retryable)


def error_of_detail(detail: ErrorDetail) -> SluiceError:
    """The error that a service described; a kind this version does not know is a plain SluiceError."""
    return _CLASSES.get(detail.kind, SluiceError)(
        detail.kind,
        detail.message,
        param=detail.param,
        code=detail.code,
        retry_after_s=detail.retry_after_ms / 1000 if detail.retry_after_ms else None,
        retryable=detail.retryable,
    )


def error_of_status(error: GRPCError, trailers: Mapping[str, str | bytes], peer: str) -> SluiceError:
    """The error behind a failed call.

    Args:
        error: with the call's status.
        trailers: the call's trailing metadata; it holds the detail.
        peer: address of the service, for the message when there is no detail.
    """
    found = trailers.get(DETAIL_KEY)
    if isinstance(found, bytes):
        detail = ErrorDetail.parse(found)
        if detail.kind != ErrorKind.UNSPECIFIED:
            return error_of_detail(detail)
    kind = _KINDS.get(error.status, ErrorKind.INTERNAL)
    said = f"{peer} answered {error.status.name}: {error.message or 'no reason given'}"
    return error_of(kind, said, retryable=error.status is Status.UNAVAILABLE)
