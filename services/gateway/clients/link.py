"""A link keeps one session to one process open, and opens another one when it is lost."""

from __future__ import annotations

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Generic, TypeVar

import grpc

from services.common.errors import ErrorKind, SluiceError
from services.common.rpc.breaker import Breaker
from services.common.rpc.errors import passed_on
from services.common.rpc.session import ClientSession

if TYPE_CHECKING:
    from services.gateway.streams.stream import GenerationStream

log = logging.getLogger(__name__)

BACKOFF_S = (0.1, 2.0)
INVALID_BACKOFF_S = (0.5, 30.0)
"""Between sessions that ended because of what the peer sent: reconnecting and logging must stay cheap."""

In = TypeVar("In")
Out = TypeVar("Out")


class Link(ABC, Generic[Out, In]):
    """One peer, one session at a time.

    Args:
        peer: what is at the other end, in words for messages, such as ``worker worker-0``.
        channel: to the peer.
        connect_timeout_s: longest wait for the connection before an attempt counts as failed.
        on_lost: called when a session ended; every stream it carried is gone with it.

    Attributes:
        streams: what the peer may send something for, by slot; rows and events of other slots are dropped.
        retired: takes no new streams; closed after the last one.
        sessions: how many were opened so far; a higher number means that the peer came back.
        breaker: of what was asked of the peer.
    """

    def __init__(
        self,
        peer: str,
        channel: grpc.aio.Channel,
        connect_timeout_s: float,
        on_lost: Callable[[SluiceError], None],
    ) -> None:
        self.peer = peer
        self.streams: dict[int, GenerationStream] = {}
        self.retired = False
        self.sessions = 0
        self.breaker = Breaker()
        self._channel = channel
        self._connect_timeout_s = connect_timeout_s
        self._on_lost = on_lost
        self._connected = asyncio.Event()
        self._session: ClientSession[Out, In] | None = None
        self._abandoned = False
        self._garbled: SluiceError | None = None

    @property
    def live(self) -> int:
        """Streams this link carries now."""
        return len(self.streams)

    def adopt(self, stream: GenerationStream) -> None:
        """From now on the peer may send something for this stream."""
        self.streams[stream.slot] = stream

    def release(self, stream: GenerationStream) -> None:
        """What the peer still sends for this stream is dropped; one that is not carried here is ignored."""
        self.streams.pop(stream.slot, None)

    @property
    def connected(self) -> bool:
        """Whether a stream started now has a session to travel on."""
        return self._connected.is_set()

    async def ready(self, most_s: float = inf) -> None:
        """Waits for the connection, at most `most_s` seconds; SluiceError(CANNOT_CONNECT) when it does not come."""
        if self._connected.is_set():
            return
        try:
            await asyncio.wait_for(self._connected.wait(), min(self._connect_timeout_s, most_s))
        except TimeoutError:
            raise SluiceError(ErrorKind.CANNOT_CONNECT, f"The {self.peer} cannot be reached.") from None

    async def run(self) -> None:
        """Keeps a session open until cancelled."""
        backoff, invalid_backoff = BACKOFF_S[0], INVALID_BACKOFF_S[0]
        while True:
            error = await self._carry_one_session()
            if error is not None:
                log.warning("%s", error.message)
                backoff = BACKOFF_S[0]
                self._on_lost(error)
            if self._garbled is not None:
                backoff = invalid_backoff
                invalid_backoff = min(invalid_backoff * 2, INVALID_BACKOFF_S[1])
            await asyncio.sleep(backoff * random.uniform(0.5, 1.5))
            backoff = min(backoff * 2, BACKOFF_S[1])

    async def _carry_one_session(self) -> SluiceError | None:
        try:
            await asyncio.wait_for(self._channel.channel_ready(), self._connect_timeout_s)
        except (TimeoutError, grpc.aio.UsageError):  # or the channel was closed, and this link is about to be
            return None
        self._session = ClientSession(self.peer, self._open_call, self._drain, self._take)
        self._abandoned = False
        self._garbled = None
        self.sessions += 1
        self._connected.set()
        try:
            self._on_connected()
            error = passed_on(await self._session.run(), self.peer)
            return self._garbled or error
        finally:
            self._connected.clear()
            self._session = None
            self._reset()

    def _wake(self) -> None:
        if self._session is not None:
            self._session.wake()

    def break_off(self) -> None:
        """Ends the session from this side, as if the peer had gone."""
        if self._session is not None:
            self._session.close()

    def abandon(self) -> None:
        """Ends the session from this side; what the peer still says on it is not heard."""
        self._abandoned = True
        self.break_off()

    def _take(self, message: In | None) -> None:
        if self._abandoned:
            return
        if message is None:  # gRPC could not parse it, and has logged that
            self._end_garbled(self._invalid_message(""))
            return
        try:
            self._on_message(message)
        except SluiceError as error:
            self._end_garbled(self._invalid_message(f": {error.message}"))
        except Exception:  # a defect of this process: the trace is wanted
            log.exception("a message of the %s could not be handled; its session ends", self.peer)
            self._end_garbled(self._invalid_message(""))

    def _invalid_message(self, reason: str) -> SluiceError:
        return SluiceError(ErrorKind.INTERNAL, f"The {self.peer} sent an invalid message{reason or '.'}")

    def _end_garbled(self, error: SluiceError) -> None:
        """Ends the session because of what the peer sent.

        Args:
            error: not retryable, because what the streams of the session got may have gaps.
        """
        self._garbled = error
        self.breaker.trip()
        self.abandon()

    def _on_connected(self) -> None:
        """A session is open: what is said now travels on it."""

    @abstractmethod
    def _open_call(self) -> grpc.aio.StreamStreamCall[Out, In]:
        """Opens the RPC."""

    @abstractmethod
    def _drain(self) -> Out | None:
        """Next message to send."""

    @abstractmethod
    def _on_message(self, message: In) -> None:
        """A message came in."""

    @abstractmethod
    def _reset(self) -> None:
        """Forgets what was waiting to be sent on a session that is gone."""
