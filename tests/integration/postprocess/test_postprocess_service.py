"""The postprocess service over real gRPC."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import TypeAlias

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.base.errors import ErrorKind
from services.common.base.packing import pack_u32, unpack_u32
from services.common.base.tasks import Stop
from services.common.rpc.channels import open_channel
from services.common.rpc.errors import from_rpc_error
from services.common.rpc.server import GrpcServer
from services.postprocess import service as postprocess
from services.postprocess.settings import PostprocessSettings
from services.postprocess.streams.factory import INLINE_TOKENS
from services.postprocess.streams.session import SessionLimits
from sluice.v1 import common_pb2, postprocess_pb2, postprocess_pb2_grpc
from tests.support.data.tiny_models import build_tiny_model
from tests.support.data.vocabularies import byte_level

WAIT_S = 60
TEXT = "What is the weather in Paris today? 😀🎉 你好世界 Grüße. "
Request = postprocess_pb2.PostSessionRequest
Call: TypeAlias = "grpc.aio.StreamStreamCall[Request, postprocess_pb2.TextBatch]"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("postprocess") / "tiny")


class Service:
    """One running service and a channel to it."""

    def __init__(self, channel: grpc.aio.Channel, stop: Stop, serving: asyncio.Task[None]) -> None:
        self.channel, self.stop, self.serving = channel, stop, serving
        self.stub = postprocess_pb2_grpc.PostprocessStub(channel)

    async def ready(self) -> None:
        """Waits until the health says so."""
        async with asyncio.timeout(WAIT_S):
            async for answer in health_pb2_grpc.HealthStub(self.channel).Watch(
                health_pb2.HealthCheckRequest(), wait_for_ready=True
            ):
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return


async def started(model: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> AsyncIterator[Service]:
    ports: asyncio.Queue[int] = asyncio.Queue()

    class Reporting(GrpcServer):
        async def start(self) -> None:
            await super().start()
            ports.put_nowait(self.port)

    monkeypatch.setattr(postprocess, "GrpcServer", Reporting)
    settings = PostprocessSettings.load(["--listen", "127.0.0.1:0", "--models", f"tiny={model}", *flags])
    stop = Stop()
    serving = asyncio.create_task(postprocess.serve(settings, stop))
    port = await asyncio.wait_for(ports.get(), WAIT_S)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield Service(channel, stop, serving)
        stop.set()
        await asyncio.wait_for(serving, WAIT_S)


@pytest.fixture
async def service(model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    monkeypatch.setattr(postprocess, "SessionLimits", partial(SessionLimits, max_message_tokens=5000))
    async for running in started(model, monkeypatch, "--drain-s", "30"):
        await running.ready()
        yield running


def opening(slot: int, **options: object) -> postprocess_pb2.OpenStream:
    return postprocess_pb2.OpenStream(
        slot=slot,
        request_id=f"request-{slot}",
        options=postprocess_pb2.StreamOptions(**{"model": "tiny", **options}),  # type: ignore[arg-type]
    )


def columns(rows: list[tuple[int, list[int]]]) -> postprocess_pb2.TokenColumns:
    return postprocess_pb2.TokenColumns(
        slots=pack_u32(slot for slot, _ in rows),
        counts=pack_u32(len(ids) for _, ids in rows),
        token_ids=pack_u32(token for _, ids in rows for token in ids),
    )


async def one_batch(call: Call) -> postprocess_pb2.TextBatch:
    batch = await asyncio.wait_for(call.read(), WAIT_S)
    assert isinstance(batch, postprocess_pb2.TextBatch)
    return batch


class OutputBatch:
    """What a session said, by slot."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.events: dict[int, postprocess_pb2.StreamEvent] = {}

    def take(self, batch: postprocess_pb2.TextBatch) -> None:
        place = 0
        for slot, length in zip(unpack_u32(batch.slots), unpack_u32(batch.text_lengths), strict=True):
            assert slot not in self.events, "text after the end"
            self.texts[slot] = self.texts.get(slot, "") + batch.text[place : place + length]
            place += length
        for event in batch.events:
            assert event.slot not in self.events, "a second end"
            self.events[event.slot] = event

    async def read(self, call: Call, ends: int) -> None:
        """Reads until `ends` streams have ended."""
        async with asyncio.timeout(WAIT_S):
            while len(self.events) < ends:
                batch = await call.read()
                assert isinstance(batch, postprocess_pb2.TextBatch)
                self.take(batch)


async def test_many_streams_share_a_session(service: Service) -> None:
    draw = random.Random(7)
    expected = {slot: TEXT * draw.randint(1, 4) + str(slot) for slot in range(200)}
    left = {slot: byte_level().encode(text) for slot, text in expected.items()}
    lengths = {slot: len(ids) for slot, ids in left.items()}
    call = service.stub.Session()
    answers = OutputBatch()
    reading = asyncio.create_task(answers.read(call, len(expected)))
    await call.write(Request(opens=[opening(slot) for slot in expected]))
    while left:
        rows, ends = [], []
        for slot in list(left):
            count = draw.choice([1, 1, 1, 5])
            rows.append((slot, left[slot][:count]))
            left[slot] = left[slot][count:]
            if not left[slot]:
                ends.append(postprocess_pb2.EndStream(slot=slot, finish_reason=common_pb2.FINISH_REASON_LENGTH))
                del left[slot]
        await call.write(Request(tokens=columns(rows), ends=ends))
    await reading
    assert answers.texts == expected
    assert {slot: event.tokens_seen for slot, event in answers.events.items()} == lengths
    assert {event.finish_reason for event in answers.events.values()} == {common_pb2.FINISH_REASON_LENGTH}
    call.cancel()


@pytest.mark.parametrize(
    ("tokens", "kind"),
    [
        (postprocess_pb2.TokenColumns(slots=b"abc", counts=b"abc"), ErrorKind.INVALID_ARGUMENT),
        (postprocess_pb2.TokenColumns(slots=pack_u32([1]), counts=pack_u32([2])), ErrorKind.INVALID_ARGUMENT),
        (columns([(1, [1] * 5001)]), ErrorKind.TOO_LARGE),
    ],
)
async def test_a_message_that_cannot_be_read_ends_the_session_with_a_typed_error(
    service: Service, tokens: postprocess_pb2.TokenColumns, kind: ErrorKind
) -> None:
    call = service.stub.Session()
    await call.write(Request(tokens=tokens))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call.read(), WAIT_S)
    assert from_rpc_error(caught.value, "postprocess").kind is kind


async def test_a_caller_that_is_done_sending_still_gets_its_answers(service: Service) -> None:
    ids = byte_level().encode(TEXT)
    end = postprocess_pb2.EndStream(slot=1)
    call = service.stub.Session()
    await call.write(Request(opens=[opening(1)], tokens=columns([(1, ids)]), ends=[end]))
    await call.done_writing()
    answers = OutputBatch()
    await answers.read(call, 1)
    assert answers.texts == {1: TEXT}
    assert await asyncio.wait_for(call.code(), WAIT_S) is grpc.StatusCode.OK


async def test_parse_is_the_same_at_once(service: Service) -> None:
    ids = byte_level().encode(TEXT * 320)
    assert len(ids) > INLINE_TOKENS, "long enough to be taken in parts"
    for length in (10, len(ids)):
        request = postprocess_pb2.ParseRequest(options=opening(0).options, token_ids=pack_u32(ids[:length]))
        answer = await service.stub.Parse(request, timeout=WAIT_S)
        assert answer.text == byte_level().decode(ids[:length], True)
        assert answer.finish.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert answer.finish.tokens_seen == length
    request = postprocess_pb2.ParseRequest(options=opening(0, stop=["today"]).options, token_ids=pack_u32(ids))
    answer = await service.stub.Parse(request, timeout=WAIT_S)
    assert (answer.text, answer.finish.stop_string) == ("What is the weather in Paris ", "today")


async def test_a_drained_service_lets_streams_finish_and_ends_idle_sessions(service: Service) -> None:
    idle, busy = service.stub.Session(), service.stub.Session()
    await idle.write(Request(opens=[opening(1)], ends=[postprocess_pb2.EndStream(slot=1)]))
    await OutputBatch().read(idle, 1)
    await busy.write(Request(opens=[opening(1)], tokens=columns([(1, byte_level().encode("one "))])))
    assert (await one_batch(busy)).text == "one "
    service.stop.set()
    assert await asyncio.wait_for(idle.read(), WAIT_S) == postprocess_pb2.TextBatch(draining=True)
    assert await asyncio.wait_for(idle.read(), WAIT_S) is grpc.aio.EOF
    assert await idle.code() is grpc.StatusCode.OK
    end = postprocess_pb2.EndStream(slot=1)
    await busy.write(Request(opens=[opening(2)], tokens=columns([(1, byte_level().encode("two"))]), ends=[end]))
    answers = OutputBatch()
    await answers.read(busy, 2)
    assert answers.texts == {1: "two"}
    assert answers.events[2].error.retryable
    assert await asyncio.wait_for(busy.read(), WAIT_S) is grpc.aio.EOF
    await asyncio.wait_for(service.serving, WAIT_S)


async def test_single_tokens_are_looked_up(service: Service) -> None:
    ids = byte_level().encode("é😀 x")
    request = postprocess_pb2.TokenPiecesRequest(model=opening(0).options.model, token_ids=pack_u32(ids))
    answer = await service.stub.TokenPieces(request, timeout=WAIT_S)
    assert len(unpack_u32(answer.lengths)) == len(ids)
    assert answer.pieces.decode() == "é😀 x"
    request.token_ids = pack_u32([1 << 30])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.stub.TokenPieces(request, timeout=WAIT_S)
    assert from_rpc_error(caught.value, "postprocess").code == "token_unknown"


@pytest.mark.parametrize(("source", "code"), [("model", 0), ("nowhere", 1)])
async def test_the_process_starts_and_ends(model: Path, source: str, code: int) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.postprocess",
        "--listen",
        "127.0.0.1:0",
        "--models",
        f"tiny={model if source == 'model' else model / source}",
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "SLUICE_POSTPROCESS_LOG_LEVEL": "info"},
    )
    assert process.stderr is not None
    lines = []
    try:
        async with asyncio.timeout(WAIT_S):
            async for line in process.stderr:
                lines.append(line.decode())
                if "tokenizer is loaded" in lines[-1]:
                    process.send_signal(signal.SIGTERM)
            assert await process.wait() == code, lines
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert not any("Traceback" in line for line in lines)
    assert code == 0 or "does not exist" in lines[-1]
