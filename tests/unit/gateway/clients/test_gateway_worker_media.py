"""Generations with media items on a real session to a worker, and their prompts from preprocess."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import grpc
import pytest

from services.common.base.errors import SluiceError
from services.common.base.packing import pack_u32
from services.common.rpc.multiplexed_call import preprocess_stub
from services.common.types.media.parts import MediaInput
from services.common.types.media.spans import MediaFile, MediaKind, MediaSpan, content_hash
from services.gateway.backends.rpc.preprocess import MEDIA_AT_ONCE, PreprocessClient
from services.gateway.backends.rpc.worker_link import WorkerLink
from services.gateway.core.context import NO_CONTEXT
from services.gateway.core.request import ChatPrompt, FinishReason, PromptMedia, TextPrompt, TokenizedPrompt
from services.gateway.streams.manager import NO_RECOVERY
from services.gateway.streams.stream import GenerationStream
from sluice.v1 import preprocess_pb2, preprocess_pb2_grpc, worker_pb2_grpc
from tests.support.fakes.media_worker import PLACEHOLDER, TOKENS_PER_ITEM, MediaPreprocess, MediaWorker, served
from tests.support.fakes.streams import MAX_TOKENS, PROMPT, REQUEST, Sink
from tests.support.waiting import until


class Ends:
    """The ends of streams, by slot: a reason or an error."""

    def __init__(self) -> None:
        self.by_slot: dict[int, Any] = {}

    def on_ended(self, stream: GenerationStream, reason: FinishReason, *rest: Any) -> None:
        self.by_slot[stream.slot] = reason

    def on_failed(self, stream: GenerationStream, error: SluiceError) -> None:
        self.by_slot[stream.slot] = error

    def on_broken(self, stream: GenerationStream, error: Exception) -> None:
        self.by_slot[stream.slot] = error

    def on_worker_lost(self, link: WorkerLink, error: SluiceError) -> None:
        self.by_slot[0] = error


@asynccontextmanager
async def linked(worker: MediaWorker, ends: Ends) -> AsyncIterator[WorkerLink]:
    async with served(lambda server: worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)) as address:
        channel = grpc.aio.insecure_channel(address)
        link = WorkerLink("w", address, channel, 5.0, ends)  # type: ignore[arg-type]
        running = asyncio.create_task(link.run())
        await link.ready()
        try:
            yield link
        finally:
            running.cancel()
            await channel.close()


def prompt_with(*contents: bytes) -> TokenizedPrompt:
    media = tuple(
        PromptMedia(
            MediaSpan(MediaKind.IMAGE, content_hash(data), 1 + at * TOKENS_PER_ITEM, TOKENS_PER_ITEM),
            MediaFile(content_hash(data), data, "image/png"),
        )
        for at, data in enumerate(contents)
    )
    return replace(PROMPT, token_ids=pack_u32([1] + [PLACEHOLDER] * TOKENS_PER_ITEM * len(contents)), media=media)


def begin(link: WorkerLink, slot: int, prompt: TokenizedPrompt) -> GenerationStream:
    stream = GenerationStream(slot, REQUEST, 0, prompt, MAX_TOKENS, Sink(), NO_CONTEXT, NO_RECOVERY)  # type: ignore[arg-type]
    link.adopt(stream)
    link.start(stream, f"r-{slot}")
    return stream


async def test_files_arrive_before_the_start_and_once_for_two_streams() -> None:
    worker, ends = MediaWorker(), Ends()  # type: ignore[abstract]
    async with linked(worker, ends) as link:
        large = b"x" * 600_000
        begin(link, 1, prompt_with(large, b"small"))
        begin(link, 2, prompt_with(large))
        await until(lambda: len(ends.by_slot) == 2)
        begin(link, 3, prompt_with(b"small"))
        await until(lambda: 3 in ends.by_slot)
    assert ends.by_slot == dict.fromkeys((1, 2, 3), FinishReason.LENGTH)
    assert worker.files == {content_hash(large): large, content_hash(b"small"): b"small"}
    assert len([entry for entry in worker.log if entry[0] == "part"]) == 4


async def test_text_stream_starts_before_the_file_of_another_is_complete() -> None:
    worker, ends = MediaWorker(), Ends()  # type: ignore[abstract]
    async with linked(worker, ends) as link:
        begin(link, 1, prompt_with(b"x" * (20 << 20)))
        begin(link, 2, PROMPT)
        await until(lambda: len(ends.by_slot) == 2)
    starts = [entry[1] for entry in worker.log if entry[0] == "start"]
    assert starts == [2, 1]
    assert worker.log.index(("start", 2)) < 10


@pytest.mark.parametrize(("times", "succeeds"), [(1, True), (2, False)])
async def test_start_whose_file_is_missing_is_repeated_once_with_the_file(times: int, succeeds: bool) -> None:
    worker, ends = MediaWorker(), Ends()  # type: ignore[abstract]
    async with linked(worker, ends) as link:
        worker.forgets = times
        begin(link, 1, prompt_with(b"small"))
        await until(lambda: 1 in ends.by_slot)
    assert [entry[0] for entry in worker.log] == ["part", "start", "part", "start"]
    if succeeds:
        assert ends.by_slot[1] is FinishReason.LENGTH
    else:
        assert ends.by_slot[1].code == "media_missing"


async def test_file_reported_as_dropped_is_sent_before_the_next_start() -> None:
    worker, ends = MediaWorker(), Ends()  # type: ignore[abstract]
    worker.drops = True
    async with linked(worker, ends) as link:
        for slot in (1, 2):
            begin(link, slot, prompt_with(b"small"))
            await until(lambda slot=slot: slot in ends.by_slot)  # type: ignore[misc]
    assert [entry[0] for entry in worker.log] == ["part", "start", "part", "start"]


async def test_stream_released_before_its_files_are_sent_never_starts() -> None:
    worker, ends = MediaWorker(), Ends()  # type: ignore[abstract]
    async with linked(worker, ends) as link:
        stream = begin(link, 1, prompt_with(b"x" * (4 << 20)))
        link.release(stream)
        link.cancel(1)
        begin(link, 2, prompt_with(b"small"))
        await until(lambda: 2 in ends.by_slot)
    assert [entry[1] for entry in worker.log if entry[0] == "start"] == [2]


async def test_released_stream_leaves_its_file_to_nothing_else() -> None:
    worker, ends = MediaWorker(), Ends()  # type: ignore[abstract]
    async with linked(worker, ends) as link:
        stream = begin(link, 1, prompt_with(b"x" * 300_000))
        await until(lambda: 1 in ends.by_slot)
        link.release(stream)
        (item,) = stream.prompt.media
        gc.collect()
        holders = [each for each in gc.get_referrers(item.file) if not isinstance(each, FrameType)]
        assert holders == [item]


@asynccontextmanager
async def preprocess(service: MediaPreprocess) -> AsyncIterator[PreprocessClient]:
    async with served(lambda server: preprocess_pb2_grpc.add_PreprocessServicer_to_server(service, server)) as address:
        client = PreprocessClient([address], None, 10.0)
        replica = _Only(address)

        async def call(method: Any, request: Any, timeout_s: float, hedge: str = "", waits: bool = False) -> Any:
            return await method(replica.stub)(request, timeout=timeout_s)

        client.replicas.call = call  # type: ignore[method-assign, assignment]
        try:
            yield client
        finally:
            await replica.channel.close()


class _Only:
    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address)
        self.stub = preprocess_stub(self.channel, 0.0)


CHAT = ChatPrompt(
    b"[]",
    media=(
        MediaInput("messages[0].content[0]", MediaKind.IMAGE, data=b"sent", media_type="image/gif"),
        MediaInput("messages[0].content[1]", MediaKind.IMAGE, url="https://example.org/a", detail="low"),
    ),
)


async def test_tokenize_with_media_returns_spans_with_sent_and_fetched_files() -> None:
    service = MediaPreprocess()  # type: ignore[abstract]
    service.fetchable["https://example.org/a"] = b"fetched"
    async with preprocess(service) as client:
        prompt = await client.tokenize("m", CHAT)
    assert prompt.length == 1 + 2 * TOKENS_PER_ITEM
    assert [(item.file.data, item.file.media_type, item.span.offset) for item in prompt.media] == [
        (b"sent", "image/gif", 1),
        (b"fetched", "image/png", 1 + TOKENS_PER_ITEM),
    ]
    sent = service.requests[0].chat.media
    assert [(item.part, item.detail) for item in sent] == [(item.part, item.detail) for item in CHAT.media]


@pytest.mark.parametrize("field", ["media", "fetched"])
async def test_tokenize_with_a_response_that_lacks_an_item_fails(field: str) -> None:
    service = MediaPreprocess()  # type: ignore[abstract]
    service.fetchable["https://example.org/a"] = b"fetched"

    def drop(response: preprocess_pb2.TokenizeResponse) -> None:
        response.ClearField(field)  # type: ignore[arg-type]

    service.change = drop
    async with preprocess(service) as client:
        with pytest.raises(SluiceError, match="other media items"):
            await client.tokenize("m", CHAT)


async def test_tokenize_of_text_does_not_wait_for_calls_with_media() -> None:
    client = PreprocessClient(["127.0.0.1:1"], None, 10.0)
    begun: list[bool] = []

    async def call(method: Any, request: Any, timeout_s: float, hedge: str = "", waits: bool = False) -> Any:
        begun.append(waits)
        if request.chat.media:
            await asyncio.Event().wait()
        return preprocess_pb2.TokenizeResponse(token_ids=pack_u32([1]))

    client.replicas.call = call  # type: ignore[method-assign, assignment]
    held = [asyncio.ensure_future(client.tokenize("m", CHAT)) for _ in range(400)]
    await until(lambda: len(begun) == MEDIA_AT_ONCE)
    async with asyncio.timeout(10):
        assert (await client.tokenize("m", TextPrompt("a", None))).length == 1
    assert begun == [True] * MEDIA_AT_ONCE + [False]
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
