"""A proxy before an engine's KV events, and what must hold after it was cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count

import httpx

from services.common.net.ports import free_port
from tests.support.servers.engine_file_suite import EngineFileSuite


class EventProxy:
    """Forwards TCP connections to a port of this machine, while `forwarding`.

    Args:
        target: the engine's port of KV events.

    Attributes:
        port: on which the proxy listens.
    """

    def __init__(self, target: int) -> None:
        self.port = free_port()
        self._target = target
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def endpoint(self) -> str:
        """As an entry of the file names it."""
        return f"tcp://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def forwarding(self) -> AsyncIterator[None]:
        """Forwards connections until the end of the context, which closes them."""
        server = await asyncio.start_server(self._forward, "127.0.0.1", self.port)
        try:
            yield
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def sent(self, data: bytes) -> None:
        """Is called with what the target sends, before it is forwarded."""

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        for source, target, seen in ((reader, to_writer, None), (to_reader, writer, self.sent)):
            task = asyncio.create_task(_copy(source, target, seen))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _copy(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, seen: Callable[[bytes], None] | None
) -> None:
    try:
        while part := await source.read(1 << 16):
            if seen is not None:
                seen(part)
            target.write(part)
            await target.drain()
    except ConnectionError:
        pass  # either end has gone
    finally:
        target.close()


async def cut_events_leave_no_stale_block(
    up: EngineFileSuite, clear: str, block: int, proxy: EventProxy, forwarding: AsyncExitStack, *, replays: bool = True
) -> None:
    """While the events of the only server are cut, its cache is cleared: the router must not keep a block of it.

    Args:
        clear: URL that clears the server's cache.
        forwarding: ends the proxy's connections.
        replays: whether missed events can be requested from the server.
    """
    held = [400 - place for place in range(3 * block)]
    later = [300 - place for place in range(3 * block)]
    await up.cached_tokens(held)
    await forwarding.aclose()
    async with httpx.AsyncClient(timeout=60) as client:
        (await client.post(clear)).raise_for_status()
    await up.complete(later)  # the cleared cache is published with the next step
    await forwarding.enter_async_context(proxy.forwarding())
    await up.until_index(held, held=False)
    if replays:
        await up.until_index(later, held=True)
    else:
        await _until_events_arrive(up, block)
        await up.until_index(later, held=False)
    assert await up.cached_tokens(held) == 0, "the engine's own usage: nothing was left of it"


async def _until_events_arrive(up: EngineFileSuite, block: int) -> None:
    """Completes prompts until one is indexed: what is published before the connection is back is lost."""
    async with asyncio.timeout(60):
        for number in count():
            prompt = [(100 + number + 3 * place) % 400 + 10 for place in range(2 * block)]
            await up.complete(prompt)
            with contextlib.suppress(TimeoutError):
                await up.until_index(prompt, held=True, wait_s=2)
                return


async def repeats_land_together(up: EngineFileSuite, block: int, prompts: int, start: int) -> None:
    """Each of several prompts is computed once, by one of the engines, as their own usage confirms."""
    for number in range(prompts):
        prompt = [(start + 7 * number + place) % 400 + 10 for place in range(6 * block + 5)]
        cached = [await up.cached_tokens(prompt) for _ in range(3)]
        assert cached == [0, 6 * block, 6 * block], "repeats land where the prefix is"
