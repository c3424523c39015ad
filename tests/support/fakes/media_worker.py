"""A worker that keeps media files as a session sends them, and a preprocess service that gives each one four tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from services.common.base.errors import invalid
from services.common.base.packing import pack_u32
from services.common.rpc.errors import to_detail
from services.common.types.media.spans import content_hash
from sluice.v1 import common_pb2, preprocess_pb2, preprocess_pb2_grpc, worker_pb2, worker_pb2_grpc

TOKENS_PER_ITEM = 4
PLACEHOLDER = 9


class MediaWorker(worker_pb2_grpc.WorkerServicer):
    """Fails starts whose files it does not have, and completes others at once.

    Attributes:
        files: complete files, by hash.
        log: what the session has sent, in order: ("part", hash, offset) and ("start", slot).
        forgets: number of starts before which all files are dropped without a report.
        drops: report the files as dropped after each start.
    """

    def __init__(self) -> None:
        self.files: dict[bytes, bytes] = {}
        self.log: list[tuple[Any, ...]] = []
        self.forgets = 0
        self.drops = False
        self._partial: dict[bytes, bytearray] = {}

    async def Session(self, requests: AsyncIterator[Any], _context: Any) -> AsyncIterator[worker_pb2.TokenBatch]:
        """Answers the messages of a session, each with one message."""
        async for request in requests:
            for part in request.media:
                self._keep(part)
            extras = [self._answer(start) for start in request.starts]
            dropped = b""
            if extras and self.drops:
                dropped = b"".join(self.files)
                self.files.clear()
            yield worker_pb2.TokenBatch(extras=extras, dropped_media=dropped)

    def _keep(self, part: worker_pb2.MediaChunk) -> None:
        data = self._partial.setdefault(part.hash, bytearray())
        assert part.offset == len(data)
        assert len(part.data) <= 256 << 10
        data += part.data
        self.log.append(("part", part.hash, part.offset))
        if len(data) == part.size:
            self.files[part.hash] = bytes(self._partial.pop(part.hash))
            assert content_hash(self.files[part.hash]) == part.hash

    def _answer(self, start: worker_pb2.SessionStart) -> worker_pb2.TokenExtra:
        self.log.append(("start", start.slot))
        if self.forgets:
            self.forgets -= 1
            self.files.clear()
        if any(span.hash not in self.files for span in start.request.tokens.media):
            error = to_detail(invalid("A file is missing.", code="media_missing"))
            return worker_pb2.TokenExtra(slot=start.slot, finish_reason=common_pb2.FINISH_REASON_ERROR, error=error)
        return worker_pb2.TokenExtra(slot=start.slot, finish_reason=common_pb2.FINISH_REASON_LENGTH)


class MediaPreprocess(preprocess_pb2_grpc.PreprocessServicer):
    """Returns the placeholder tokens of the items of a chat, after one token.

    Attributes:
        fetchable: files by URL.
        requests: as received.
        change: called with each response before it is sent.
    """

    def __init__(self) -> None:
        self.fetchable: dict[str, bytes] = {}
        self.requests: list[preprocess_pb2.TokenizeRequest] = []
        self.change: Callable[[preprocess_pb2.TokenizeResponse], None] = lambda response: None

    async def Tokenize(self, request: Any, _context: Any) -> preprocess_pb2.TokenizeResponse:
        """See the class."""
        self.requests.append(request)
        response = preprocess_pb2.TokenizeResponse()
        ids = [1]
        for item in request.chat.media:
            data = item.data or self.fetchable[item.url]
            key = content_hash(data)
            response.media.add(kind=item.kind, hash=key, offset=len(ids), length=TOKENS_PER_ITEM)
            ids += [PLACEHOLDER] * TOKENS_PER_ITEM
            if item.url:
                response.fetched.add(hash=key, data=data, media_type="image/png")
        response.token_ids = pack_u32(ids)
        self.change(response)
        return response


@asynccontextmanager
async def served(add: Callable[[grpc.aio.Server], None]) -> AsyncIterator[str]:
    """Serves services on a free port, and yields its address."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 64 << 20)])
    add(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
