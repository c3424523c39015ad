"""The picker's HTTP/2 server against peers that keep the protocol, break it, and flood it: frames in, frames out."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import overloaded
from services.router.picker.http2 import flood_guard, frames, header_blocks
from services.router.picker.http2.call import STREAM_WINDOW, GrpcCall, framed
from services.router.picker.http2.connection import CONNECTION_WINDOW, ConnectionLimits, Http2Connection
from services.router.picker.http2.frames import ErrorCode, Http2Setting, frame
from services.router.picker.http2.header_blocks import CallHead, HeaderBlocks

HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/s/m"),
    (":authority", "x"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
]
GREETING = frames.PREFACE + frames.settings({})


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closed = self.aborted = False

    def writelines(self, list_of_data: Any) -> None:
        self.written += b"".join(list_of_data)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True


class Echo:
    """Returns every message; `fail` raises in its place."""

    def __init__(self, call: GrpcCall, fail: Exception | None = None) -> None:
        self.call, self.fail = call, fail
        self.messages: list[bytes] = []
        self.half_closed = False
        self.ends = 0

    def on_message(self, message: bytes) -> None:
        self.messages.append(message)
        if self.fail is not None:
            raise self.fail
        self.call.send(framed(message))

    def on_half_close(self) -> None:
        self.half_closed = True
        self.call.finish()

    def on_end(self) -> None:
        self.ends += 1


class Peer:
    """A client of one connection, whose calls are echoed."""

    def __init__(self, limits: ConnectionLimits | None = None, fail: Exception | None = None) -> None:
        self.transport = Transport()
        self.calls: list[Echo] = []
        self.heads: list[CallHead] = []
        self.connections: set[Http2Connection] = set()
        self.encoder = Encoder()

        def serve(call: GrpcCall, head: CallHead, connection: Http2Connection) -> None:
            echo = Echo(call, fail)
            self.calls.append(echo)
            self.heads.append(head)
            call.start(echo)

        self.connection = Http2Connection(serve, self.connections, limits or ConnectionLimits())
        self.connection.connection_made(self.transport)

    def send(self, data: bytes) -> None:
        self.connection.data_received(data)

    def headers(self, stream: int, flags: int = frames.END_HEADERS, more: Any = ()) -> bytes:
        return frame(frames.HEADERS, flags, stream, self.encoder.encode([*HEADERS, *more]))

    async def received(self) -> list[tuple[int, int, int, bytes]]:
        """Kind, flags, stream and payload of all frames so far."""
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        found, at, data = [], 0, bytes(self.transport.written)
        while at < len(data):
            word, flags, stream = frames.HEAD.unpack_from(data, at)
            end = at + 9 + (word >> 8)
            found.append((word & 255, flags, stream, data[at + 9 : end]))
            at = end
        assert at == len(data)
        return found

    async def echoed(self, stream: int) -> bytes:
        return b"".join(part for kind, _, at, part in await self.received() if kind == frames.DATA and at == stream)

    async def statuses(self) -> dict[int, str]:
        """The gRPC status of each stream that has ended."""
        decoder, found = Decoder(), {}
        for kind, _, stream, payload in await self.received():
            if kind == frames.HEADERS:
                status = dict(decoder.decode(payload)).get("grpc-status")
                found |= {} if status is None else {stream: str(status)}
        return found

    async def error(self) -> ErrorCode | None:
        """Why the connection has been ended; None: it has not."""
        last = (await self.received())[-1]
        if last[0] != frames.GOAWAY:
            return None
        assert self.transport.closed
        return ErrorCode(struct.unpack_from(">II", last[3])[1])


def data(stream: int, payload: bytes, flags: int = 0) -> bytes:
    """Returns DATA frames with a payload of any length."""
    parts = [payload[at : at + 16_384] for at in range(0, len(payload), 16_384)] or [b""]
    last = len(parts) - 1
    return b"".join(
        frame(frames.DATA, flags if number == last else 0, stream, part) for number, part in enumerate(parts)
    )


async def until(condition: Callable[[], bool]) -> None:
    """Waits for a condition."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # of plain state
            await asyncio.sleep(0.005)


async def test_calls_on_one_connection_are_echoed_and_end_with_their_status() -> None:
    peer = Peer()
    peer.send(GREETING)
    for stream in (1, 3, 5):
        peer.send(peer.headers(stream) + data(stream, framed(b"hello") + framed(b"")))
    for stream in (5, 1, 3):
        peer.send(data(stream, b"", frames.END_STREAM))
    assert {await peer.echoed(stream) for stream in (1, 3, 5)} == {framed(b"hello") + framed(b"")}
    assert await peer.statuses() == {1: "0", 3: "0", 5: "0"}
    assert [each.ends for each in peer.calls] == [1, 1, 1]
    assert peer.connection.calls == 0
    assert {each.path for each in peer.heads} == {"/s/m"}


@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(0, 400), max_size=10))
def test_bytes_cut_anywhere_are_the_same_messages(messages: list[bytes], cuts: list[int]) -> None:
    async def run() -> None:
        peer = Peer()
        whole = GREETING + peer.headers(1)
        for message in messages:
            packed = framed(message)
            whole += data(1, packed[:3]) + data(1, packed[3:])
        whole += data(1, b"", frames.END_STREAM)
        places = sorted({0, len(whole), *(cut % len(whole) for cut in cuts)})
        for start, end in pairwise(places):
            peer.send(whole[start:end])
        assert peer.calls[0].messages == messages
        assert await peer.echoed(1) == b"".join(map(framed, messages))
        assert await peer.statuses() == {1: "0"}

    asyncio.run(run())


async def test_long_message_is_sent_as_the_windows_of_the_peer_allow() -> None:
    peer = Peer()
    peer.send(GREETING + peer.headers(1))
    message = bytes(range(256)) * 1_000
    peer.send(data(1, framed(message)))
    sent = await peer.echoed(1)
    assert len(sent) == frames.FIRST_WINDOW
    assert len(peer.calls) == 1
    released: list[int] = []
    peer.calls[0].call.when_sent(lambda: released.append(1))
    peer.send(frames.window_update(1, 1 << 20))
    assert len(await peer.echoed(1)) == frames.FIRST_WINDOW, "the connection's window is closed"
    assert released == []
    peer.send(frames.window_update(0, 1 << 20) + data(1, b"", frames.END_STREAM))
    assert await peer.echoed(1) == framed(message)
    assert released == [1]
    assert await peer.statuses() == {1: "0"}
    assert max(len(payload) for kind, *_, payload in await peer.received() if kind == frames.DATA) <= 16_384


async def test_smaller_initial_window_applies_to_calls_under_way() -> None:
    peer = Peer()
    peer.send(GREETING + peer.headers(1) + frames.settings({Http2Setting.INITIAL_WINDOW_SIZE: 10}))
    peer.send(data(1, framed(b"x" * 100)))
    assert len(await peer.echoed(1)) == 10
    peer.send(frames.settings({Http2Setting.INITIAL_WINDOW_SIZE: 1_000}))
    assert await peer.echoed(1) == framed(b"x" * 100)


async def test_peer_that_does_not_read_may_send_no_more_than_its_window() -> None:
    peer = Peer()
    peer.send(GREETING + peer.headers(1))
    peer.connection.pause_writing()
    message = framed(b"x" * 100_000)
    with_room = STREAM_WINDOW // len(message)
    for _ in range(with_room):
        peer.send(data(1, message))
    assert await peer.error() is None
    assert not [payload for kind, _, stream, payload in await peer.received() if (kind, stream) == (8, 1)]
    peer.send(data(1, message))
    assert await peer.error() is ErrorCode.FLOW_CONTROL_ERROR


async def test_peer_that_reads_gets_room_for_more() -> None:
    peer = Peer()
    settings = frames.settings({Http2Setting.INITIAL_WINDOW_SIZE: (1 << 31) - 1})
    peer.send(GREETING + settings + frames.window_update(0, (1 << 31) - 1 - frames.FIRST_WINDOW) + peer.headers(1))
    message = framed(b"x" * 100_000)
    for _ in range(3 * CONNECTION_WINDOW // len(message)):
        peer.send(data(1, message))
    assert await peer.error() is None
    assert len(peer.calls[0].messages) == 3 * CONNECTION_WINDOW // len(message)


async def test_ends_of_a_call_release_it_once() -> None:
    peer = Peer()
    peer.send(GREETING + b"".join(peer.headers(stream) for stream in (1, 3, 5)))
    peer.send(frames.rst_stream(1, ErrorCode.CANCEL))
    peer.calls[1].call.finish(5, "Not here: é.")
    peer.connection.connection_lost(None)
    assert [each.ends for each in peer.calls] == [1, 1, 1]
    assert peer.connection.closed.done()
    assert peer.connections == set()


async def test_call_that_is_finished_first_is_also_reset() -> None:
    peer = Peer()
    peer.send(GREETING + peer.headers(1))
    peer.calls[0].call.finish(5, "Not here: é 100 %.")
    *_, headers, reset = await peer.received()
    block = dict(Decoder().decode(headers[3]))
    assert (block["grpc-status"], block["grpc-message"]) == ("5", "Not here: %C3%A9 100 %25.")
    assert headers[1] == frames.END_STREAM | frames.END_HEADERS
    assert reset == (frames.RST_STREAM, 0, 1, b"\0\0\0\0")
    peer.send(data(1, framed(b"late")) + frames.window_update(1, 5) + frames.rst_stream(1, ErrorCode.CANCEL))
    assert await peer.error() is None


async def test_late_call_is_cancelled() -> None:
    peer = Peer()
    peer.send(GREETING + peer.headers(1, more=[("grpc-timeout", "10m")]))
    await until(lambda: bool(peer.calls[0].ends))
    assert (await peer.received())[-1][0] == frames.RST_STREAM


@pytest.mark.parametrize(
    ("error", "status"), [(overloaded("Too many; retry."), "8"), (RuntimeError("bug"), "13")], ids=["typed", "bug"]
)
async def test_error_of_a_handler_ends_only_its_call(error: Exception, status: str) -> None:
    peer = Peer(fail=error)
    peer.send(GREETING + peer.headers(1) + peer.headers(3) + data(1, framed(b"x")))
    assert await peer.statuses() == {1: status}
    assert peer.connection.calls == 1


@pytest.mark.parametrize(
    ("payload", "status"),
    [
        (b"\1\0\0\0\1x", "12"),
        (b"\0\x7f\xff\xff\xff", "8"),
        (framed(b"abc")[:-1], "13"),
    ],
    ids=["compressed", "too-large", "incomplete"],
)
async def test_message_that_cannot_be_read_ends_the_call(payload: bytes, status: str) -> None:
    peer = Peer()
    peer.send(GREETING + peer.headers(1) + data(1, payload, frames.END_STREAM))
    assert await peer.statuses() == {1: status}
    assert peer.connection.calls == 0


async def test_messages_that_arrive_in_part_are_bounded_together() -> None:
    peer = Peer(ConnectionLimits(message_bytes=1_000, partial_bytes=2_000))
    peer.send(GREETING)
    part = framed(b"x" * 1_000)[:-1]
    for stream in (1, 3, 5):
        peer.send(peer.headers(stream) + data(stream, part))
    assert await peer.statuses() == {3: "8", 5: "8"}
    peer.send(data(1, b"x"))
    assert peer.calls[0].messages == [b"x" * 1_000]
    assert peer.connection.partial == 0


async def test_streams_beyond_the_limit_are_refused() -> None:
    peer = Peer(ConnectionLimits(streams=2))
    peer.send(GREETING + b"".join(peer.headers(stream) for stream in (1, 3, 5)))
    assert (await peer.received())[-1] == (frames.RST_STREAM, 0, 5, b"\0\0\0\7")
    peer.send(frames.rst_stream(1, ErrorCode.CANCEL) + peer.headers(7) + data(7, framed(b"x")))
    assert await peer.echoed(7) == framed(b"x")


async def test_drained_connection_serves_what_is_under_way_and_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.router.picker.http2.timers.LAST_STREAMS_S", 0.01)
    peer = Peer()
    peer.send(GREETING + peer.headers(1))
    peer.connection.drain()
    peer.send(peer.headers(3))  # it crosses the announcement
    await until(lambda: peer.transport.written.count(frames.goaway(3, ErrorCode.NO_ERROR)) == 1)
    peer.send(peer.headers(5))
    assert len(peer.calls) == 2
    peer.send(data(1, b"", frames.END_STREAM) + data(3, framed(b"x"), frames.END_STREAM))
    assert await peer.statuses() == {1: "0", 3: "0"}
    assert peer.transport.closed


@pytest.mark.parametrize("answers", [True, False])
async def test_silent_peer_is_pinged_and_then_dropped(monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    monkeypatch.setattr("services.router.picker.http2.timers.KEEPALIVE_S", 0.01)
    monkeypatch.setattr("services.router.picker.http2.timers.KEEPALIVE_TIMEOUT_S", 0.05 if not answers else 5.0)
    peer = Peer()
    peer.send(GREETING)
    await until(lambda: frame(frames.PING, 0, 0, b"keepaliv") in peer.transport.written)
    if answers:
        peer.send(frame(frames.PING, frames.ACK, 0, b"keepaliv"))
        assert not peer.transport.aborted
        return
    await until(lambda: peer.transport.aborted)


async def test_peer_that_does_not_greet_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.router.picker.http2.timers.HANDSHAKE_S", 0.01)
    peer = Peer()
    peer.send(GREETING[:10])
    await until(lambda: peer.transport.aborted)


def cut_block(peer: Peer) -> bytes:
    """Returns a block of two frames with another stream's frame between them."""
    block = peer.encoder.encode(HEADERS)
    begun = frame(frames.HEADERS, 0, 1, block[:5])
    return begun + data(1, b"") + frame(frames.CONTINUATION, frames.END_HEADERS, 1, block[5:])


BROKEN: dict[str, tuple[Callable[[Peer], bytes], ErrorCode]] = {
    "http1": (lambda _: b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", ErrorCode.PROTOCOL_ERROR),
    "no-settings": (lambda _: frames.PREFACE + frame(frames.PING, 0, 0, b"12345678"), ErrorCode.PROTOCOL_ERROR),
    "data-first": (lambda _: frames.PREFACE + data(1, b"x"), ErrorCode.PROTOCOL_ERROR),
    "idle-data": (lambda _: GREETING + data(1, b"x"), ErrorCode.PROTOCOL_ERROR),
    "idle-window": (lambda _: GREETING + frames.window_update(9, 1), ErrorCode.PROTOCOL_ERROR),
    "idle-reset": (lambda _: GREETING + frames.rst_stream(1, ErrorCode.CANCEL), ErrorCode.PROTOCOL_ERROR),
    "even-stream": (lambda peer: GREETING + peer.headers(2), ErrorCode.PROTOCOL_ERROR),
    "push": (lambda _: GREETING + frame(frames.PUSH_PROMISE, 0, 1, b"\0\0\0\2"), ErrorCode.PROTOCOL_ERROR),
    "long-frame": (lambda _: GREETING + frames.HEAD.pack(16_385 << 8, 0, 1), ErrorCode.FRAME_SIZE_ERROR),
    "settings-size": (lambda _: GREETING + frame(frames.SETTINGS, 0, 0, b"123"), ErrorCode.FRAME_SIZE_ERROR),
    "settings-window": (
        lambda _: GREETING + frames.settings({Http2Setting.INITIAL_WINDOW_SIZE: 1 << 31}),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "settings-frame": (
        lambda _: GREETING + frames.settings({Http2Setting.MAX_FRAME_SIZE: 1}),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "ping-size": (lambda _: GREETING + frame(frames.PING, 0, 0, b"1"), ErrorCode.PROTOCOL_ERROR),
    "window-zero": (lambda _: GREETING + frames.window_update(0, 0), ErrorCode.PROTOCOL_ERROR),
    "window-overflow": (lambda _: GREETING + frames.window_update(0, (1 << 31) - 1), ErrorCode.FLOW_CONTROL_ERROR),
    "stream-window-overflow": (
        lambda peer: GREETING + peer.headers(1) + frames.window_update(1, (1 << 31) - 1),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "window-size": (lambda _: GREETING + frame(frames.WINDOW_UPDATE, 0, 0, b"1"), ErrorCode.FRAME_SIZE_ERROR),
    "continuation": (
        lambda _: GREETING + frame(frames.CONTINUATION, frames.END_HEADERS, 1, b""),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "interrupted-block": (lambda peer: GREETING + cut_block(peer), ErrorCode.PROTOCOL_ERROR),
    "hpack-index": (lambda _: GREETING + frame(frames.HEADERS, 4, 1, b"\xff\xff\xff\x0f"), ErrorCode.COMPRESSION_ERROR),
    "hpack-cut": (lambda _: GREETING + frame(frames.HEADERS, 4, 1, b"\x40\x05ab"), ErrorCode.COMPRESSION_ERROR),
    "padding": (
        lambda peer: GREETING + peer.headers(1) + frame(0, frames.PADDED, 1, b"\x09x"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "second-headers": (lambda peer: GREETING + peer.headers(1) + peer.headers(1), ErrorCode.PROTOCOL_ERROR),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_broken_protocol_ends_the_connection_and_its_calls(name: str) -> None:
    send, code = BROKEN[name]
    peer = Peer()
    peer.send(send(peer))
    assert await peer.error() is code
    assert all(each.ends == 1 for each in peer.calls)
    peer.send(GREETING)  # what comes after is not read
    assert peer.connection.calls == 0


async def test_header_list_that_grows_in_the_table_is_bounded() -> None:
    """A block of a few kilobytes that stands for megabytes of headers."""
    peer = Peer()
    peer.send(GREETING + peer.headers(1, more=[("x-long", "v" * 3_000)]))
    bomb = bytes((0x80 | 62,)) * 1_000
    peer.send(frame(frames.HEADERS, frames.END_HEADERS, 3, bomb))
    assert await peer.error() is ErrorCode.COMPRESSION_ERROR
    assert len(peer.calls) == 1


async def test_many_small_headers_are_refused() -> None:
    peer = Peer()
    peer.send(GREETING + peer.headers(1, more=[(f"x-{number}", "v") for number in range(header_blocks.MOST_HEADERS)]))
    assert await peer.error() is ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("size", [0, 16_000])
async def test_flood_of_continuations_is_stopped(size: int) -> None:
    peer = Peer()
    peer.send(GREETING + frame(frames.HEADERS, 0, 1, b""))
    sent = 0
    while not peer.transport.closed:
        peer.send(frame(frames.CONTINUATION, 0, 1, b"\0" * size))
        sent += 1
        assert sent <= header_blocks.MOST_PARTS
    assert await peer.error() is ErrorCode.ENHANCE_YOUR_CALM


FLOODS: dict[str, bytes] = {
    "pings": frame(frames.PING, 0, 0, b"12345678"),
    "settings": frames.settings({Http2Setting.INITIAL_WINDOW_SIZE: 1}),
    "acks": frame(frames.SETTINGS, frames.ACK, 0),
    "priorities": frame(frames.PRIORITY, 0, 3, b"12345"),
    "unknown": frame(0x42, 0, 0, b"x"),
    "empty-data": frame(frames.DATA, 0, 1),
}


@pytest.mark.parametrize("name", FLOODS)
async def test_flood_of_frames_that_carry_nothing_is_stopped(name: str) -> None:
    peer = Peer()
    peer.send(GREETING + peer.headers(1))
    for _ in range(100):
        peer.send(FLOODS[name] * 200)
    assert await peer.error() is ErrorCode.ENHANCE_YOUR_CALM
    assert [each.ends for each in peer.calls] == [1]


async def test_flood_of_streams_that_are_reset_is_stopped() -> None:
    peer = Peer()
    peer.send(GREETING)
    for number in range(flood_guard.MOST_UNSERVED + 1):
        stream = 2 * number + 1
        peer.send(peer.headers(stream) + frames.rst_stream(stream, ErrorCode.CANCEL))
    assert await peer.error() is ErrorCode.ENHANCE_YOUR_CALM
    assert peer.connection.calls == 0


async def test_proxy_that_resets_streams_after_their_answers_is_served() -> None:
    peer = Peer()
    peer.send(GREETING)
    for number in range(2 * flood_guard.MOST_UNSERVED):
        stream = 2 * number + 1
        peer.send(peer.headers(stream) + data(stream, framed(b"x")) + frames.rst_stream(stream, ErrorCode.CANCEL))
    assert await peer.error() is None
    assert sum(len(each.messages) for each in peer.calls) == 2 * flood_guard.MOST_UNSERVED


def test_block_with_the_same_bytes_is_decoded_again_once_the_table_has_changed() -> None:
    blocks, encoder = HeaderBlocks(), Encoder()
    first = [*HEADERS[:2], (":path", "/first"), *HEADERS[3:]]
    blocks.read(encoder.encode(first))
    again = encoder.encode(first)
    assert blocks.read(again).path == blocks.read(again).path == "/first"
    blocks.read(encoder.encode([(":path", "/second")]))
    assert blocks.read(encoder.encode(first)).path == "/first"
    # An index that meant one path means another, after one more entry.
    assert blocks.read(bytes((0x82, 0x80 | 62))).path == "/second"
    blocks.read(encoder.encode([(":path", "/third")]))
    assert blocks.read(bytes((0x82, 0x80 | 62))).path == "/third"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([(b":method", b"GET"), (b"content-type", b"application/grpc")], "This port serves gRPC"),
        ([(b":method", b"POST"), (b"content-type", b"text/html")], "This port serves gRPC"),
        ([(b":method", b"POST"), (b"content-type", b"application/grpc+proto")], ""),
    ],
)
def test_request_that_is_no_call_is_named(headers: list[tuple[bytes, bytes]], expected: str) -> None:
    assert header_blocks.read_head(headers).problem.startswith(expected)
    assert bool(header_blocks.read_head(headers).problem) == bool(expected)


@pytest.mark.parametrize(("text", "seconds"), [("5S", 5.0), ("250m", 0.25), ("2H", 7200.0), ("x", 0.0), ("-1S", 0.0)])
def test_timeout_of_a_call_is_read(text: str, seconds: float) -> None:
    assert header_blocks.read_head([(b"grpc-timeout", text.encode())]).timeout_s == seconds


@given(st.integers(0, 100), st.text(max_size=60), st.binary(max_size=300))
def test_trailers_are_what_a_decoder_reads(status: int, message: str, detail: bytes) -> None:
    found = dict(Decoder().decode(header_blocks.trailers(status, message, [("detail-bin", detail), ("v", "1")])))
    assert found["grpc-status"] == str(status)
    assert found["v"] == "1"
    assert found.get("grpc-message", "").isascii()
