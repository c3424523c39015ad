"""Images over real gRPC: files in parts on a session, files in a Generate call, and what is refused."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from PIL import Image

from services.common.base.packing import pack_u32
from services.common.rpc.errors import from_rpc_error
from services.common.rpc.media import span_messages
from services.common.types.media.spans import MediaKind, MediaSpan, content_hash
from services.worker.media.uploads import PART_BYTES
from services.worker.server import WorkerServer
from sluice.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from tests.support.servers.workers import Caller, hosted, stub_of
from tests.support.waiting import until

PROMPT = range(20, 60)
ERROR = common_pb2.FINISH_REASON_ERROR


def picture(colour: str, padding: int = 0) -> bytes:
    """A picture, with bytes after its end that decoders ignore."""
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48), colour).save(buffer, "PNG")
    return buffer.getvalue() + bytes(padding)


RED, BLUE = picture("#ff0000"), picture("#0000ff")


def asking(request_id: str, *files: bytes, **fields: Any) -> worker_pb2.GenerateRequest:
    spans = [
        MediaSpan(MediaKind.IMAGE, content_hash(data), 4 + 12 * number, 8, pack_u32([5]))
        for number, data in enumerate(files)
    ]
    tokens = worker_pb2.TokenPrompt(token_ids=pack_u32(PROMPT), media=span_messages(spans))
    stop = common_pb2.StopOptions(max_tokens=40)
    return worker_pb2.GenerateRequest(request_id=request_id, model="tiny", tokens=tokens, stop=stop, **fields)


def chunks(data: bytes, named: bytes = b"") -> list[worker_pb2.MediaChunk]:
    return [
        worker_pb2.MediaChunk(
            hash=named or content_hash(data), size=len(data), offset=at, data=data[at : at + PART_BYTES]
        )
        for at in range(0, len(data), PART_BYTES)
    ]


class MediaCaller(Caller):
    """A session that sends files, and remembers the drops that the worker reports."""

    def __init__(self, stub: worker_pb2_grpc.WorkerAsyncStub) -> None:
        self.dropped = b""
        super().__init__(stub)

    async def upload(self, *parts: worker_pb2.MediaChunk) -> None:
        await self._call.write(worker_pb2.WorkerSessionRequest(media=parts))

    async def error_of(self, slot: int, request: worker_pb2.GenerateRequest) -> common_pb2.ErrorDetail:
        await self.send({slot: request})
        await self.ended(slot)
        assert self.terminals[slot].finish_reason == ERROR
        return self.terminals[slot].error

    def _take(self, batch: worker_pb2.TokenBatch) -> None:
        self.dropped += batch.dropped_media
        super()._take(batch)


@pytest.fixture
async def host(folder: Path) -> AsyncIterator[WorkerServer]:
    async with hosted(folder, engine_args="media=image", media_cache_mb=1, block_size=4) as host:
        yield host


@pytest.fixture
async def stub(host: WorkerServer) -> AsyncIterator[worker_pb2_grpc.WorkerAsyncStub]:
    async with stub_of(host) as stub:
        yield stub


async def test_file_sent_once_serves_several_requests_and_their_cache(stub: worker_pb2_grpc.WorkerAsyncStub) -> None:
    caller = MediaCaller(stub)
    big = picture("#00ff00", 3 * PART_BYTES)
    await caller.upload(*chunks(big), *chunks(RED))
    await caller.send({1: asking("one", big, RED)})
    await caller.ended(1)
    await caller.send({2: asking("two", big, RED), 3: asking("three", RED, big)})
    await caller.ended(2, 3)
    assert ERROR not in [caller.terminals[slot].finish_reason for slot in (1, 2, 3)]
    assert caller.cached == {1: 0, 2: 36, 3: 4}
    assert caller.token_ids[1] == caller.token_ids[2] != caller.token_ids[3]
    await caller.close()


async def test_start_without_its_file_fails_until_the_file_is_sent(stub: worker_pb2_grpc.WorkerAsyncStub) -> None:
    caller = MediaCaller(stub)
    error = await caller.error_of(1, asking("one", RED))
    assert (error.code, error.param, error.retryable) == ("media_missing", "media", True)
    await caller.upload(*chunks(RED))
    caller.forget(1)
    await caller.send({1: asking("again", RED)})
    await caller.ended(1)
    assert caller.terminals[1].finish_reason != ERROR
    await caller.close()


async def test_dropped_files_are_reported_to_the_session_that_sent_them(
    host: WorkerServer, stub: worker_pb2_grpc.WorkerAsyncStub
) -> None:
    caller, other = MediaCaller(stub), MediaCaller(stub)
    first, second = (picture(colour, 600 << 10) for colour in ("#111111", "#222222"))
    await caller.upload(*chunks(first))
    await caller.send({1: asking("one", first)})
    await caller.ended(1)
    await other.upload(*chunks(second))
    await other.send({1: asking("two", second)})
    await other.ended(1)
    await caller._until(lambda: caller.dropped)
    assert caller.dropped == content_hash(first)
    assert other.dropped == b""
    assert (await caller.error_of(2, asking("three", first))).code == "media_missing"
    await caller.close()
    await other.close()
    assert host.worker.media.used == len(second)


async def test_generate_takes_its_files_in_the_same_message(stub: worker_pb2_grpc.WorkerAsyncStub) -> None:
    big = picture("#00ff00", 300 << 10)

    def files(*pairs: tuple[bytes, bytes]) -> list[common_pb2.MediaFile]:
        return [common_pb2.MediaFile(hash=content, data=data) for content, data in pairs]

    given = files((content_hash(RED), RED), (content_hash(big), big))
    deltas = [delta async for delta in stub.Generate(asking("one", RED, big, files=given))]
    assert deltas[-1].extra.finish_reason not in (0, ERROR)
    assert deltas[-1].extra.usage.prompt_tokens == len(PROMPT)
    for request, code in (
        (asking("two", RED, BLUE, files=given), "media_missing"),
        (asking("three", BLUE, files=files((content_hash(BLUE), RED))), "media_mismatch"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            [delta async for delta in stub.Generate(request)]
        assert from_rpc_error(refused.value, "worker").code == code


async def test_engine_without_images_refuses_them_and_keeps_no_file(folder: Path) -> None:
    async with hosted(folder) as host, stub_of(host) as stub:
        caller = MediaCaller(stub)
        await caller.upload(*chunks(RED))
        error = await caller.error_of(1, asking("one", RED))
        assert (error.code, error.param) == ("unsupported_by_engine", "media")
        assert host.worker.media.used == 0
        await caller.close()


async def test_session_that_ends_gives_back_its_unfinished_uploads_and_pins(
    host: WorkerServer, stub: worker_pb2_grpc.WorkerAsyncStub
) -> None:
    caller, after = MediaCaller(stub), MediaCaller(stub)
    big = picture("#00ff00", 3 * PART_BYTES)
    await caller.upload(*chunks(RED), chunks(big)[0])
    await caller.send({1: asking("one", RED)})
    await caller.ended(1)
    await caller.close()
    await until(lambda: host.worker.media.used == len(RED))
    large = picture("#333333", 900 << 10)
    await after.upload(*chunks(large))
    await after.send({1: asking("two", large)})
    await after.ended(1)
    assert after.terminals[1].finish_reason != ERROR
    await after.close()
