"""A channel with bounded connection attempts."""

from __future__ import annotations

import asyncio
import ssl

from grpclib.client import Channel
from grpclib.config import Configuration
from grpclib.protocol import H2Protocol


class BoundedChannel(Channel):
    """Limits the connection attempts of grpclib's channel, which calls share and which otherwise have no deadline.

    Args:
        connect_s: maximum duration of an attempt, seconds.
    """

    def __init__(
        self, host: str, port: int, *, ssl: ssl.SSLContext | None, config: Configuration, connect_s: float
    ) -> None:
        super().__init__(host, port, ssl=ssl, config=config)
        self._connect_s = connect_s
        self._attempt: asyncio.Timeout | None = None
        self._closed = False

    async def _create_connection(self) -> H2Protocol:
        if self._closed:  # a call that waited for an attempt ended by `close`
            raise ConnectionError("the client is closed")
        try:
            async with asyncio.timeout(self._connect_s) as self._attempt:
                return await super()._create_connection()
        except TimeoutError as error:  # not a timeout of the call: another address may respond
            raise ConnectionError(f"no connection within {self._connect_s:g} s") from error
        finally:
            self._attempt = None

    def close(self) -> None:
        """Closes the channel, ends a running attempt and allows no new one."""
        self._closed = True
        if self._attempt is not None:
            self._attempt.reschedule(0)
        super().close()
