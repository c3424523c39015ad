"""The addresses that loads use, and clients that go to another one when a server is gone."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import httpx
from websockets.exceptions import ConnectionClosed

from tests.support.faults.access import PLAIN, Access

T = TypeVar("T")

SILENCE_S, CONNECT_S = 20.0, 5.0
"""How long a client waits for the next byte, or for a connection."""
ELSEWHERE = ("replica is ready", "service cannot be reached", "gateway is shutting down")
"""Of the errors, retryable, of a gateway that reaches none of the services behind it, or that ends."""
UNAVAILABLE, AGAIN_S = 503, 0.5
NOT_FOUND = 404
_REFUSED = "execute_batch"
"""Of grpcio's INTERNAL for a stream that was refused while its first message was written."""
CUT = (httpx.TransportError, ConnectionClosed, ConnectionError, TimeoutError, ssl.SSLError)
GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)


class RequestFailedError(Exception):
    """An answer that says that a request failed."""


def is_cut(error: BaseException) -> bool:
    """Whether an error says that the server is gone or cut off, not what it thinks of the request."""
    if any(words in str(error) for words in ELSEWHERE):
        return True
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code() in GONE or _REFUSED in (error.debug_error_string() or "")
    return isinstance(error, CUT)


@dataclass
class Attempts:
    """The servers that one request is sent to.

    Attributes:
        turn: which server is asked; the next one, once it was cut.
        retried: attempts that were cut, and repeated at the next one.
    """

    turn: int = 0
    retried: int = 0


class Entrances:
    """Clients of a suite.

    Args:
        gateways, routers, pickers: host:port of their servers.
        access: how they are reached.
    """

    def __init__(
        self, gateways: Sequence[str], routers: Sequence[str], pickers: Sequence[str], access: Access = PLAIN
    ) -> None:
        self.retries: tuple[str, ...] = ()
        """Which of gateways, routers and pickers have clients that try the next one when theirs is gone.

        With `unavailable`, clients ask again after a 503.
        """
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2)
        timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_S)
        self.access = access
        self.clients = [access.http(base_url=access.url(name), timeout=timeout, limits=limits) for name in gateways]
        self.routers = [access.channel(address, "router") for address in routers]
        self.pickers = [access.channel(address, "router") for address in pickers]

    async def connected(self) -> None:
        """Waits until routers and pickers are connected: an attempt has little time, and many loads begin at once.

        Raises:
            TimeoutError: one is not in time.
        """
        async with asyncio.timeout(SILENCE_S):
            await asyncio.gather(*(channel.channel_ready() for channel in (*self.routers, *self.pickers)))

    async def close(self) -> None:
        """Closes every connection."""
        await asyncio.gather(*(client.aclose() for client in self.clients))
        await asyncio.gather(*(channel.close() for channel in (*self.routers, *self.pickers)))

    async def at_one(self, kind: str, call: Callable[[Any], Awaitable[T]], attempts: Attempts) -> T:
        """Returns what a call says that is made at a server, and again at the next one if it is gone.

        Args:
            kind: gateways, routers or pickers.
        """
        every: dict[str, Sequence[Any]] = {
            "gateways": self.clients,
            "routers": self.routers,
            "pickers": self.pickers,
        }
        servers = every[kind]
        tries = len(servers) if kind in self.retries else 1
        for number in range(tries):
            try:
                return await call(servers[attempts.turn % len(servers)])
            except Exception as error:
                if number + 1 == tries or not is_cut(error):
                    raise
                attempts.retried += 1
                attempts.turn += 1
        raise AssertionError("the last try has returned or raised")

    async def http(self, attempts: Attempts, method: str, path: str, **more: Any) -> httpx.Response:
        """Returns the answer of a gateway; asks again after a 503, as official clients do, where that is expected.

        Raises:
            RequestFailedError: its status is an error.
        """

        async def call(client: httpx.AsyncClient) -> httpx.Response:
            response = await client.request(method, path, **more)
            if response.status_code >= 400 and not self._asks_again(response):
                raise RequestFailedError(f"{method} {path}: {response.status_code} {response.text[:300]}")
            return response

        while self._asks_again(response := await self.at_one("gateways", call, attempts)):
            attempts.retried += 1
            await asyncio.sleep(AGAIN_S)
        return response

    async def delete(self, attempts: Attempts, path: str) -> None:
        """Deletes at a gateway; what an attempt that was repeated has deleted already is deleted.

        Raises:
            RequestFailedError: its status is another error.
        """
        before = attempts.retried
        try:
            await self.http(attempts, "DELETE", path)
        except RequestFailedError as error:
            if attempts.retried == before or f": {NOT_FOUND} " not in str(error):
                raise

    def _asks_again(self, response: httpx.Response) -> bool:
        return response.status_code == UNAVAILABLE and "unavailable" in self.retries


@asynccontextmanager
async def events(client: httpx.AsyncClient, path: str, body: Any) -> AsyncIterator[AsyncIterator[str]]:
    """The data lines of a stream of server-sent events."""
    async with client.stream("POST", path, json=body) as response:
        if response.status_code >= 400:
            raise RequestFailedError(f"{path}: {response.status_code} {(await response.aread())[:300]!r}")
        yield _data(response)


async def _data(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")
