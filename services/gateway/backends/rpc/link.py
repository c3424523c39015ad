"""Base class of the links to workers and postprocess replicas, which keep a session open and reconnect."""

from __future__ import annotations

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from math import inf
from typing import Any, Generic, TypeVar

import grpc

from services.common.base.errors import ErrorKind, SluiceError
from services.common.rpc.breaker import Breaker
from services.common.rpc.errors import passed_on
from services.common.rpc.session import ClientSession
from services.gateway.core.stream_view import S

log = logging.getLogger(__name__)

MAX_CONNECT_S = 3.0
"""Seconds of an attempt to connect to a worker or a postprocess replica; then another follows."""
BACKOFF_S = (0.1, 2.0)
INVALID_BACKOFF_S = (0.5, 30.0)
"""Backoff after sessions that ended with an invalid message, to bound the cost of reconnecting and logging."""

In = TypeVar("In")
Out = TypeVar("Out")


T = TypeVar("T")


def take_within(pending: list[tuple[T, int]], max_bytes: int) -> list[T]:
    """Removes and returns the first messages, each with its size, that fit into `max_bytes`; at least one."""
    count, size = 0, 0
    while count < len(pending):
        size += pending[count][1]
        if count and size > max_bytes:
            break
        count += 1
    taken = [message for message, _ in pending[:count]]
    del pending[:count]
    return taken


class Link(ABC, Generic[Out, In, S]):
    """A connection to one peer with one session at a time.

    Args:
        peer: name of the peer for messages, such as ``worker worker-0``.
        channel: channel to the peer.
        connect_timeout_s: timeout of a connection attempt.
        on_lost: called when a session has ended, with all of its streams.
        max_pause_s: longest pause between two messages under load.
        parse: parses messages that the call returns unparsed, to None if it cannot; see ClientSession.

    Attributes:
        streams: streams of the session by slot; rows and events of other slots are dropped.
        retired: whether the link accepts no new streams and is closed after the last one.
        sessions: number of sessions opened so far; it increases when the peer returns.
        breaker: circuit breaker of the peer.
        lost: whether no further session is opened.
    """

    def __init__(
        self,
        peer: str,
        channel: grpc.aio.Channel,
        connect_timeout_s: float,
        on_lost: Callable[[SluiceError], None],
        max_pause_s: float = 0.0,
        parse: Callable[[Any], Awaitable[Any]] | None = None,
    ) -> None:
        self.peer = peer
        self._parse = parse
        self.streams: dict[int, S] = {}
        self.retired = False
        self.sessions = 0
        self.breaker = Breaker()
        self.lost = False
        self._channel = channel
        self._connect_timeout_s = connect_timeout_s
        self._on_lost = on_lost
        self._max_pause_s = max_pause_s
        self._connected = asyncio.Event()
        self._session: ClientSession[Out, In] | None = None
        self._abandoned = False
        self._protocol_error: SluiceError | None = None

    @property
    def live(self) -> int:
        """Number of streams on this link."""
        return len(self.streams)

    def adopt(self, stream: S) -> None:
        """Accepts messages of the peer for a stream."""
        self.streams[stream.slot] = stream

    def release(self, stream: S) -> None:
        """Drops further messages of the peer for a stream; does nothing if it is not on this link."""
        self.streams.pop(stream.slot, None)

    @property
    def connected(self) -> bool:
        """Whether a session is open."""
        return self._connected.is_set()

    async def ready(self, most_s: float = inf) -> None:
        """Waits for the session, at most `most_s` seconds; raises SluiceError(CANNOT_CONNECT) on timeout."""
        if self._connected.is_set():
            return
        try:
            async with asyncio.timeout(min(self._connect_timeout_s, most_s)):
                await self._connected.wait()
        except TimeoutError:
            raise SluiceError(ErrorKind.CANNOT_CONNECT, f"The {self.peer} cannot be reached.") from None

    async def run(self) -> None:
        """Keeps a session open until cancelled or given up."""
        backoff, invalid_backoff = BACKOFF_S[0], INVALID_BACKOFF_S[0]
        while not self.lost:
            error = await self._run_session()
            if error is not None:
                log.warning("%s", error.message)
                backoff = BACKOFF_S[0]
                self._on_lost(error)
            if self._protocol_error is not None:
                backoff = invalid_backoff
                invalid_backoff = min(invalid_backoff * 2, INVALID_BACKOFF_S[1])
            await asyncio.sleep(backoff * random.uniform(0.5, 1.5))
            backoff = min(backoff * 2, BACKOFF_S[1])

    async def _run_session(self) -> SluiceError | None:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await self._channel.channel_ready()
        except (TimeoutError, grpc.aio.UsageError):  # UsageError: the channel was closed, this link follows
            return None
        self._session = ClientSession(
            self.peer, self._open_call, self._drain, self._receive, self._max_pause_s, self._parse
        )
        self._abandoned = False
        self._protocol_error = None
        self.sessions += 1
        self._connected.set()
        try:
            self._on_connected()
            error = passed_on(await self._session.run(), self.peer)
            return self._protocol_error or error
        finally:
            self._connected.clear()
            self._session = None
            self._reset()

    def _wake(self) -> None:
        if self._session is not None:
            self._session.wake()

    def break_off(self) -> None:
        """Ends the session as if the peer was lost."""
        if self._session is not None:
            self._session.close()

    def give_up(self) -> None:
        """Ends the session as if the peer was lost, and opens no other."""
        self.lost = True
        self.break_off()

    def abandon(self) -> None:
        """Ends the session and ignores any further messages of the peer on it."""
        self._abandoned = True
        self.break_off()

    def _receive(self, message: In | None) -> bool | None:
        """Handles a message; returns False if it had no effect."""
        if self._abandoned:
            return False
        if message is None:  # it could not be parsed, which has been logged
            self._end_invalid(self._invalid_message(""))
            return False
        try:
            return self._on_message(message)
        except SluiceError as error:
            self._end_invalid(self._invalid_message(f": {error.message}"))
        except Exception:  # a bug in this process: log the traceback
            log.exception("handling a message of the %s failed; ending its session", self.peer)
            self._end_invalid(self._invalid_message(""))
        return False

    def _invalid_message(self, reason: str) -> SluiceError:
        return SluiceError(ErrorKind.INTERNAL, f"The {self.peer} sent an invalid message{reason or '.'}")

    def _end_invalid(self, error: SluiceError) -> None:
        """Ends the session because of an invalid message.

        Args:
            error: must not be retryable, because output of the session's streams may be missing.
        """
        self._protocol_error = error
        self.breaker.trip()
        self.abandon()

    def _on_connected(self) -> None:
        """Called when a session is open, before its first message."""

    @abstractmethod
    def _open_call(self) -> grpc.aio.StreamStreamCall[Out, In]:
        """Starts the RPC of a session."""

    @abstractmethod
    def _drain(self) -> Out | None:
        """Returns the next message to send, or None."""

    @abstractmethod
    def _on_message(self, message: In) -> bool:
        """Handles a message of the peer; returns False if it concerned no stream."""

    @abstractmethod
    def _reset(self) -> None:
        """Discards pending messages of a closed session."""
