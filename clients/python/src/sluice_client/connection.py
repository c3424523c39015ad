"""One HTTP/2 connection to one service, and the two kinds of calls on it."""

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
    """A method of a service: its path and what goes in and out."""

    path: str
    request: type[Q]
    answer: type[A]


class _Cancels:
    """How often the task was asked to cancel.

    grpclib wakes a waiting task by cancelling it, once or twice, and then raises something else. That must not outlive
    the call, or an asyncio.timeout around it would count those requests as its own and let a CancelledError out.
    """

    def __init__(self) -> None:
        self.count()

    def count(self) -> None:
        """Takes what there is now as given."""
        task = asyncio.current_task()
        assert task is not None  # a coroutine that waits runs in one
        self._task, self._given = task, task.cancelling()

    def forget_new(self) -> None:
        """Goes back to what was given."""
        while self._task.cancelling() > self._given:
            self._task.uncancel()


class Connection:
    """Connects on the first call and again after the connection was lost.

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
        """Ends every call under way."""
        self.closed = True
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    async def unary(self, method: Method[Q, A], request: Q, timeout_s: float) -> A:
        """One question, one answer; SluiceError for everything that can go wrong."""
        stream = self._open(method, Cardinality.UNARY_UNARY, timeout_s)
        with self._typed_errors(stream, timeout_s):
            async with stream:
                await stream.send_message(request, end=True)
                answer = await stream.recv_message()
            if answer is None:  # grpclib does not mind a connection that was closed meanwhile
                raise StreamTerminatedError("Connection closed")
        return answer

    async def stream(self, method: Method[Q, A], request: Q, timeout_s: float | None) -> AsyncGenerator[A, None]:
        """One question, many answers; ends without an error when this connection is closed from this side.

        Args:
            timeout_s: for the whole stream; None for one that goes on until somebody ends it.
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
        # A peer that is gone is noticed as soon before there is a connection as when there was one.
        return BoundedChannel(self._host, self._port, ssl=self._ssl, config=config, connect_s=2 * keepalive_s)

    @contextmanager
    def _typed_errors(self, stream: Stream[Any, Any], timeout_s: float | None) -> Iterator[_Cancels]:
        deadline = time.monotonic() + timeout_s if timeout_s is not None else None
        cancels = _Cancels()
        try:
            yield cancels
        except _CALL_FAILED as error:
            cancels.forget_new()
            late = deadline is not None and _is_over(deadline - time.monotonic(), timeout_s)
            raise self._typed(error, stream, late) from error

    def _typed(self, error: Exception, stream: Stream[Any, Any], late: bool) -> SluiceError:
        if isinstance(error, GRPCError):
            return error_of_status(error, stream.trailing_metadata or {}, self.address)
        # The service resets a stream whose deadline has passed, and its clock may be the first.
        if isinstance(error, TimeoutError) or (isinstance(error, StreamTerminatedError) and late):
            return error_of(
                ErrorKind.DEADLINE_EXCEEDED, f"{self.address} did not answer in time.", code="client_timeout"
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


def _is_over(remaining_s: float, timeout_s: float | None) -> bool:
    # grpclib tells the service whole seconds when there are more than ten.
    return remaining_s <= (1.0 if timeout_s is not None and timeout_s > 10 else 0.02)
