"""What a service shows the services it calls, and channels that reconnect when that has changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from services.common.file_watcher import WatchedFiles
from services.common.tasks import TaskOwner

log = logging.getLogger(__name__)

ACCEPTED_WITHIN_S = 5.0
TRY_AGAIN_S = 5.0


class _RotatingChannel:
    """One connection, and how many calls are on it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.calls = 0


class RenewingChannel(grpc.aio.Channel):
    """A channel whose new calls go over a new connection once the certificates have changed.

    The old connection carries the calls that are on it to their end. While it works, a new one takes over only when the
    peer has accepted it: certificates that are replaced in the wrong order cost nothing but a warning.

    Args:
        address: for the log.
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
        self._line = _RotatingChannel(connect(tls.value))
        self._retired: set[_RotatingChannel] = set()
        self._tasks = TaskOwner()
        self._renewing: asyncio.Task[None] | None = None

    def _current(self) -> _RotatingChannel:
        credentials = self._tls.value
        generation = self._tls.generation
        if generation == self._generation or self._renewing is not None:
            return self._line
        if self._line.channel.get_state() is grpc.ChannelConnectivity.READY:
            self._renewing = self._tasks.spawn(self._renew(credentials, generation), f"renew-{self._address}")
        else:
            self._switch(_RotatingChannel(self._connect(credentials)), generation)
        return self._line

    async def _renew(self, credentials: grpc.ChannelCredentials, generation: int) -> None:
        fresh = self._connect(credentials)
        try:
            async with asyncio.timeout(ACCEPTED_WITHIN_S):
                await fresh.channel_ready()
        except TimeoutError:
            log.warning(
                "a peer does not accept the new certificate, or it does not trust the peer's",
                extra={"peer": self._address},
            )
            await fresh.close()
            await asyncio.sleep(TRY_AGAIN_S)
        else:
            self._switch(_RotatingChannel(fresh), generation)
        finally:
            self._renewing = None

    def _switch(self, line: _RotatingChannel, generation: int) -> None:
        old, self._line, self._generation = self._line, line, generation
        self._retired.add(old)
        self._close_if_done(old)

    def _close_if_done(self, line: _RotatingChannel) -> None:
        if line in self._retired and not line.calls:
            self._retired.discard(line)
            self._tasks.spawn(line.channel.close(), f"close-{self._address}")

    def _calling(self, make: Callable[[grpc.aio.Channel], Any]) -> Any:
        line: _RotatingChannel | None = None
        method: Any = None

        def ended(line: _RotatingChannel) -> None:
            line.calls -= 1
            self._close_if_done(line)

        def call(*args: Any, **more: Any) -> Any:
            nonlocal line, method
            current = self._current()
            if current is not line:
                line, method = current, make(current.channel)
            started = method(*args, **more)
            current.calls += 1
            started.add_done_callback(lambda _: ended(current))
            return started

        return call

    def unary_unary(self, *args: Any, **more: Any) -> Any:
        return self._calling(lambda channel: channel.unary_unary(*args, **more))

    def unary_stream(self, *args: Any, **more: Any) -> Any:
        return self._calling(lambda channel: channel.unary_stream(*args, **more))

    def stream_unary(self, *args: Any, **more: Any) -> Any:
        return self._calling(lambda channel: channel.stream_unary(*args, **more))

    def stream_stream(self, *args: Any, **more: Any) -> Any:
        return self._calling(lambda channel: channel.stream_stream(*args, **more))

    async def __aenter__(self) -> RenewingChannel:
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._tasks.close()
        for line in (self._line, *self._retired):
            await line.channel.close(grace)
        self._retired.clear()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        with self._used() as channel:
            await channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        with self._used() as channel:
            await channel.channel_ready()

    @contextmanager
    def _used(self) -> Iterator[grpc.aio.Channel]:
        """Whoever waits for a connection uses it: it is not closed under them."""
        line = self._current()
        line.calls += 1
        try:
            yield line.channel
        finally:
            line.calls -= 1
            self._close_if_done(line)
