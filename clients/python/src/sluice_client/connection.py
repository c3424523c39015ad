"""One HTTP/2 connection to one service, with unary and streaming calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import betterproto2
from grpclib.client import Channel, Stream
from grpclib.config import Configuration
from grpclib.const import Cardinality
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from grpclib.metadata import Deadline
from h2.exceptions import H2Error

from sluice_client.channel import BoundedChannel
from sluice_client.errors import SluiceError, error_of, error_of_status
from sluice_client.options import Options, host_and_port
from sluice_client.wire import ErrorKind

Q = TypeVar("Q", bound=betterproto2.Message)
A = TypeVar("A", bound=betterproto2.Message)

_CALL_FAILED = (GRPCError, StreamTerminatedError, ProtocolError, H2Error, TimeoutError, OSError)


@dataclass(frozen=True, slots=True)
class Method(Generic[Q, A]):
    """Describes a method of a service: its path, request type and response type."""

    path: str
    request: type[Q]
    answer: type[A]


class _CancelCount:
    """Tracks the task's cancellation requests.

    grpclib wakes a waiting task by cancelling it, once or twice, and then raises something else. These requests must be
    removed, or an enclosing asyncio.timeout would count them as its own and raise CancelledError.
    """

    def __init__(self) -> None:
        self.count()

    def count(self) -> None:
        """Records the current number of requests."""
        task = asyncio.current_task()
        assert task is not None  # a coroutine that awaits runs in a task
        self._task, self._recorded = task, task.cancelling()

    def forget_new(self) -> None:
        """Removes the requests made since the last `count`."""
        while self._task.cancelling() > self._recorded:
            self._task.uncancel()


class Connection:
    """Connects on the first call, and again after the connection was lost.

    Args:
        address: host:port.
    """

    def __init__(self, address: str, options: Options) -> None:
        self.address = address
        self.closed = False
        self._host, self._port = host_and_port(address)
        self._options = options
        self._ssl = options.tls.context() if options.tls is not None else None
        self._channel: Channel | None = None

    def close(self) -> None:
        """Closes the connection, which ends every running call."""
        self.closed = True
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    async def unary(self, method: Method[Q, A], request: Q, timeout_s: float) -> A:
        """Makes a unary call; raises SluiceError if it fails."""
        stream = self._open(method, Cardinality.UNARY_UNARY, timeout_s)
        with self._typed_errors(stream, timeout_s):
            async with stream:
                await stream.send_message(request, end=True)
                answer = await stream.recv_message()
            if answer is None:  # grpclib reports no error for a connection closed meanwhile
                raise StreamTerminatedError("Connection closed")
        return answer

    async def stream(self, method: Method[Q, A], request: Q, timeout_s: float | None) -> AsyncGenerator[A, None]:
        """Makes a call with a response stream; ends without an error if `close` was called.

        Args:
            timeout_s: for the whole stream; None for an unlimited one.
        """
        stream = self._open(method, Cardinality.UNARY_STREAM, timeout_s)
        try:
            with self._typed_errors(stream, timeout_s) as cancels:
                async with stream:
                    await stream.send_message(request, end=True)
                    while (answer := await stream.recv_message()) is not None:
                        yield answer
                        cancels.count()
                if stream.trailing_metadata is None:
                    raise StreamTerminatedError("Connection closed")
        except SluiceError:
            if not self.closed:
                raise

    def _open(self, method: Method[Q, A], cardinality: Cardinality, timeout_s: float | None) -> Stream[Q, A]:
        if self.closed:
            raise RuntimeError("the client is closed")
        if self._channel is None:
            self._channel = self._make_channel()
        deadline = Deadline.from_timeout(timeout_s) if timeout_s is not None else None
        return self._channel.request(
            method.path,
            cardinality,
            method.request,
            method.answer,
            deadline=deadline,
            metadata=self._options.headers(),
        )

    def _make_channel(self) -> Channel:
        keepalive_s = self._options.keepalive_s
        config = Configuration(
            _keepalive_time=keepalive_s,
            _keepalive_timeout=keepalive_s,
            _http2_max_pings_without_data=0,
            _http2_min_sent_ping_interval_without_data=keepalive_s / 2,
            ssl_target_name_override=(self._options.tls.server_name or None) if self._options.tls else None,
        )
        # An unreachable peer is detected as fast while connecting as on an open connection.
        return BoundedChannel(self._host, self._port, ssl=self._ssl, config=config, connect_s=2 * keepalive_s)

    @contextmanager
    def _typed_errors(self, stream: Stream[Any, Any], timeout_s: float | None) -> Iterator[_CancelCount]:
        deadline = time.monotonic() + timeout_s if timeout_s is not None else None
        cancels = _CancelCount()
        try:
            yield cancels
        except _CALL_FAILED as error:
            cancels.forget_new()
            late = deadline is not None and _is_expired(deadline - time.monotonic(), timeout_s)
            raise self._typed(error, stream, late) from error

    def _typed(self, error: Exception, stream: Stream[Any, Any], late: bool) -> SluiceError:
        if isinstance(error, GRPCError):
            return error_of_status(error, stream.trailing_metadata or {}, self.address)
        # The service resets a stream whose deadline has expired, possibly before the client does.
        if isinstance(error, TimeoutError) or (isinstance(error, StreamTerminatedError) and late):
            return error_of(
                ErrorKind.DEADLINE_EXCEEDED,
                f"{self.address} did not respond in time; retry, or raise timeout_s.",
                code="client_timeout",
            )
        if isinstance(error, OSError):
            return error_of(
                ErrorKind.CANNOT_CONNECT,
                f"{self.address} cannot be reached: {error.strerror or error}.",
                code="cannot_connect",
                retryable=True,
            )
        return error_of(
            ErrorKind.DISCONNECTED, f"The connection to {self.address} was lost.", code="disconnected", retryable=True
        )


def _is_expired(remaining_s: float, timeout_s: float | None) -> bool:
    # grpclib sends whole seconds to the service if there are more than ten.
    return remaining_s <= (1.0 if timeout_s is not None and timeout_s > 10 else 0.02)
