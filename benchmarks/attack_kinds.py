"""Attacks for `benchmarks/attacks.py`: every entrance in six ways, each a function that attacks once and returns."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

import grpc

from sluice.v1 import common_pb2, postprocess_pb2, router_pb2, router_pb2_grpc, worker_pb2
from tests.support.clients import entrances
from tests.support.clients.entrances import Delivery, Sender, Target
from tests.support.fakes.hostile_worker import HostileWorker, card, extra, rows

MIB = 1 << 20
KINDS = ("smallest frames", "most values", "deepest", "longest strings", "most parallel", "slowest")
Attack = Callable[[Target], Awaitable[None]]

Frames = list[worker_pb2.TokenBatch | bytes]
Messages = Callable[[int], Iterable[router_pb2.AttachRequest]]

HOLD_S = 5.0
_numbers = itertools.count()


def _chat(model: str, messages: bytes) -> bytes:
    return b'{"model":"%s","max_tokens":2,"messages":%s}' % (model.encode(), messages)


def _payload(kind: str, size: int) -> Callable[[str], bytes]:
    """Returns a function that makes a body of about `size` bytes for a model."""
    user = b'[{"role":"user","content":"%s"}]'

    def make(model: str) -> bytes:
        if kind == "most values":
            return _chat(model, b"[%s]" % b",".join([b"[]"] * (size // 3)))
        if kind == "deepest":
            return _chat(model, b"[" * (size // 2) + b"]" * (size // 2))
        if kind == "longest strings":
            return _chat("m" * size, user % b"hi")
        return _chat(model, user % (b"word " * (size // 5)))

    return make


def _lines(kind: str, size: int) -> Callable[[str], bytes]:
    """Returns a function that makes a file of requests."""

    def make(model: str) -> bytes:
        if kind == "smallest frames":
            return b"0\n" * (size // 2)
        line = {"custom_id": "a", "method": "POST", "url": entrances.CHAT}
        if kind == "longest strings":
            return json.dumps({**line, "custom_id": "i" * size, "body": {}}).encode()
        head = json.dumps(line).encode()[:-1] + b', "body": %s}'
        if kind in ("most values", "deepest"):
            return head % _payload(kind, size)(model)
        chats = [head.replace(b'"a"', b'"%d"' % number) % _payload("", 100)(model) for number in range(200)]
        return b"\n".join(chats)

    return make


def _sent(sender: Sender, make: Callable[[str], bytes], delivery: Delivery, parallel: int = 1) -> Attack:
    payloads: dict[str, bytes] = {}

    async def attack(target: Target) -> None:
        if target.model not in payloads:
            payloads[target.model] = make(target.model)
        sending = (sender(target, payloads[target.model], delivery) for _ in range(parallel))
        await asyncio.gather(*sending, return_exceptions=True)

    return attack


def _bodies(sender: Sender, size: int) -> dict[str, Attack]:
    """The six ways to send a body of up to `size` bytes through an entrance."""
    return {
        "smallest frames": _sent(sender, _payload("", 40_000), Delivery(chunk=1)),
        "most values": _sent(sender, _payload("most values", size), Delivery()),
        "deepest": _sent(sender, _payload("deepest", size), Delivery()),
        "longest strings": _sent(sender, _payload("longest strings", size), Delivery()),
        "most parallel": _sent(sender, _payload("", size), Delivery(ends=False), parallel=50),
        "slowest": _sent(sender, _payload("", 1_000), Delivery(chunk=10, pause_s=0.1, ends=False), parallel=100),
    }


async def _open_sockets(target: Target) -> None:
    """Holds as many WebSockets as it gets, with pings on each."""

    async def one() -> None:
        with suppress(OSError, EOFError, TimeoutError):
            async with entrances.socket(target) as (_, writer):
                async with asyncio.timeout(HOLD_S):
                    while True:
                        writer.write(entrances.frame(b"", 9) * 100)
                        await writer.drain()
                        await asyncio.sleep(0.05)

    await asyncio.gather(*(one() for _ in range(120)), return_exceptions=True)


async def _open_calls(target: Target) -> None:
    """Holds calls of RouteQuery that never send their request."""
    sending = (entrances.send_query(target, b"", Delivery(ends=False)) for _ in range(500))
    await asyncio.gather(*sending, return_exceptions=True)


async def _small_queries(target: Target) -> None:
    """Sends thousands of bodies without a prompt."""
    sending = (entrances.send_query(target, b"{}", Delivery()) for _ in range(200))
    await asyncio.gather(*sending, return_exceptions=True)


def _batches() -> dict[str, Attack]:
    sender, size = entrances.send_batch, 9 * MIB
    return {
        **{kind: _sent(sender, _lines(kind, size), Delivery()) for kind in KINDS[:4]},
        "most parallel": _sent(sender, _lines("", size), Delivery(), parallel=20),
        "slowest": _sent(sender, _lines("", size), Delivery(chunk=1000, pause_s=0.05), parallel=20),
    }


def _forms() -> dict[str, Attack]:
    part = f'--{entrances.BOUNDARY}\r\ncontent-disposition: form-data; name="a"\r\n\r\n\r\n'.encode()
    heads = f"--{entrances.BOUNDARY}\r\n".encode() + b"a: b\r\n" * 1_500_000
    name = f'--{entrances.BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="'.encode()
    bodies = _bodies(entrances.send_form, 9 * MIB)
    return {
        **bodies,
        "most values": _sent(entrances.send_form, lambda _: part * 150_000, Delivery()),
        "deepest": _sent(entrances.send_form, lambda _: heads, Delivery()),
        "longest strings": _sent(entrances.send_form, lambda _: name + b"f" * (9 * MIB) + b'"\r\n\r\n', Delivery()),
    }


def _frames(make: Callable[[int], Frames], pause_s: float = 0.0, workers: int = 1) -> Attack:
    """Workers of an invented model that send frames on every session that gateways open."""

    async def one(target: Target) -> None:
        async with HostileWorker(f"hostile-{next(_numbers)}", model=f"evil-{next(_numbers)}") as worker:
            attached = await worker.attach(target.router)
            try:
                async with asyncio.timeout(HOLD_S):
                    await worker.connected()
                    for number in itertools.count():
                        worker.send(*make(number))
                        await worker.drained()
                        await asyncio.sleep(pause_s)
            finally:
                await attached.close()

    async def attack(target: Target) -> None:
        with suppress(TimeoutError, grpc.aio.AioRpcError):
            await asyncio.gather(*(one(target) for _ in range(workers)), return_exceptions=True)

    return attack


def _worker_frames() -> dict[str, Attack]:
    events = [
        postprocess_pb2.StreamEvent(slot=slot, tool_calls=[postprocess_pb2.ToolCallDelta(index=1)] * 50)
        for slot in range(2_000)
    ]
    nested = extra(1, events=events)
    return {
        "smallest frames": _frames(lambda _: [b""] * 2_000),
        "most values": _frames(lambda _: [rows(*((slot, [1]) for slot in range(100_000)))]),
        "deepest": _frames(lambda _: [nested]),
        "longest strings": _frames(
            lambda _: [extra(1, events=[postprocess_pb2.StreamEvent(slot=1, text="x" * (8 * MIB))])]
        ),
        "most parallel": _frames(lambda _: [b""] * 100, workers=30),
        "slowest": _frames(lambda _: [b"\xff"], pause_s=0.1),
    }


def _registering(messages: Messages, parallel: int = 1, pause_s: float = 0.0) -> Attack:
    """Streams of Attach that send messages until they are refused."""

    async def one(target: Target) -> None:
        stub = router_pb2_grpc.RouterStub(entrances.channels.channel(target.router))
        call = stub.Attach()
        try:
            async with asyncio.timeout(HOLD_S):
                for message in messages(next(_numbers)):
                    await call.write(message)
                    if pause_s:
                        await asyncio.sleep(pause_s)
                await call.done_writing()
                while await call.read() is not grpc.aio.EOF:
                    continue
        finally:
            call.cancel()

    async def attack(target: Target) -> None:
        await asyncio.gather(*(one(target) for _ in range(parallel)), return_exceptions=True)

    return attack


def _registration(number: int, **fields: object) -> router_pb2.AttachRequest:
    values = {
        "worker_id": f"evil-{number}",
        "address": "127.0.0.1:9",
        "epoch": 1_700_000_000_000_000 + number,
        "card": card(f"evil-{number}"),
        "role": common_pb2.WORKER_ROLE_AGGREGATED,
        "engine": "hostile",
        **fields,
    }
    return router_pb2.AttachRequest(registration=router_pb2.Registration(**values))  # type: ignore[arg-type]


def _then(
    message: router_pb2.AttachRequest, times: int = 20_000
) -> Callable[[int], Iterable[router_pb2.AttachRequest]]:
    return lambda number: itertools.chain([_registration(number)], itertools.repeat(message, times))


def _registrations() -> dict[str, Attack]:
    hashes = router_pb2.AttachRequest(
        events=router_pb2.KvEventBatch(
            sequence=1, events=[router_pb2.KvEvent(stored=router_pb2.BlocksStored()) for _ in range(100_000)]
        )
    )
    loads = router_pb2.AttachRequest(
        heartbeat=router_pb2.Heartbeat(loads=[common_pb2.WorkerLoad() for _ in range(100_000)])
    )
    long = card("evil", capabilities=["c" * (4 * MIB)])
    return {
        "smallest frames": _registering(_then(router_pb2.AttachRequest(heartbeat=router_pb2.Heartbeat()))),
        "most values": _registering(_then(hashes, 50)),
        "deepest": _registering(_then(loads, 50)),
        "longest strings": _registering(lambda number: [_registration(number, card=long)]),
        "most parallel": _registering(lambda number: [_registration(number)], parallel=300),
        "slowest": _registering(lambda _: itertools.repeat(router_pb2.AttachRequest(), 100), parallel=300, pause_s=0.5),
    }


def _sockets() -> dict[str, Attack]:
    empty = _sent(entrances.send_socket, _payload("", 1_000_000), Delivery(chunk=2))
    return {
        **_bodies(entrances.send_socket, 9 * MIB),
        "smallest frames": empty,
        "most parallel": _open_sockets,
    }


def _queries() -> dict[str, Attack]:
    bodies = _bodies(entrances.send_query, 15 * MIB)
    parallel = _sent(entrances.send_query, _payload("most values", 15 * MIB), Delivery(), parallel=8)
    return {**bodies, "smallest frames": _small_queries, "most parallel": parallel, "slowest": _open_calls}


async def _hostile_engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: str) -> None:
    """Answers one connection: /health as it should, everything else without end."""
    path = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1]
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
    if path == b"/health":
        writer.write(b"content-length: 2\r\n\r\n{}")
        return await writer.drain()
    if kind == "most parallel":  # sends nothing more
        return await asyncio.sleep(HOLD_S)
    chunk = {"most values": b"[]," * 20_000, "deepest": b"[" * 60_000, "longest strings": b"x" * 60_000}.get(
        kind, b"1,"
    )
    writer.write(b"transfer-encoding: chunked\r\n\r\n")
    writer.write(b'2\r\n["\r\n' if kind == "longest strings" else b"1\r\n[\r\n")
    while True:
        frames = 5_000 if kind == "smallest frames" else 1
        writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk) * frames)
        await writer.drain()
        await asyncio.sleep(0.5 if kind == "slowest" else 0)


def _engine(kind: str) -> Attack:
    """The server of a foreign engine, on the port of the target, for as long as the attack lasts."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError):
            await _hostile_engine(reader, writer, kind)
        writer.close()

    async def attack(target: Target) -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", target.engine_port)
        async with server:
            await server.serve_forever()

    return attack


ENGINE = "foreign engine"
ENTRANCES: dict[str, dict[str, Attack]] = {
    "HTTP": _bodies(entrances.send_http, 9 * MIB),
    "WebSocket": _sockets(),
    "endpoint picker": _bodies(entrances.send_picker, 15 * MIB),
    "HTTP twin": _bodies(entrances.send_twin, 15 * MIB),
    "RouteQuery": _queries(),
    "batch": _batches(),
    "file": _forms(),
    "worker frames": _worker_frames(),
    "registration": _registrations(),
    ENGINE: {kind: _engine(kind) for kind in KINDS},
}
"""Attacks by entrance and kind."""
