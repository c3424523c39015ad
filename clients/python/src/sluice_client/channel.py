"""A channel whose attempts to connect have an end: their own, or that of the channel."""

from __future__ import annotations

import asyncio
import ssl

from grpclib.client import Channel
from grpclib.config import Configuration
from grpclib.protocol import H2Protocol


class BoundedChannel(Channel):
    """grpclib's channel; its calls share one attempt, and a call without a deadline gives that none.

    Args:
        connect_s: longest that an attempt may take, seconds.
    """

    def __init__(
        self, host: str, port: int, *, ssl: ssl.SSLContext | None, config: Configuration, connect_s: float
    ) -> None:
        super().__init__(host, port, ssl=ssl, config=config)
        self._connect_s = connect_s
        self._attempt: asyncio.Timeout | None = None
        self._over = False

    async def _create_connection(self) -> H2Protocol:
        if self._over:  # a call that waited for the attempt which the end of the channel ended
            raise ConnectionError("the client is closed")
        try:
            async with asyncio.timeout(self._connect_s) as self._attempt:
                return await super()._create_connection()
        except TimeoutError as error:  # the call's own time is not over, and another address may answer
            raise ConnectionError(f"no connection within {self._connect_s:g} s") from error
        finally:
            self._attempt = None

    def close(self) -> None:
        """Ends the attempt under way as well; there is none after it."""
        self._over = True
        if self._attempt is not None:
            self._attempt.reschedule(0)
        super().close()
