"""The exceptions: one class per group of error kinds, all derived from SluiceError."""

from __future__ import annotations

from collections.abc import Mapping

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from sluice_client.wire import ErrorDetail, ErrorKind

DETAIL_KEY = "sluice-error-bin"


class SluiceError(Exception):
    """Raised if a call fails.

    Attributes:
        kind: kind of the error.
        message: one sentence with the problem and what to do.
        param: the invalid request field; empty for none.
        code: stable and machine-readable, such as ``model_not_found``; empty for none.
        retry_after_s: seconds to wait before a retry; None if unknown.
        retryable: whether the same request may succeed immediately on another replica or worker.
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
    """Raised for a request that can never succeed: an invalid argument or one that is too large."""


class NotFoundError(SluiceError):
    """Raised for an unknown model or worker."""


class OverloadedError(SluiceError):
    """Raised for a request that was shed or rate limited; wait for `retry_after_s`."""


class UnavailableError(SluiceError):
    """Raised if the request cannot be served now: no worker, or a service that stops or is not ready."""


class FailedPreconditionError(SluiceError):
    """Raised for a request that is valid, but not in this state or not with this engine."""


class DeadlineExceededError(SluiceError):
    """Raised if there is no response in time."""


class RequestCancelledError(SluiceError):
    """Raised if another party cancelled the request, such as a caller of Abort."""


class UnauthenticatedError(SluiceError):
    """Raised for missing or wrong credentials."""


class PermissionDeniedError(SluiceError):
    """Raised if the authenticated caller is not allowed to make the call."""


class ConnectionFailedError(UnavailableError):
    """Raised if the service cannot be reached, or the connection to it or to its engine was lost."""


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

# For a status without a detail, which does not come from Sluice's code: gRPC itself, a proxy, or another server.
_KINDS: Mapping[Status, ErrorKind] = {
    Status.INVALID_ARGUMENT: ErrorKind.INVALID_ARGUMENT,
    Status.NOT_FOUND: ErrorKind.NOT_FOUND,
    Status.RESOURCE_EXHAUSTED: ErrorKind.TOO_LARGE,  # gRPC's status for a message over the size limit
    Status.UNAVAILABLE: ErrorKind.UNAVAILABLE,
    Status.FAILED_PRECONDITION: ErrorKind.FAILED_PRECONDITION,
    Status.UNIMPLEMENTED: ErrorKind.FAILED_PRECONDITION,
    Status.DEADLINE_EXCEEDED: ErrorKind.DEADLINE_EXCEEDED,
    Status.CANCELLED: ErrorKind.CANCELLED,
    Status.UNAUTHENTICATED: ErrorKind.UNAUTHENTICATED,
    Status.PERMISSION_DENIED: ErrorKind.PERMISSION_DENIED,
}


def error_of(kind: ErrorKind, message: str, *, code: str = "", retryable: bool = False) -> SluiceError:
    """Returns an error of this library."""
    return _CLASSES.get(kind, SluiceError)(kind, message, code=code, retryable=retryable)


def error_of_detail(detail: ErrorDetail) -> SluiceError:
    """Returns the error described by a service; an unknown kind becomes a plain SluiceError."""
    return _CLASSES.get(detail.kind, SluiceError)(
        detail.kind,
        detail.message,
        param=detail.param,
        code=detail.code,
        retry_after_s=detail.retry_after_ms / 1000 if detail.retry_after_ms else None,
        retryable=detail.retryable,
    )


def error_of_status(error: GRPCError, trailers: Mapping[str, str | bytes], peer: str) -> SluiceError:
    """Returns the error of a failed call.

    Args:
        error: has the call's status.
        trailers: the call's trailing metadata, which contains the detail.
        peer: address of the service, for the message if there is no detail.
    """
    encoded = trailers.get(DETAIL_KEY)
    if isinstance(encoded, bytes):
        detail = ErrorDetail.parse(encoded)
        if detail.kind != ErrorKind.UNSPECIFIED:
            return error_of_detail(detail)
    kind = _KINDS.get(error.status, ErrorKind.INTERNAL)
    message = f"{peer} returned {error.status.name}: {error.message or 'no reason given'}"
    return error_of(kind, message, retryable=error.status is Status.UNAVAILABLE)
