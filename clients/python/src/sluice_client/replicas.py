"""The replicas of a service: calls use one of them until it fails, then the next one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from sluice_client.connection import A, Connection, Method, Q
from sluice_client.errors import SluiceError
from sluice_client.options import Options
from sluice_client.wire import ErrorKind


class Replicas:
    """Makes calls on one replica at a time.

    Args:
        addresses: host:port each, at least one; the first one is used first.
    """

    def __init__(self, addresses: Sequence[str], options: Options) -> None:
        if not addresses:
            raise ValueError("no address given; pass at least one host:port")
        self._connections = [Connection(address, options) for address in addresses]
        self._current = 0

    def close(self) -> None:
        """Closes all connections, which ends every running call."""
        for connection in self._connections:
            connection.close()

    async def unary(self, method: Method[Q, A], request: Q, timeout_s: float, wait_s: float = 0.0) -> A:
        """Makes an idempotent call on each replica at most once, on a single one twice if the connection broke.

        Args:
            timeout_s: for all attempts together; each has an equal share of the remaining time, the last one all of it.
            wait_s: part of it that a replica may use for the requested wait; this part is not shared.
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
                if connection.closed or loop.time() >= deadline or not self._may_retry(error, attempts):
                    raise
                self._switch_from(connection)

    async def stream(self, method: Method[Q, A], request: Q, timeout_s: float | None) -> AsyncGenerator[A, None]:
        """Makes a call with a response stream, not repeated on failure; the next call then uses the next replica."""
        connection = self._connections[self._current]
        try:
            async with aclosing(connection.stream(method, request, timeout_s)) as answers:
                async for answer in answers:
                    yield answer
        except SluiceError as error:
            if error.retryable:
                self._switch_from(connection)
            raise

    def _may_retry(self, error: SluiceError, attempts: int) -> bool:
        if len(self._connections) == 1:
            return attempts == 0 and error.kind == ErrorKind.DISCONNECTED
        return attempts > 0 and (error.retryable or error.kind == ErrorKind.DEADLINE_EXCEEDED)

    def _switch_from(self, connection: Connection) -> None:
        # Another call may already have switched.
        if self._connections[self._current] is connection:
            self._current = (self._current + 1) % len(self._connections)
