"""Every entrance of the suite through which a stranger sends bytes, each as a function that sends a payload.

How a payload arrives is a `Delivery`: whole, in chunks of any size, slowly, or never to its end. The senders write what
no client library would, so a test or a benchmark can send anything through any entrance.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc

from services.common.rpc.channels import open_channel
from sluice.v1 import ext_proc_pb2 as ext_proc
from sluice.v1 import router_pb2
from tests.support.clients.ext_proc import FULL_DUPLEX, header_map

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
WAIT_S = 60
HOLD_S = 5.0
"""How long a payload that never ends is held; seconds."""
WRITE_BYTES = 64 << 10
BOUNDARY = "entrance-boundary"


@dataclass(frozen=True, slots=True)
class Target:
    """A running suite.

    Attributes:
        gateway: host and port; `twin` likewise.
        picker: host:port; `router` likewise.
        model: a served model.
        engine_port: port at which a worker expects a foreign engine's server; 0: none does.
    """

    gateway: tuple[str, int]
    twin: tuple[str, int]
    picker: str
    router: str
    model: str
    engine_port: int = 0


@dataclass(frozen=True, slots=True)
class Delivery:
    """How a payload arrives.

    Attributes:
        chunk: bytes of each frame that the transport allows; 0: as few frames as possible.
        pause_s: between two frames.
        ends: whether the end of the payload is sent; otherwise the connection is held and then cut.
    """

    chunk: int = 0
    pause_s: float = 0.0
    ends: bool = True

    def pieces(self, payload: bytes) -> Iterator[bytes]:
        """Yields the frames of a payload."""
        size = self.chunk or len(payload) or 1
        for start in range(0, len(payload), size):
            yield payload[start : start + size]


Sender = Callable[[Target, bytes, Delivery], Awaitable[str]]
"""Sends a payload; returns the status of the answer: an HTTP status, a gRPC status, an event's type or `cut`."""


async def _write(writer: asyncio.StreamWriter, frames: Iterator[bytes], delivery: Delivery) -> None:
    """Writes frames, many small ones at a time unless there is a pause between them."""
    pending = bytearray()
    for frame in frames:
        pending += frame
        if delivery.pause_s or len(pending) >= WRITE_BYTES:
            writer.write(bytes(pending))
            pending.clear()
            await writer.drain()
            await asyncio.sleep(delivery.pause_s)
    writer.write(bytes(pending))
    await writer.drain()


async def post(
    place: tuple[str, int], path: str, payload: bytes, delivery: Delivery, content_type: str = "application/json"
) -> tuple[str, bytes]:
    """Sends a POST; returns its status and the body of its answer."""
    reader, writer = await asyncio.open_connection(*place)
    try:
        chunked = bool(delivery.chunk)
        framing = "transfer-encoding: chunked" if chunked else f"content-length: {len(payload) + (not delivery.ends)}"
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {content_type}\r\n{framing}\r\n\r\n"
        writer.write(head.encode())
        answering = asyncio.ensure_future(_answer(reader))
        try:
            with suppress(OSError):  # refused before its end
                pieces = delivery.pieces(payload)
                framed = (b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) if chunked else pieces
                await _write(writer, framed, delivery)
                if chunked and delivery.ends:
                    writer.write(b"0\r\n\r\n")
                    await writer.drain()
            async with asyncio.timeout(WAIT_S if delivery.ends else HOLD_S):
                return await answering
        finally:
            answering.cancel()
    except (OSError, EOFError, TimeoutError):
        return "cut", b""
    finally:
        writer.close()


async def _answer(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    body = await reader.readexactly(int(length[0][15:]) if length else 0)
    return head[9:12].decode(), body


async def send_http(target: Target, payload: bytes, delivery: Delivery) -> str:
    """Sends a chat to the gateway."""
    return (await post(target.gateway, CHAT, payload, delivery))[0]


async def send_twin(target: Target, payload: bytes, delivery: Delivery) -> str:
    """Sends a body to the router's HTTP twin."""
    return (await post(target.twin, "/route", payload, delivery))[0]


def _form(payload: bytes) -> bytes:
    parts = (
        f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
        f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n',
    )
    return "".join(parts).encode() + payload + f"\r\n--{BOUNDARY}--\r\n".encode()


async def send_form(target: Target, payload: bytes, delivery: Delivery) -> str:
    """Sends a form as it is to /v1/files."""
    kind = f"multipart/form-data; boundary={BOUNDARY}"
    return (await post(target.gateway, "/v1/files", payload, delivery, kind))[0]


async def send_batch(target: Target, payload: bytes, delivery: Delivery) -> str:
    """Uploads a file of requests and starts a batch of it."""
    kind = f"multipart/form-data; boundary={BOUNDARY}"
    status, body = await post(target.gateway, "/v1/files", _form(payload), delivery, kind)
    if status != "200":
        return status
    batch = {"input_file_id": json.loads(body)["id"], "endpoint": CHAT, "completion_window": "24h"}
    return (await post(target.gateway, "/v1/batches", json.dumps(batch).encode(), Delivery()))[0]


@asynccontextmanager
async def socket(target: Target) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Opens a WebSocket of Responses; frames are written by hand."""
    reader, writer = await asyncio.open_connection(*target.gateway)
    try:
        key = base64.b64encode(os.urandom(16)).decode()
        writer.write(
            f"GET {RESPONSES} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
            f"sec-websocket-version: 13\r\nsec-websocket-key: {key}\r\n\r\n".encode()
        )
        async with asyncio.timeout(WAIT_S):
            head = await reader.readuntil(b"\r\n\r\n")
        if b" 101 " not in head[:16]:
            raise ConnectionRefusedError(head[9:12].decode())
        yield reader, writer
    finally:
        writer.close()


def frame(payload: bytes, opcode: int = 1, *, final: bool = True) -> bytes:
    """Returns a frame of a WebSocket client, masked with zeros."""
    size = len(payload)
    if size < 126:
        length = bytes([0x80 | size])
    elif size < 1 << 16:
        length = struct.pack(">BH", 0x80 | 126, size)
    else:
        length = struct.pack(">BQ", 0x80 | 127, size)
    return bytes([(0x80 if final else 0) | opcode]) + length + bytes(4) + payload


async def send_socket(target: Target, payload: bytes, delivery: Delivery) -> str:
    """Sends one message over WebSocket, and returns the type of the first event."""
    try:
        async with socket(target) as (reader, writer):
            pieces = list(delivery.pieces(payload)) or [b""]
            last = len(pieces) - 1
            frames = (
                frame(piece, 1 if number == 0 else 0, final=number == last and delivery.ends)
                for number, piece in enumerate(pieces)
            )
            answering = asyncio.ensure_future(reader.read(1024))
            try:
                with suppress(OSError):
                    await _write(writer, frames, delivery)
                async with asyncio.timeout(WAIT_S if delivery.ends else HOLD_S):
                    event = await answering
            finally:
                answering.cancel()
            return event.partition(b'"type":"')[2].partition(b'"')[0].decode("ascii", "replace") or "cut"
    except ConnectionRefusedError as error:
        return str(error)
    except (OSError, EOFError, TimeoutError):
        return "cut"


class _Shared:
    """Channels by address: a stranger's connection carries many streams, as Envoy's does."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    def channel(self, address: str) -> grpc.aio.Channel:
        """Returns the channel to an address."""
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        return self._channels[address]

    async def close(self) -> None:
        """Closes all channels."""
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()


channels = _Shared()


async def send_picker(target: Target, payload: bytes, delivery: Delivery) -> str:
    """Sends a chat through the endpoint picker, as Envoy does."""
    call = channels.channel(target.picker).stream_stream(
        "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
        request_serializer=ext_proc.ProcessingRequest.SerializeToString,
        response_deserializer=ext_proc.ProcessingResponse.FromString,
    )()
    modes = ext_proc.ProtocolConfiguration(request_body_mode=FULL_DUPLEX, response_body_mode=FULL_DUPLEX)
    headers = header_map({":method": "POST", ":path": CHAT})
    try:
        async with asyncio.timeout(WAIT_S if delivery.ends else HOLD_S):
            await call.write(
                ext_proc.ProcessingRequest(request_headers=ext_proc.HttpHeaders(headers=headers), protocol_config=modes)
            )
            reading = asyncio.ensure_future(call.read())  # a rejection ends the stream while the body is being sent
            with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
                for piece in Delivery(delivery.chunk or 64 << 10).pieces(payload):
                    if reading.done():
                        break
                    await call.write(ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=piece)))
                    if delivery.pause_s:
                        await asyncio.sleep(delivery.pause_s)
                if delivery.ends:
                    await call.write(ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(end_of_stream=True)))
            response: Any = await reading
            if response is grpc.aio.EOF:
                return (await call.code()).name
            if response.HasField("immediate_response"):
                return str(response.immediate_response.status.code)
            return "picked"
    except TimeoutError:
        return "cut"
    except grpc.aio.AioRpcError as error:
        return error.code().name
    finally:
        call.cancel()


async def send_query(target: Target, payload: bytes, delivery: Delivery) -> str:
    """Asks RouteQuery with the payload as its openai_body; chunks have no meaning for a unary call."""
    call: Any = channels.channel(target.router).stream_unary(
        "/sluice.v1.Router/RouteQuery",
        request_serializer=router_pb2.RouteQueryRequest.SerializeToString,
        response_deserializer=router_pb2.RouteQueryResponse.FromString,
    )()
    try:
        async with asyncio.timeout(WAIT_S if delivery.ends else HOLD_S):
            if delivery.ends:
                prompt = router_pb2.PromptRef(openai_body=payload)
                await call.write(router_pb2.RouteQueryRequest(model=target.model, prompt=prompt))
                await call.done_writing()
            await call
            return "OK"
    except TimeoutError:
        return "cut"
    except asyncio.InvalidStateError:
        return (await call.code()).name  # type: ignore[no-any-return]
    except grpc.aio.AioRpcError as error:
        return error.code().name
    finally:
        call.cancel()


SENDERS: Mapping[str, Sender] = {
    "HTTP": send_http,
    "WebSocket": send_socket,
    "endpoint picker": send_picker,
    "HTTP twin": send_twin,
    "RouteQuery": send_query,
    "batch": send_batch,
    "file": send_form,
}
"""The entrances for bytes, by name."""
