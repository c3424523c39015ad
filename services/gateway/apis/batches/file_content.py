"""Sends the content of a stored file in ranges, so that a download holds only one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.base.errors import SluiceError
from services.gateway.http.inline_sender import abort
from services.gateway.http.sse import wait_for_disconnect
from services.gateway.operations.waiting import result_unless_gone

RANGE_BYTES = 256 << 10


class FileContent(Response):
    """The content of a file.

    Args:
        first: its beginning, read before the response begins, so that a store that is unavailable is an error with a
            status instead of a cut connection.
        read: returns a range by start and size; None once the file was deleted.
        size: bytes of the file.
        write_s: longest time that the client may read nothing.
    """

    media_type = "application/jsonl"

    def __init__(
        self, first: bytes, read: Callable[[int, int], Awaitable[bytes | None]], size: int, write_s: float
    ) -> None:
        super().__init__(headers={"content-length": str(size)})
        self._first = first
        self._read = read
        self._size = size
        self._write_s = write_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def transfer() -> bool:
            data: bytes | None = self._first
            sent = 0
            while data or not self._size:
                sent += len(data or b"")
                more = sent < self._size
                async with asyncio.timeout(self._write_s):
                    await send({"type": "http.response.body", "body": data, "more_body": more})
                if not more:
                    return True
                data = await self._read(sent, RANGE_BYTES)
            return False  # it was deleted meanwhile

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            complete = await result_unless_gone(partial(wait_for_disconnect, receive), transfer())
        except (TimeoutError, SluiceError):  # the client reads too slowly, or the store is unavailable
            complete = False
        if not complete:
            abort(scope)
