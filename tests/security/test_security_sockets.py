"""Hostile clients of WebSockets: frames of no bytes, pings and messages without end, and connections that
stay idle. (Findings A2 and A11.)

Most connections are driven without a network, one turn of the event loop after the other, so that what a turn costs is
counted in frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, cast

import httpx
import pytest
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState
from wsproto import ConnectionType, WSConnection, events
from wsproto.frame_protocol import Frame, FrameDecoder

from services.common.base import budgets
from services.common.base.budgets import TenantPool
from services.common.net.http.bounded_reader import READ_BYTES
from services.gateway.admission.keys import create, write
from services.gateway.http.entrance import ENTRANCE_KEY
from services.gateway.http.socket_pace import TURN_S, SocketPace
from services.gateway.http.socket_protocol import BoundedSocketProtocol
from services.gateway.http.socket_turns import SocketLimits, SocketTurns
from tests.support.clients.raw_http import answer
from tests.support.clients.socket_frames import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    fragments,
    frame,
    handshake,
)
from tests.support.servers.lone_gateway import LoneGateway

MAX_FRAMES = 40
"""Frames that a turn of the event loop may parse; the bound is 32."""
MAX_BYTES = 9 << 10
"""Bytes of messages that a turn may parse; the bound is 8 KiB."""
SENT_WITHIN_S = 60.0

Work = list[tuple[int, int]]


class Transport(asyncio.Transport):
    """The server's end of a connection, which says what it may be given."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.reads = True
        self.closing = False

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


class Session:
    def close(self) -> None:
        """Has nothing to forget."""


class Connection:
    """One connection to a server, driven turn by turn.

    Attributes:
        work: frames and bytes that the server parsed in each turn.
    """

    def __init__(self, app: Any, work: Work, pace: SocketPace | None = None) -> None:
        config = uvicorn.Config(
            app, loop="none", ws=BoundedSocketProtocol, ws_per_message_deflate=False, lifespan="off", log_config=None
        )
        config.load()
        self.transport = Transport()
        self.work = work
        self._protocol = BoundedSocketProtocol(config=config, server_state=ServerState(), app_state={}, pace=pace)
        self._client = WSConnection(ConnectionType.CLIENT)
        self._client.send(events.Request(host="localhost", target="/v1/responses"))

    def begin(self) -> None:
        """Begins the handshake."""
        self._protocol.connection_made(self.transport)
        self._protocol.data_received(handshake())

    def receive(self, data: bytes) -> None:
        """Gives the server what has arrived."""
        self._protocol.data_received(data)

    async def open(self) -> None:
        """Performs the handshake."""
        self.begin()
        while not self.transport.sent:
            await self.turn()
        self.transport.sent.clear()

    async def turn(self) -> None:
        """Runs the event loop once."""
        self.work.append((0, 0))
        await asyncio.sleep(0)

    async def send(self, data: bytes, step: Callable[[], int] = lambda: READ_BYTES) -> None:
        """Sends data in reads of `step()` bytes, until the server has taken all of it or closed the connection."""
        ends_at = monotonic() + SENT_WITHIN_S  # not turns: the server rests for a multiple of the time that it took
        while data and not self.transport.closing and monotonic() < ends_at:
            if self.transport.reads:
                size = step()
                self.work.append((0, 0))
                self._protocol.data_received(data[:size])
                data = data[size:]
            await self.turn()
        assert not data or self.transport.closing, "the server reads no more"

    async def until(self, condition: Callable[[], bool]) -> None:
        """Runs turns until a condition holds."""
        async with asyncio.timeout(30):
            while not condition():
                await self.turn()

    def close_code(self) -> int | None:
        """Code of the close frame that the server has sent."""
        at = self.transport.sent.rfind(b"\x88")
        return int.from_bytes(self.transport.sent[at + 2 : at + 4], "big") if at >= 0 else None

    async def closed(self) -> int | None:
        """Waits until the server has sent a close frame; returns its code."""
        await self.until(lambda: self.close_code() is not None or self.transport.closing)
        return self.close_code()

    async def end(self) -> None:
        """Loses the connection, and waits for the application."""
        self._protocol.connection_lost(None)
        await asyncio.gather(*self._protocol.tasks, return_exceptions=True)


class Messages:
    """An application that keeps what it receives; `waits`: it does not receive before this is set."""

    def __init__(self) -> None:
        self.texts: list[bytes] = []
        self.parts = 0
        self._begun = b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            self.parts += 1
            self._begun += message["bytes"]
            if not message["more_body"]:
                self.texts.append(self._begun)
                self._begun = b""


async def responding(scope: Any, receive: Any, send: Any) -> None:
    """Reads a message, and answers it never."""
    if scope["type"] == "websocket":
        scope[ENTRANCE_KEY] = responding
        turns = SocketTurns(Session, SocketLimits(60, 60, 60, 60), TenantPool("sockets", 1, "", 1, ""))
        await turns(scope, receive, send)
        return
    while (await receive())["type"] != "http.disconnect":
        pass


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    """Counts what wsproto parses in each turn."""
    turns: Work = [(0, 0)]
    parse = FrameDecoder.process_buffer

    def counted(decoder: FrameDecoder) -> Frame | None:
        parsed = parse(decoder)
        if parsed is not None:
            frames, size = turns[-1]
            turns[-1] = (frames + 1, size + len(cast(bytes, parsed.payload)))
        return parsed

    monkeypatch.setattr(FrameDecoder, "process_buffer", counted)
    return turns


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    monkeypatch.setattr(budgets, "on_refused", names.append)
    return names


def assert_bounded(work: Work) -> None:
    """No turn, and so no wait of another connection for its own, took more than the bound."""
    assert max(frames for frames, _ in work) <= MAX_FRAMES
    assert max(size for _, size in work) <= MAX_BYTES


async def test_frames_of_many_sockets_share_the_turns_of_one_and_an_honest_message_has_its_own(work: Work) -> None:
    pace = SocketPace(share=0.9, clock=lambda: 1.01 * TURN_S / 32 * sum(frames for frames, _ in work))
    hostile = [Connection(Messages(), work, pace) for _ in range(20)]
    app = Messages()
    honest = Connection(app, work, pace)
    for connection in (*hostile, honest):
        await connection.open()
    work[:] = [(0, 0)]
    for connection in hostile:
        connection.receive(frame(b"", PING) * 64)  # as many as are answered
    honest.receive(frame(b"hi", TEXT))
    await honest.until(lambda: bool(app.texts))
    parsed = sum(frames for frames, _ in work)
    assert app.texts == [b"hi"]
    # It waits for one slice of each of the others; two more are parsed until its application has it.
    assert parsed <= 20 * 32 + 1 + 2 * MAX_FRAMES
    await honest.until(lambda: sum(frames for frames, _ in work) == 20 * 64 + 1)
    assert_bounded(work)
    for connection in (*hostile, honest):
        await connection.end()


async def test_handshakes_of_many_sockets_at_once_have_turns(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handshake counts as half of what a turn of the event loop may take."""
    done = [0]
    connect = BoundedSocketProtocol.handle_connect

    def counted(protocol: BoundedSocketProtocol, event: events.Request) -> None:
        done[-1] += 1
        connect(protocol, event)

    monkeypatch.setattr(BoundedSocketProtocol, "handle_connect", counted)
    pace = SocketPace(share=0.9, clock=lambda: 1.01 * TURN_S / 2 * sum(done))
    connections = [Connection(Messages(), work, pace) for _ in range(30)]
    for connection in connections:
        connection.begin()
    async with asyncio.timeout(30):
        while not all(connection.transport.sent for connection in connections):
            done.append(0)
            await asyncio.sleep(0)
    assert sum(done) == 30
    assert max(done) == 2
    for connection in connections:
        await connection.end()


async def test_connection_that_is_lost_before_its_handshake_has_its_turn_starts_no_application(work: Work) -> None:
    app = Messages()
    connection = Connection(app, work)
    connection.begin()
    await connection.end()
    await connection.turn()
    assert not connection.transport.sent


async def test_slice_that_raises_leaves_the_other_sockets_their_turns(caplog: pytest.LogCaptureFixture) -> None:
    pace, run = SocketPace(), list[int]()

    def broken() -> None:
        raise KeyError("bug")

    for slice_ in (lambda: run.append(1), broken, lambda: run.append(2)):
        pace.add(slice_)
    pace.add(lambda: run.append(3)).cancel()
    await asyncio.sleep(0.02)
    assert run == [1, 2]
    assert "failed to parse a slice" in caplog.text


@pytest.mark.parametrize("size", [0, 1, 2, 7])
async def test_fragments_without_end_take_bounded_turns_and_close_the_connection(
    size: int, work: Work, refused: list[str]
) -> None:
    connection = Connection(Messages(), work)
    await connection.open()
    hostile = frame(b"x" * size, TEXT, is_last=False) + frame(b"x" * size, CONTINUATION, is_last=False) * 20_000
    await connection.send(hostile)
    assert await connection.closed() == (1008 if size else 1002)
    assert_bounded(work)
    assert refused == ["socket_frames"]
    await connection.end()


@pytest.mark.parametrize("opcode", [PING, PONG])
@pytest.mark.parametrize("size", [0, 1, 125])
async def test_control_frames_without_end_take_bounded_turns_and_close_the_connection(
    opcode: int, size: int, work: Work, refused: list[str]
) -> None:
    connection = Connection(Messages(), work)
    await connection.open()
    await connection.send(frame(b"p" * size, opcode) * 20_000)
    assert await connection.closed() == 1008
    assert_bounded(work)
    assert refused == ["socket_frames"]
    await connection.end()


async def test_control_frames_between_fragments_are_counted_as_well(work: Work, refused: list[str]) -> None:
    connection = Connection(Messages(), work)
    await connection.open()
    between = frame(b"", PING) + frame(b"x", CONTINUATION, is_last=False)
    await connection.send(frame(b"x", TEXT, is_last=False) + between * 500)
    assert await connection.closed() == 1008
    assert_bounded(work)
    await connection.end()


async def test_small_messages_without_end_are_parsed_at_a_bounded_rate(work: Work) -> None:
    """The application takes every message at once, so nothing but the rate of frames holds them back."""
    app = Messages()
    connection = Connection(app, work)
    await connection.open()
    began = asyncio.get_running_loop().time()
    await connection.send(frame(b"{}") * 5_000)
    await connection.until(lambda: len(app.texts) >= 2_048 + 256)
    assert asyncio.get_running_loop().time() - began > 0.9, "2,048 at once, then 256 a second"
    assert_bounded(work)
    await connection.end()


@pytest.mark.parametrize("opcode", [TEXT, BINARY])
@pytest.mark.parametrize("size", [0, 2])
async def test_messages_without_end_beside_a_response_close_the_connection(
    opcode: int, size: int, work: Work, refused: list[str]
) -> None:
    connection = Connection(responding, work)
    await connection.open()
    await connection.send(frame(b"{}") + frame(b"x" * size, opcode) * 5_000)
    assert await connection.closed() == 1008
    assert_bounded(work)
    assert refused == ["socket_frames"]
    assert connection.transport.sent.count(b"response_in_progress") <= 40
    await connection.end()


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
SIZES = st.lists(st.one_of(st.integers(1, 3), st.integers(1, 40)), max_size=40)
BETWEEN = st.lists(st.sampled_from((b"", frame(b"", PING), frame(b"p" * 125, PING), frame(b"u", PONG))), max_size=5)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(TEXTS, SIZES, BETWEEN), max_size=6), st.integers(1, 300), st.randoms(use_true_random=False))
async def test_messages_are_the_same_under_any_fragmentation_and_take_bounded_turns(
    work: Work, messages: list[tuple[str, Sequence[int], Iterable[bytes]]], step: int, random_: random.Random
) -> None:
    work[:] = [(0, 0)]
    app = Messages()
    connection = Connection(app, work)
    await connection.open()
    sent = b""
    for text, sizes, between in messages:
        controls = iter(between)
        sent += b"".join(one + next(controls, b"") for one in fragments(text.encode(), sizes))
    await connection.send(sent, lambda: random_.randint(1, step))
    await connection.until(lambda: len(app.texts) == len(messages) or connection.transport.closing)
    assert app.texts == [text.encode() for text, _, _ in messages]
    assert_bounded(work)
    await connection.end()


@pytest.mark.parametrize("sizes", [[], [1] * 1_023, [700] * 1_000, [65_536] * 12, [1 << 20]])
async def test_long_messages_arrive_whole_in_slices(work: Work, sizes: list[int]) -> None:
    text = ("äx€" * 150_000).encode()
    app = Messages()
    connection = Connection(app, work)
    await connection.open()
    await connection.send(b"".join(fragments(text, sizes)))
    await connection.until(lambda: bool(app.texts) or connection.transport.closing)
    assert app.texts == [text]
    assert_bounded(work)
    await connection.end()


async def test_idle_sockets_leave_connections_to_others_and_count_against_their_tenant(tmp_path: Path) -> None:
    """A11: every connection of the gateway was taken by sockets that do nothing, of a single key."""
    file = tmp_path / "keys.json"
    keys, records = zip(*(create(name, tenant=name[0]) for name in ("a1", "a2", "b", "c", "d", "e")), strict=True)
    (one, same, *others, last) = keys
    write(file, list(records))
    flags = ("--api-keys-file", str(file), "--max-connections", "32")
    with LoneGateway(*flags) as gateway:
        async with contextlib.AsyncExitStack() as stack:

            async def opened(key: str) -> bytes:
                reader, writer = await asyncio.open_connection(gateway.host, gateway.port)
                stack.callback(writer.close)
                writer.write(handshake("/v1/responses", "localhost", f"Authorization: Bearer {key}"))
                async with asyncio.timeout(30):
                    return (await reader.readuntil(b"\r\n\r\n"))[9:12]

            statuses = [await opened(key) for key in (one, same) * 3]
            assert statuses == [b"101"] * 6
            assert await opened(one) == b"429"
            assert [await opened(key) for key in others * 6] == [b"101"] * 18
            refused = await answer(
                gateway.host, gateway.port, handshake("/v1/responses", "localhost", f"Authorization: Bearer {last}")
            )
            assert refused.startswith(b"HTTP/1.1 503")
            assert b"--max-connections" in refused
            assert (await asyncio.to_thread(httpx.get, f"{gateway.url}/health")).status_code == 200


@pytest.mark.parametrize("end", ["close", "violation"])
async def test_answer_of_a_client_that_has_closed_its_connection_is_a_disconnect(end: str, work: Work) -> None:
    """What is sent after the client's close frame, or the server's, raises what the loss of the connection raises."""
    raised: list[BaseException] = []

    async def late(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (await receive())["type"] == "websocket.receive":
            pass
        try:
            await send({"type": "websocket.send", "text": "late"})
        except BaseException as error:
            raised.append(error)

    connection = Connection(late, work)
    await connection.open()
    await connection.send(frame(b"\x03\xe8", CLOSE) if end == "close" else frame(b"p", PING) * 20_000)
    await connection.until(lambda: bool(raised))
    assert isinstance(raised[0], OSError)
    await connection.end()
