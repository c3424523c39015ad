"""The replicas of a service: calls stay with one of them until it fails, then the next one is asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from sluice_client.connection import A, Connection, Method, Q
from sluice_client.errors import SluiceError
from sluice_client.options import Options
from sluice_client.wire import ErrorKind


class Replicas:
    """Args:
    addresses: host:port each, at least one; the first one is asked first.
    """

    def __init__(self, addresses: Sequence[str], options: Options) -> None:
        if not addresses:
            raise ValueError("at least one address is needed")
        self._connections = [Connection(address, options) for address in addresses]
        self._current = 0

    def close(self) -> None:
        """Ends every call under way."""
        for connection in self._connections:
            connection.close()

    async def unary(self, method: Method[Q, A], request: Q, timeout_s: float, wait_s: float = 0.0) -> A:
        """An idempotent call. Each replica is asked at most once, a lone one twice if the connection broke.

        Args:
            timeout_s: for all attempts together; each one has an equal share of what is left, the last one all of it.
            wait_s: how much of it a replica may take before it answers, as it was asked to; this is not shared.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        attempts = len(self._connections)
        while True:
            connection = self._connections[self._current]
            left = deadline - loop.time()
            try:
                share = wait_s + (left - wait_s) / max(attempts, 1)
                return await connection.unary(method, request, max(min(share, left), 0.001))
            except SluiceError as error:
                attempts -= 1
                if connection.closed or loop.time() >= deadline or not self._may_ask_again(error, attempts):
                    raise
                self._leave(connection)

    async def stream(self, method: Method[Q, A], request: Q, timeout_s: float | None) -> AsyncGenerator[A, None]:
        """A call with many answers. Not repeated when it fails, but the next call goes to the next replica."""
        connection = self._connections[self._current]
        try:
            async with aclosing(connection.stream(method, request, timeout_s)) as answers:
                async for answer in answers:
                    yield answer
        except SluiceError as error:
            if error.retryable:
                self._leave(connection)
            raise

    def _may_ask_again(self, error: SluiceError, attempts: int) -> bool:
        if len(self._connections) == 1:
            return attempts == 0 and error.kind == ErrorKind.DISCONNECTED
        return attempts > 0 and (error.retryable or error.kind == ErrorKind.DEADLINE_EXCEEDED)

    def _leave(self, connection: Connection) -> None:
        # Another call may have moved on already.
        if self._connections[self._current] is connection:
            self._current = (self._current + 1) % len(self._connections)
