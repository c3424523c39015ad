"""Sessions over real connections: they carry, they end with a typed reason, and nothing hangs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.packing import pack_u32, unpack_u32
from services.common.rpc.channels import open_channel
from services.common.rpc.server import GrpcServer
from services.common.rpc.session import BatchWriter, ClientSession, serve_session
from services.common.settings.service import GrpcServiceSettings
from sluice.v1 import worker_pb2, worker_pb2_grpc

DEADLINE_S = 20
POISON = 2**32 - 1


class EchoWorker(worker_pb2_grpc.WorkerServicer):
    """Sends every cancelled slot back; breaks at a poisoned one."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.error: BaseException | None = None
        self.batches: list[int] = []
        self.drain_breaks = False

    async def Session(self, iterator: Any, context: Any) -> None:  # type: ignore[override]
        ready: list[int] = []

        def drain() -> worker_pb2.TokenBatch | None:
            if self.drain_breaks:
                raise ValueError("drain is broken")
            if not ready:
                return None
            self.batches.append(len(ready))
            batch = worker_pb2.TokenBatch(slots=pack_u32(ready))
            ready.clear()
            return batch

        def on_message(message: worker_pb2.WorkerSessionRequest) -> None:
            slots = unpack_u32(message.cancels)
            if POISON in slots:
                raise ValueError("handler is broken")
            ready.extend(slots)
            writer.wake()

        writer = BatchWriter(drain, context.write)
        try:
            await serve_session(context, writer, on_message)
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.ended.set()


class Caller:
    """The other side: a buffer of slots to send and everything that came back."""

    def __init__(self, stub: Any) -> None:
        self.waiting: list[int] = []
        self.received: list[int] = []
        self.arrived = asyncio.Event()
        self.breaks_at = ""
        self.session: ClientSession[Any, Any] = ClientSession("worker", stub.Session, self._drain, self._on_message)

    def send(self, *slots: int) -> None:
        self.waiting.extend(slots)
        self.session.wake()

    def _drain(self) -> worker_pb2.WorkerSessionRequest | None:
        if self.breaks_at == "drain":
            raise KeyError("drain is broken")
        if not self.waiting:
            return None
        message = worker_pb2.WorkerSessionRequest(cancels=pack_u32(self.waiting))
        self.waiting.clear()
        return message

    def _on_message(self, batch: worker_pb2.TokenBatch) -> None:
        if self.breaks_at == "message":
            raise KeyError("handler is broken")
        self.received.extend(unpack_u32(batch.slots))
        self.arrived.set()

    async def has(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.received) < count:
                self.arrived.clear()
                await self.arrived.wait()


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[EchoWorker, GrpcServer, Callable[[], Caller]]]:
    worker = EchoWorker()  # type: ignore[abstract]
    server = GrpcServer(GrpcServiceSettings(listen="127.0.0.1:0"), worker_pb2.DESCRIPTOR)
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server.server)
    await server.start()
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        try:
            yield worker, server, lambda: Caller(stub)
        finally:
            await server.stop(0)


def raw_session(channel: grpc.aio.Channel) -> Any:
    return cast(Any, worker_pb2_grpc.WorkerStub(channel)).Session(timeout=DEADLINE_S)


async def reason(running: asyncio.Task[SluiceError]) -> SluiceError:
    return await asyncio.wait_for(running, DEADLINE_S)


async def test_carries_everything_in_order_and_in_batches() -> None:
    async with connected() as (worker, _, make):
        caller = make()
        running = asyncio.create_task(caller.session.run())
        for slot in range(5000):
            caller.send(slot)
            if slot % 50 == 0:
                await asyncio.sleep(0)
        await caller.has(5000)
        assert caller.received == list(range(5000))
        assert len(worker.batches) <= 100
        running.cancel()
        await asyncio.wait([running])
        await asyncio.wait_for(worker.ended.wait(), DEADLINE_S)


async def test_session_on_a_channel_closed_before_it_opens_returns_a_typed_error() -> None:
    async with connected() as (_, _, make), open_channel("127.0.0.1:1") as closed:
        caller = make()
        caller.session._open_call = lambda: raw_session(closed)
        await closed.close()
        error = await reason(asyncio.create_task(caller.session.run()))
        assert (error.kind, error.retryable) == (ErrorKind.DISCONNECTED, True)


class BrokenOff(worker_pb2_grpc.WorkerServicer):
    """Ends sessions as gRPC does when a process is killed in an unfortunate moment: INTERNAL, without a detail."""

    async def Session(self, iterator: Any, context: Any) -> None:  # type: ignore[override]
        await context.abort(grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2")


async def test_session_that_grpc_ends_with_internal_is_a_lost_connection() -> None:
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(BrokenOff(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        try:
            error = await reason(asyncio.create_task(Caller(worker_pb2_grpc.WorkerStub(channel)).session.run()))
        finally:
            await server.stop(0)
    assert (error.kind, error.retryable) == (ErrorKind.DISCONNECTED, True)


async def test_what_was_buffered_before_the_session_runs_is_sent() -> None:
    async with connected() as (_, _, make):
        caller = make()
        caller.send(1, 2)
        running = asyncio.create_task(caller.session.run())
        await caller.has(2)
        running.cancel()


async def test_server_that_goes_away_ends_the_session_with_a_retryable_reason() -> None:
    async with connected() as (_, server, make):
        caller = make()
        running = asyncio.create_task(caller.session.run())
        caller.send(1)
        await caller.has(1)
        await server.stop(0)
        error = await reason(running)
    assert error.kind is ErrorKind.DISCONNECTED
    assert error.retryable


async def test_server_that_was_never_there_is_the_same() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        caller = Caller(worker_pb2_grpc.WorkerStub(channel))
        caller.send(1)
        error = await reason(asyncio.create_task(caller.session.run()))
    assert error.kind is ErrorKind.DISCONNECTED


async def test_close_ends_both_sides() -> None:
    async with connected() as (worker, _, make):
        caller = make()
        running = asyncio.create_task(caller.session.run())
        caller.send(1)
        await caller.has(1)
        caller.session.close()
        assert (await reason(running)).kind is ErrorKind.DISCONNECTED
        await asyncio.wait_for(worker.ended.wait(), DEADLINE_S)


@pytest.mark.parametrize("first", ["closed", "woken"])
async def test_what_is_still_to_be_written_when_it_is_closed_is_no_defect(first: str) -> None:
    async with connected() as (_, _, make):
        for _ in range(20):
            caller = make()
            running = asyncio.create_task(caller.session.run())
            caller.send(1)
            await caller.has(1)
            if first == "closed":
                caller.session.close()
            caller.send(2)
            caller.session.close()
            assert (await reason(running)).kind is ErrorKind.DISCONNECTED


async def test_a_busy_session_may_be_closed_at_any_moment() -> None:
    async with connected() as (_, _, make):
        for number in range(40):
            caller = make()
            running = asyncio.create_task(caller.session.run())
            caller.send(1)
            await caller.has(1)

            async def talk(caller: Caller = caller) -> None:
                while True:
                    caller.send(2)
                    await asyncio.sleep(0)

            talking = asyncio.create_task(talk())
            await asyncio.sleep(0.0003 * number)
            caller.session.close()
            assert (await reason(running)).kind is ErrorKind.DISCONNECTED
            talking.cancel()


async def test_cancelled_owner_stays_cancelled_and_the_server_notices() -> None:
    async with connected() as (worker, _, make):
        caller = make()
        running = asyncio.create_task(caller.session.run())
        caller.send(1)
        await caller.has(1)
        running.cancel()
        await asyncio.wait([running], timeout=DEADLINE_S)
        assert running.cancelled()
        await asyncio.wait_for(worker.ended.wait(), DEADLINE_S)


@pytest.mark.parametrize("breaks_at", ["drain", "message"])
async def test_defect_of_the_caller_ends_the_session_with_the_defect(breaks_at: str) -> None:
    async with connected() as (worker, _, make):
        caller = make()
        running = asyncio.create_task(caller.session.run())
        caller.send(1)
        await caller.has(1)
        caller.breaks_at = breaks_at
        caller.send(2)
        with pytest.raises(KeyError, match="is broken"):
            await reason(running)
        await asyncio.wait_for(worker.ended.wait(), DEADLINE_S)


async def test_defect_of_the_servers_handler_ends_the_session_on_both_sides() -> None:
    async with connected() as (worker, _, make):
        caller = make()
        running = asyncio.create_task(caller.session.run())
        caller.send(POISON)
        error = await reason(running)
        assert "handler is broken" not in error.message
        await asyncio.wait_for(worker.ended.wait(), DEADLINE_S)
        assert isinstance(worker.error, ValueError)


async def test_defect_of_the_servers_drain_ends_the_session_on_both_sides() -> None:
    async with connected() as (worker, _, make):
        worker.drain_breaks = True
        caller = make()
        running = asyncio.create_task(caller.session.run())
        caller.send(1)
        error = await reason(running)
        assert "drain is broken" not in error.message
        await asyncio.wait_for(worker.ended.wait(), DEADLINE_S)
        assert isinstance(worker.error, ValueError)


async def test_caller_that_is_done_but_not_gone_gets_what_is_ready() -> None:
    async with connected() as (_, server, _), open_channel(f"127.0.0.1:{server.port}") as channel:
        call = raw_session(channel)
        await call.write(worker_pb2.WorkerSessionRequest(cancels=pack_u32([1, 2])))
        await call.done_writing()
        assert [slot async for batch in call for slot in unpack_u32(batch.slots)] == [1, 2]


async def test_defect_while_a_write_is_under_way_still_ends_the_session() -> None:
    async with connected() as (_, _, make):
        for _ in range(20):
            caller = make()
            running = asyncio.create_task(caller.session.run())
            for slot in range(300):
                caller.send(slot)
                if slot % 50 == 0:
                    await asyncio.sleep(0)
            caller.send(POISON)
            await reason(running)


async def test_a_session_that_is_cancelled_ends_after_the_write_that_is_under_way() -> None:
    class Context:
        async def read(self) -> None:
            await asyncio.Event().wait()

    written: list[str] = []
    begun, free = asyncio.Event(), asyncio.Event()

    async def write(message: str) -> None:
        begun.set()
        await free.wait()
        written.append(message)

    waiting = ["first", "second"]
    writer: BatchWriter[str] = BatchWriter(lambda: waiting.pop(0) if waiting else None, write)
    serving = asyncio.create_task(serve_session(cast(Any, Context()), writer, lambda message: None))
    writer.wake()
    await begun.wait()
    serving.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not serving.done()
    free.set()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert written == ["first"]


@pytest.mark.parametrize("half_closed", [False, True])
async def test_session_whose_peer_dies_during_a_write_is_cancelled_with_one_log_line(
    half_closed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Context:
        async def read(self) -> object:
            if not half_closed:
                await asyncio.Event().wait()
            return grpc.aio.EOF

    async def write(message: str) -> None:
        raise grpc.aio.InternalError("Failed to send a message.")  # whose subclass gRPC raises

    waiting = ["first"]
    writer: BatchWriter[str] = BatchWriter(lambda: waiting.pop(0) if waiting else None, write)
    writer.wake()
    with caplog.at_level(logging.INFO), pytest.raises(asyncio.CancelledError):
        await serve_session(cast(Any, Context()), writer, lambda message: None)
    (record,) = [record for record in caplog.records if record.name == "services.common.rpc.session"]
    assert "disconnected while a message was written" in record.message
    assert record.exc_info is None
