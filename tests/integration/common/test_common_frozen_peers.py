"""Stopped peers are noticed by either side of a connection in time; busy and foreign ones are left alone."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from services.common.base.errors import ErrorKind
from services.common.rpc.channels import FOREIGN_KEEPALIVE_MS, KEEPALIVE_MS, keepalive_ms_of, open_channel
from services.common.rpc.replicas import ReplicaSet
from sluice.v1 import worker_pb2, worker_pb2_grpc
from tests.support.oracles.errors import raises_error
from tests.support.servers.session_peer import (
    seconds_until_stopped_client_is_lost,
    seconds_until_stopped_server_is_lost,
    session_peer,
)
from tests.support.waiting import until

NOTICED_S = 15.0
"""As docs/resilience.md has it."""
SLACK_S = 4.0
"""For a busy machine."""
BUSY_S = NOTICED_S + 2


async def _seconds_until_call_to_stopped_server_fails() -> float:
    with session_peer("serve") as process:
        assert process.stdout is not None
        port = int(await asyncio.to_thread(process.stdout.readline))
        replicas = ReplicaSet("worker", [f"127.0.0.1:{port}"], worker_pb2_grpc.WorkerStub)
        await replicas.start()
        try:
            assert await replicas.wait_ready(10)
            process.send_signal(signal.SIGSTOP)
            stopped_at = time.monotonic()
            with raises_error(kind=ErrorKind.UNAVAILABLE):
                await replicas.call(lambda stub: stub.GetInfo, worker_pb2.GetInfoRequest(), 120)
            assert replicas.serving == []
            return time.monotonic() - stopped_at
        finally:
            await replicas.close()


async def test_stopped_peer_is_noticed_by_client_and_server_within_the_documented_time() -> None:
    async with asyncio.timeout(60):
        seconds = await asyncio.gather(
            seconds_until_stopped_server_is_lost(),
            _seconds_until_call_to_stopped_server_fails(),
            seconds_until_stopped_client_is_lost(),
        )
    assert max(seconds) <= NOTICED_S + SLACK_S, seconds


async def test_server_whose_interpreter_is_busy_for_longer_is_not_lost() -> None:
    with session_peer("serve", str(BUSY_S)) as process:
        assert process.stdout is not None
        port = int(await asyncio.to_thread(process.stdout.readline))
        async with open_channel(f"127.0.0.1:{port}") as channel:
            message = await worker_pb2_grpc.WorkerStub(channel).Session().read()
    assert message == worker_pb2.TokenBatch()


class PingCounter(asyncio.Protocol):
    """A bare HTTP/2 server that acknowledges settings and counts pings."""

    ACK, SETTINGS, PING = 1, 4, 6
    PREFACE, HEADER = 24, 9

    def __init__(self) -> None:
        self.pings = 0
        self._received = bytearray()
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._send(self.SETTINGS, 0, b"")

    def data_received(self, data: bytes) -> None:
        self._received += data
        start = self.PREFACE
        while len(self._received) >= start + self.HEADER:
            size = int.from_bytes(self._received[start : start + 3], "big")
            kind, flags = self._received[start + 3 : start + 5]
            end = start + self.HEADER + size
            if len(self._received) < end:
                break
            body = bytes(self._received[start + self.HEADER : end])
            del self._received[start:end]
            if kind == self.SETTINGS and not flags & self.ACK:
                self._send(self.SETTINGS, self.ACK, b"")
            if kind == self.PING and not flags & self.ACK:
                self.pings += 1
                self._send(self.PING, self.ACK, body)

    def _send(self, kind: int, flags: int, body: bytes) -> None:
        self._transport.write(len(body).to_bytes(3, "big") + bytes((kind, flags)) + bytes(4) + body)


@asynccontextmanager
async def silent_call(**options: Any) -> AsyncIterator[PingCounter]:
    """A call without a response on a channel with these options."""
    counter = PingCounter()
    server = await asyncio.get_running_loop().create_server(lambda: counter, "127.0.0.1", 0)
    async with server, open_channel(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", **options) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Session()
        await channel.channel_ready()
        yield counter
        call.cancel()


async def test_servers_are_pinged_as_often_as_they_permit() -> None:
    async with (
        silent_call(keepalive_ms=keepalive_ms_of(5_000)) as own,
        silent_call(keepalive_ms=keepalive_ms_of(0)) as foreign,
    ):
        await until(lambda: own.pings, 30)
        await asyncio.sleep(1)
        assert foreign.pings == 0


@pytest.mark.parametrize(
    ("advertised", "used"),
    [
        (0, FOREIGN_KEEPALIVE_MS),
        (1, KEEPALIVE_MS),
        (5_000, KEEPALIVE_MS),
        (60_000, 60_000),
        (2**32 - 1, FOREIGN_KEEPALIVE_MS),
    ],
)
def test_keepalive_obeys_the_server_within_bounds(advertised: int, used: int) -> None:
    assert keepalive_ms_of(advertised) == used


@pytest.mark.slow
async def test_silent_call_to_a_server_with_grpc_s_default_policy_is_not_ended() -> None:
    async def hang(request: bytes, context: Any) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    server = grpc.aio.server()
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {"Hang": grpc.unary_unary_rpc_method_handler(hang)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}", keepalive_ms=FOREIGN_KEEPALIVE_MS) as channel:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/test.Test/Hang")
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call(b"", timeout=75)
            assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    finally:
        await server.stop(0)
