"""Converts typed errors to and from gRPC: status code plus `ErrorDetail` in the trailing metadata."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError

from services.common.base.errors import ErrorKind, NoAnswerError, SluiceError, internal, no_answer, sentence
from services.common.observability import telemetry
from sluice.v1 import common_pb2

DETAIL_KEY = "sluice-error-bin"

PEER_REFUSED, PEER_CANCELLED = "peer_refused", "peer_cancelled"
"""Codes of `passed_on`."""

MAX_MESSAGE = 500
"""Characters of the message of a peer's error; the rest is dropped."""
NO_MESSAGE = "the peer sent an error without a message"
MAX_PARAM_LENGTH = 200
"""Characters of the `param` of a peer's error; the rest is dropped."""
MAX_RETRY_AFTER_MS = 600_000
"""Milliseconds of the retry hint of a peer's error; a longer hint is passed on as this."""
_CODE = re.compile(r"[a-z0-9_]{1,64}")

log = logging.getLogger(__name__)

_STATUS = {
    ErrorKind.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorKind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorKind.TOO_LARGE: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorKind.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorKind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorKind.FAILED_PRECONDITION: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorKind.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorKind.CANCELLED: grpc.StatusCode.CANCELLED,
    ErrorKind.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    ErrorKind.PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    ErrorKind.CANNOT_CONNECT: grpc.StatusCode.UNAVAILABLE,
    ErrorKind.CONNECTION_TIMEOUT: grpc.StatusCode.UNAVAILABLE,
    ErrorKind.DISCONNECTED: grpc.StatusCode.UNAVAILABLE,
    ErrorKind.ENGINE_SHUTDOWN: grpc.StatusCode.UNAVAILABLE,
    ErrorKind.STREAM_INCOMPLETE: grpc.StatusCode.UNAVAILABLE,
    ErrorKind.RESPONSE_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
}

_KIND_OF_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: ErrorKind.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND: ErrorKind.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorKind.OVERLOADED,
    grpc.StatusCode.UNAVAILABLE: ErrorKind.UNAVAILABLE,
    grpc.StatusCode.FAILED_PRECONDITION: ErrorKind.FAILED_PRECONDITION,
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorKind.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED: ErrorKind.CANCELLED,
    grpc.StatusCode.UNAUTHENTICATED: ErrorKind.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED: ErrorKind.PERMISSION_DENIED,
}


def status_of(kind: ErrorKind) -> grpc.StatusCode:
    """Returns the gRPC status of an error kind."""
    return _STATUS.get(kind, grpc.StatusCode.INTERNAL)


def to_detail(error: SluiceError) -> common_pb2.ErrorDetail:
    """Returns the wire form of an error."""
    return common_pb2.ErrorDetail(
        kind=common_pb2.ErrorKind.ValueType(int(error.kind)),
        message=error.message,
        param=error.param,
        code=error.code,
        retry_after_ms=error.retry_after_ms,
        retryable=error.retryable,
    )


def from_detail(detail: common_pb2.ErrorDetail) -> SluiceError:
    """Returns the error of a wire form, sanitized because it is logged and returned to clients.

    The message and the param are made printable and truncated to MAX_MESSAGE and MAX_PARAM_LENGTH characters, a code
    other than one word of ``a-z0-9_`` is dropped, and an unknown kind becomes INTERNAL.
    """
    try:
        kind = ErrorKind(detail.kind)
    except ValueError:
        kind = ErrorKind.INTERNAL
    return SluiceError(
        kind,
        sentence(detail.message, MAX_MESSAGE) or NO_MESSAGE,
        param=sentence(detail.param, MAX_PARAM_LENGTH),
        code=detail.code if _CODE.fullmatch(detail.code) else "",
        retry_after_ms=min(detail.retry_after_ms, MAX_RETRY_AFTER_MS),
        retryable=detail.retryable,
    )


def passed_on(error: SluiceError, peer: str) -> SluiceError:
    """Returns a peer's error as reported to the client whose request the peer was processing.

    Clients are authenticated and their cancellations handled before a peer is called. Such an error from a peer thus
    concerns the calling service, or is wrong, and another replica may succeed.

    Args:
        peer: the peer's name in the message, such as ``worker w1``.
    """
    if error.kind in (ErrorKind.UNAUTHENTICATED, ErrorKind.PERMISSION_DENIED):
        reason, code = f"The {peer} rejected this service's credentials: {error.message}", PEER_REFUSED
    elif error.kind is ErrorKind.CANCELLED:
        reason, code = f"The {peer} cancelled a request that its client did not cancel.", PEER_CANCELLED
    else:
        return error
    return SluiceError(ErrorKind.UNAVAILABLE, sentence(reason, MAX_MESSAGE), code=code, retry_after_ms=1000)


def has_detail(error: grpc.aio.AioRpcError) -> bool:
    """Returns whether a failed call was answered by the peer, not by gRPC because its connection failed."""
    return any(key == DETAIL_KEY for key, _ in error.trailing_metadata() or ())


def from_rpc_error(error: grpc.aio.AioRpcError, peer: str) -> SluiceError:
    """Returns the typed error of a failed call.

    Args:
        error: as raised by a grpc.aio call.
        peer: the service's name in the message, such as ``preprocess``.

    Returns:
        The error that the peer sent or, when the transport failed before it answered, a NoAnswerError.
    """
    for key, value in error.trailing_metadata() or ():
        if key == DETAIL_KEY and isinstance(value, bytes):
            try:
                return from_detail(common_pb2.ErrorDetail.FromString(value))
            except DecodeError:
                break
    kind = _KIND_OF_STATUS.get(error.code(), ErrorKind.INTERNAL)
    if kind is ErrorKind.OVERLOADED:  # without a detail, gRPC means a message over its size limit
        return SluiceError(ErrorKind.TOO_LARGE, f"A message to or from {peer} exceeds the size limit.")
    if kind is ErrorKind.UNAVAILABLE:
        return no_answer(f"The {peer} service cannot be reached.")
    if kind is ErrorKind.DEADLINE_EXCEEDED:
        return late_answer(peer)
    return SluiceError(kind, f"The {peer} service failed ({error.code().name.lower()}).")


def is_typed(error: grpc.aio.AioRpcError) -> bool:
    """Returns whether an error was sent by the peer itself, not by gRPC."""
    return any(key == DETAIL_KEY for key, _ in error.trailing_metadata() or ())


def late_answer(peer: str) -> SluiceError:
    """Returns the error of a call that exceeded its deadline."""
    return NoAnswerError(ErrorKind.DEADLINE_EXCEEDED, f"The {peer} service timed out.", code="stage_timeout")


async def abort(context: grpc.aio.ServicerContext, error: SluiceError) -> NoReturn:  # type: ignore[type-arg]
    """Ends an RPC with a typed error."""
    telemetry.failed(error)
    try:
        await context.abort(
            status_of(error.kind),
            error.message,
            ((DETAIL_KEY, to_detail(error).SerializeToString()),),
        )
    except grpc.aio.AbortError as aborted:
        _forget_after_task(aborted)
        raise
    raise AssertionError("context.abort always raises")


def _forget_after_task(aborted: Exception) -> None:
    """Drops the traceback of an exception that gRPC keeps with its call, once the call has ended.

    The frames of the traceback refer to the call and to its request, which may have many MiB: a cycle that only the
    garbage collector, which runs rarely, would free.
    """

    def forget(task: asyncio.Task[Any]) -> None:
        aborted.__traceback__ = aborted.__context__ = None

    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(forget)


Q = TypeVar("Q")
A = TypeVar("A")


async def answer(
    context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    handler: Callable[[Q], Awaitable[A]],
    request: Q,
) -> A:
    """Runs a unary handler; typed errors become typed statuses, others a logged INTERNAL without their text."""
    telemetry.name_request(context.invocation_metadata())
    try:
        return await handler(request)
    except SluiceError as error:
        await abort(context, error)
    except (asyncio.CancelledError, grpc.aio.AbortError):
        raise
    except Exception:
        log.exception("unexpected failure in %s", getattr(handler, "__qualname__", handler))
        await abort(context, internal("Unexpected failure; see the service's log for details."))
