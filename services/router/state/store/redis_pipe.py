"""A connection of redis-py that is driven by a protocol: a round trip costs a sixth of one through its streams.

redis-py connects: names, TLS, logins and sentinels are its own. After that, its StreamReader, its locks and its
pool cost about 90 µs of processor time for a script whose call takes 15 µs here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from hiredis import Reader
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import InvalidResponse


class RedisPipe(asyncio.Protocol):
    """Sends commands on a connected connection, and returns their replies in order; one `run` at a time.

    Args:
        connection: of redis.asyncio with hiredis, connected; nothing else may use it until `leave`.
    """

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._transport = cast("asyncio.Transport", connection._writer.transport)
        self._replies = Reader(protocolError=InvalidResponse, replyError=connection._parser.parse_error)
        self._streams = self._transport.get_protocol()  # redis-py's, which waits for the end of the connection
        self._found: list[Any] = []
        self._wanted = 0
        self._done: asyncio.Future[None] | None = None
        self.lost = self._transport.is_closing()
        self._transport.set_protocol(self)

    async def run(self, commands: Sequence[bytes]) -> list[Any]:
        """Returns the reply, or the error, of each command; raises ConnectionError if the connection is lost."""
        if self.lost:
            raise ConnectionLost("closed while idle")
        self._found, self._wanted = [], len(commands)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.writelines(commands)
        await self._done
        return self._found

    def data_received(self, data: bytes) -> None:
        """Takes replies."""
        try:
            self._replies.feed(data)
            reply = self._replies.gets()
            while reply is not False and len(self._found) < self._wanted:
                self._found.append(reply)
                reply = self._replies.gets()
        except InvalidResponse as error:
            self._fail(error)
            self._transport.abort()
            return
        if len(self._found) == self._wanted and self._done is not None and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fails a run under way."""
        self.lost = True
        self._streams.connection_lost(exc)
        self._fail(ConnectionLost("closed by the server"))

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    def pause_writing(self) -> None:
        """Waits for nothing: what one `run` sends is bounded."""

    def resume_writing(self) -> None:
        """Continues."""

    def eof_received(self) -> bool:
        """Closes the connection."""
        return False
