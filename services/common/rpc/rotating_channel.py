"""Credentials for calls to other services, and channels that reconnect when certificates change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from services.common.base.tasks import TaskOwner
from services.common.security.file_watcher import WatchedFiles

log = logging.getLogger(__name__)

READY_S = 5.0
RETRY_S = 5.0


class _Connection:
    """One connection and its number of active calls."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.calls = 0


class RenewingChannel(grpc.aio.Channel):
    """A channel whose new calls use a new connection once the certificates have changed.

    Calls in progress complete on the old connection. While that works, a new one replaces it only after the peer has
    accepted it: certificates replaced in the wrong order only cause a warning.

    Args:
        address: for log lines.
        connect: opens a channel with the given credentials.
    """

    def __init__(
        self,
        address: str,
        tls: WatchedFiles[grpc.ChannelCredentials],
        connect: Callable[[grpc.ChannelCredentials], grpc.aio.Channel],
    ) -> None:
        self._address = address
        self._tls = tls
        self._connect = connect
        self._generation = tls.generation
        self._connection = _Connection(connect(tls.value))
        self._retired: set[_Connection] = set()
        self._tasks = TaskOwner()
        self._renewing: asyncio.Task[None] | None = None

    def _current(self) -> _Connection:
        credentials = self._tls.value
        generation = self._tls.generation
        if generation == self._generation or self._renewing is not None:
            return self._connection
        if self._connection.channel.get_state() is grpc.ChannelConnectivity.READY:
            self._renewing = self._tasks.spawn(self._renew(credentials, generation), f"renew-{self._address}")
        else:
            self._switch(_Connection(self._connect(credentials)), generation)
        return self._connection

    async def _renew(self, credentials: grpc.ChannelCredentials, generation: int) -> None:
        fresh = self._connect(credentials)
        try:
            async with asyncio.timeout(READY_S):
                await fresh.channel_ready()
        except TimeoutError:
            log.warning(
                "a peer rejected the new certificate, or its certificate is not trusted",
                extra={"peer": self._address},
            )
            await fresh.close()
            await asyncio.sleep(RETRY_S)
        else:
            self._switch(_Connection(fresh), generation)
        finally:
            self._renewing = None

    def _switch(self, connection: _Connection, generation: int) -> None:
        old, self._connection, self._generation = self._connection, connection, generation
        self._retired.add(old)
        self._close_if_done(old)

    def _close_if_done(self, connection: _Connection) -> None:
        if connection in self._retired and not connection.calls:
            self._retired.discard(connection)
            self._tasks.spawn(connection.channel.close(), f"close-{self._address}")

    def _counted(self, make: Callable[[grpc.aio.Channel], Any]) -> Any:
        connection: _Connection | None = None
        method: Any = None

        def ended(connection: _Connection) -> None:
            connection.calls -= 1
            self._close_if_done(connection)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal connection, method
            current = self._current()
            if current is not connection:
                connection, method = current, make(current.channel)
            started = method(*args, **kwargs)
            current.calls += 1
            started.add_done_callback(lambda _: ended(current))
            return started

        return call

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._counted(lambda channel: channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._counted(lambda channel: channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._counted(lambda channel: channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._counted(lambda channel: channel.stream_stream(*args, **kwargs))

    async def __aenter__(self) -> RenewingChannel:
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._tasks.close()
        for connection in (self._connection, *self._retired):
            await connection.channel.close(grace)
        self._retired.clear()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        with self._in_use() as channel:
            await channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        with self._in_use() as channel:
            await channel.channel_ready()

    @contextmanager
    def _in_use(self) -> Iterator[grpc.aio.Channel]:
        """Keeps a connection open while it is waited for."""
        connection = self._current()
        connection.calls += 1
        try:
            yield connection.channel
        finally:
            connection.calls -= 1
            self._close_if_done(connection)
