"""Foreign engines' servers that lie: every answer is bounded in bytes, time, values, depth and what it names."""

from __future__ import annotations

import asyncio
import gzip
import time
import tracemalloc
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.common.base.errors import ErrorKind, SluiceError
from services.worker.contract.engine import GenerateContext
from services.worker.contract.generation import GenerateRequest, StopParams
from services.worker.engines.http import client
from services.worker.engines.http.client import HttpClient
from services.worker.engines.http.dialect import Publisher
from services.worker.engines.http.engine import HttpEngine
from services.worker.engines.http.events import chosen_publishers
from services.worker.engines.http.options import HttpOptions
from services.worker.engines.http.sglang import SglangDialect
from services.worker.engines.http.vllm import VllmDialect
from services.worker.engines.openai import OpenAiEngine
from services.worker.engines.vllm_grpc import card as vllm_grpc_card
from services.worker.settings import WorkerSettings
from tests.support.data.tiny_models import build_tiny_model
from tests.support.fakes.fake_http_engines import FakeServer, FakeSglang, FakeVllm, served

MIB = 1 << 20
ENDLESS = 96 * MIB
"""Bytes after which an endless answer ends, so that a client without bounds fails a test instead of the machine."""
MAX_TAKEN = 40 * MIB
"""More than a client takes of any answer, with what is in flight."""

HEAD = b"HTTP/1.1 %d OK\r\ncontent-type: application/json\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"


class RawServer:
    """Answers every request with the bytes of one answer, however wrong they are.

    Attributes:
        sent: bytes written of all answers.
    """

    def __init__(self, head: bytes, parts: Callable[[], Any], pause_s: float = 0.0) -> None:
        self._head, self._parts, self._pause_s = head, parts, pause_s
        self.sent = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(self._head)
            for part in self._parts():
                writer.write(part)
                await writer.drain()
                self.sent += len(part)
                await asyncio.sleep(self._pause_s)
                if self.sent > ENDLESS:
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


CALLS: dict[str, Callable[[HttpClient], Awaitable[Any]]] = {
    "get": lambda one: one.get("/x"),
    "get_json": lambda one: one.get_json("/x"),
    "post": lambda one: one.post("/x", {}),
    "status": lambda one: one.status("/x", {}),
    "exists": lambda one: one.exists("/x"),
    "events": lambda one: anext(one.events("/x", {}, {})),
}
BODIES: dict[str, tuple[bytes, Callable[[], Any]]] = {
    "endless": (CHUNKED, lambda: repeat(chunk(b"x" * 65_536))),
    "announced": (b"content-length: 99999999999\r\n\r\n", lambda: repeat(b"x" * 65_536)),
    "unfinished event": (CHUNKED, lambda: repeat(chunk(b"data: " + b"x" * 65_536))),
    "small chunks": (CHUNKED, lambda: repeat(chunk(b"x") * 4_096)),
    "keep-alives": (CHUNKED, lambda: repeat(chunk(b":\n\n" * 20_000))),
    "without length": (b"\r\n", lambda: repeat(b"[" * 65_536)),
}


async def failure_of(call: Awaitable[Any], timeout_s: float) -> Any:
    """Returns the kind of the error with which a call ends, TimeoutError when it does not end, or None."""
    try:
        async with asyncio.timeout(timeout_s):
            await call
    except SluiceError as error:
        return error.kind
    except TimeoutError as error:
        return type(error)
    return None


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("call", CALLS)
async def test_answer_without_end_is_given_up(
    call: str, body: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "CALL_S", 1.0)
    framing, parts = BODIES[body]
    server = RawServer(HEAD % status + framing, parts)
    async with server.running() as url:
        one = HttpClient(url)
        started = time.monotonic()
        failure = await failure_of(CALLS[call](one), 1.0 if body == "keep-alives" and call == "events" else 60)
        if (call, body, status) == ("events", "keep-alives", 200):
            assert failure is TimeoutError  # a stream lasts as long as its request
        else:
            assert failure in (None, ErrorKind.INTERNAL, ErrorKind.NOT_FOUND, ErrorKind.RESPONSE_TIMEOUT)
        assert time.monotonic() - started < 30
        await one.close()
    if body != "keep-alives":
        assert server.sent < MAX_TAKEN


@pytest.mark.parametrize("call", ["get", "get_json", "post", "status", "exists"])
async def test_answer_that_trickles_ends_after_the_time_of_a_call(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CALL_S", 0.5)
    server = RawServer(HEAD % 200, lambda: repeat(b"x-more: 1\r\n"), pause_s=0.05)
    async with server.running() as url:
        one = HttpClient(url)
        async with asyncio.timeout(10):
            with pytest.raises(SluiceError) as caught:
                await CALLS[call](one)
        assert caught.value.kind is ErrorKind.RESPONSE_TIMEOUT
        await one.close()


@pytest.mark.parametrize("call", CALLS)
async def test_compressed_answer_is_refused_without_expanding_it(call: str) -> None:
    bomb = gzip.compress(b"0" * (64 * MIB))
    framing = b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(bomb)
    server = RawServer(HEAD % 200 + framing, lambda: [bomb])
    async with server.running() as url:
        one = HttpClient(url)
        tracemalloc.start()
        try:
            with pytest.raises(SluiceError, match="compressed"):
                await CALLS[call](one)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            await one.close()
    assert peak < 8 * MIB


@pytest.mark.parametrize(
    "text",
    [b"[" + b"[]," * 5_000_000 + b"0]", b"[" * 100_000 + b"]" * 100_000, b"{" + b'"":{},' * 2_000_000 + b'"":0}'],
    ids=["lists", "depth", "objects"],
)
async def test_answer_of_many_values_is_refused_without_being_parsed(text: bytes) -> None:
    one = HttpClient("http://h:1", connections=httpx.MockTransport(lambda _: httpx.Response(200, content=text)))
    tracemalloc.start()
    try:
        with pytest.raises(SluiceError) as caught:
            await one.get_json("/x")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.kind is ErrorKind.INTERNAL
    assert peak < 64 * MIB


async def test_redirect_of_a_server_is_not_followed() -> None:
    elsewhere = RawServer(HEAD % 200 + b"\r\n", lambda: [b"{}"])
    async with elsewhere.running() as target:
        server = RawServer(b"HTTP/1.1 307 Go\r\nlocation: %b/x\r\ncontent-length: 0\r\n\r\n" % target.encode(), list)
        async with server.running() as url:
            one = HttpClient(url)
            with pytest.raises(SluiceError, match="redirects"):
                await one.get("/x")
            await one.close()
    assert not elsewhere.sent


async def test_cookies_of_a_server_are_not_kept() -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, headers={"set-cookie": f"c{len(asked)}={'x' * 1000}; Path=/"}, json={})

    one = HttpClient("http://h.test:1", connections=httpx.MockTransport(answer))
    for _ in range(10):
        await one.get("/x")
    assert all("cookie" not in request.headers for request in asked)


SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
ODD: st.SearchStrategy[Any] = st.sampled_from(
    [10**9, -1, "1" * 5_000, 1e300, "evil\nname", "x" * 100_000, [], {}, None]
)
VLLM = {
    "/version": {"version": "0.33.0"},
    "/v1/models": {"data": [{"id": "tiny", "root": "/m", "parent": None, "max_model_len": 100}]},
    "/v1/completions": {},
    "/metrics": b'vllm:cache_config_info{block_size="16",num_gpu_blocks="64",engine="0"} 1.0\n',
    "/kv_event_sources": {"0": {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": None}},
}
SGLANG = {
    "/model_info": {"model_path": "/m", "served_model_name": "tiny", "is_generation": True},
    "/server_info": {
        "page_size": 16,
        "dp_size": 2,
        "max_total_num_tokens": 1_024,
        "max_running_requests": 8,
        "kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "dp_size": 2},
    },
    "/v1/models": {"data": [{"id": "tiny", "max_model_len": 100}]},
    "/v1/loads": {"loads": [{"dp_rank": 0, "num_running_reqs": 1}]},
}


@st.composite
def lies(draw: st.DrawFn, paths: dict[str, Any]) -> dict[str, Any]:
    """What a server answers, with one value replaced at any depth."""
    answered: dict[str, Any] = orjson.loads(orjson.dumps(paths, default=bytes.decode))
    at = draw(st.sampled_from([path for path, value in answered.items() if not isinstance(value, str)]))
    node: Any = answered
    key: Any = at
    while isinstance(node[key], dict | list) and node[key] and draw(st.booleans()):
        node = node[key]
        key = draw(st.sampled_from(list(node) if isinstance(node, dict) else range(len(node))))
    node[key] = draw(VALUES | ODD)
    return answered


def answering(paths: dict[str, Any]) -> HttpClient:
    def answer(asked: httpx.Request) -> httpx.Response:
        found = paths.get(asked.url.path)
        status = 400 if asked.url.path == "/v1/completions" else 404 if found is None else 200
        content = found.encode() if isinstance(found, str) else orjson.dumps(found, default=str)
        return httpx.Response(status, content=content)

    return HttpClient("http://h:1", connections=httpx.MockTransport(answer))


async def described(dialect: VllmDialect | SglangDialect, paths: dict[str, Any]) -> None:
    """Reads a lying server's description and load as the engine does; only a SluiceError or numbers may come out."""
    engine = HttpEngine.from_args(WorkerSettings.load(["--engine", "http", "--engine-args", "url=http://h:1"]))
    found = await engine.describe(answering(paths), dialect)
    assert 0 < found.ranks <= 1_024
    assert len(found.publishers) <= 1_024
    assert len(found.model) <= 256
    assert max(found.context_length, found.block_size, found.total_blocks, found.max_sequences) < 1 << 31
    await engine.poll_load(answering(paths), dialect)
    for load in engine.load():
        numbers = load.running_requests, load.waiting_requests, load.used_blocks, load.prefill_tokens
        assert all(0 <= number < 1 << 32 for number in numbers)


@given(paths=lies(VLLM) | lies(SGLANG))
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_description_with_any_value_of_any_type_is_a_typed_error_or_within_bounds(paths: dict[str, Any]) -> None:
    dialect = VllmDialect() if "/version" in paths else SglangDialect()
    with suppress(SluiceError):
        asyncio.run(described(dialect, paths))


@pytest.mark.parametrize("code", ["os:system", "package.module:Class", "vllm"])
async def test_source_named_by_a_server_names_no_code(code: str, folder: Path) -> None:
    """The files before the `@` exist, so that only the code behind it is a reason to refuse the source."""
    async with served(FakeVllm(f"{folder}@{code}", events=False)) as url:
        engine = HttpEngine.from_args(WorkerSettings.load(["--engine", "http", "--engine-args", f"url={url}"]))
        with pytest.raises(SluiceError) as caught:
            await engine.start("w")
        await engine.cleanup()
    assert caught.value.param == "model"
    assert "set --model" in caught.value.message


def test_grpc_server_that_reports_billions_of_ranks_is_refused() -> None:
    usual = {"served_model_name": "m", "tokenizer_path": "/m", "model_path": "", "max_context_length": 100}
    server = SimpleNamespace(block_size=16, max_num_seqs=8, data_parallel_size=1)
    vllm_grpc_card.check_answers(SimpleNamespace(**usual), server)
    server.data_parallel_size = (1 << 31) - 1
    with pytest.raises(SluiceError, match="ranks"):
        vllm_grpc_card.check_answers(SimpleNamespace(**usual), server)


@pytest.mark.parametrize("make", [partial(FakeVllm, events=False), partial(FakeSglang, events=False)])
async def test_stream_that_never_ends_after_the_finish_reason_ends_the_generation(
    make: Callable[[str], FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = make(str(build_tiny_model(tmp_path)))
    usual = client.HttpClient.events

    async def endless(self: HttpClient, *asked: Any) -> AsyncIterator[Any]:
        last: Any = None
        async for event in usual(self, *asked):
            last = event
            yield event
        for event in repeat(last):
            await asyncio.sleep(0)
            yield event

    async with served(fake) as url:
        engine = HttpEngine.from_args(WorkerSettings.load(["--engine", "http", "--engine-args", f"url={url}"]))
        await engine.start("w")
        monkeypatch.setattr(client.HttpClient, "events", endless)
        request = GenerateRequest("r", "tiny", array("I", range(10, 30)), stop=StopParams(max_tokens=3))
        async with asyncio.timeout(20):
            deltas = [delta async for delta in engine.generate(request, GenerateContext("r"))]
        assert deltas[-1].finish_reason is not None
        await engine.cleanup()


async def test_openai_server_that_never_ends_its_stream_ends_the_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = OpenAiEngine.from_args(
        WorkerSettings.load(["--engine", "openai", "--engine-args", "url=http://h:1", "--model", "m=m"])
    )
    engine._client = answering({})

    async def endless(self: HttpClient, *asked: Any) -> AsyncIterator[Any]:
        yield {"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}
        while True:
            await asyncio.sleep(0)
            yield {"choices": []}

    monkeypatch.setattr(client.HttpClient, "events", endless)
    request = GenerateRequest("r", "m", array("I"), text="x")
    async with asyncio.timeout(20):
        deltas = [delta async for delta in engine.generate(request, GenerateContext("r"))]
    assert deltas[-1].finish_reason is not None


HOSTS = st.sampled_from(["*", "0.0.0.0", "::", "[::]", "h", "H", "10.0.0.9", "localhost", "169.254.169.254", "h.evil"])
ENDPOINTS = st.builds(
    "{}://{}:{}".format, st.sampled_from(["tcp", "ipc", "inproc", "udp"]), HOSTS, st.integers(-1, 99_999)
)


@given(endpoint=ENDPOINTS | st.text(max_size=30), replay=ENDPOINTS | st.just(""))
def test_endpoint_of_kv_events_named_by_a_server_is_at_its_own_host_or_not_used(endpoint: str, replay: str) -> None:
    found, problem = chosen_publishers(HttpOptions("http://h:1"), [Publisher(0, endpoint, replay)], 1)
    assert bool(found) != bool(problem)
    for publisher in found:
        for address in filter(None, (publisher.endpoint, publisher.replay)):
            host, _, port = address.removeprefix("tcp://").partition(":")
            assert host == "h"
            assert 1_024 <= int(port) <= 65_535
