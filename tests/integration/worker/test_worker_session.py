"""A worker over real gRPC: sessions, the streaming twin, and every other call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import grpc
import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.common.rpc.errors import from_rpc_error
from services.worker.server import WorkerServer
from services.worker.serving import outbox
from sluice.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from tests.support.servers.workers import Caller, generation, hosted, stub_of
from tests.support.waiting import until

LENGTH = common_pb2.FINISH_REASON_LENGTH
STOP = common_pb2.FINISH_REASON_STOP
ERROR = common_pb2.FINISH_REASON_ERROR


@pytest.fixture
async def host(folder: Path) -> AsyncIterator[WorkerServer]:
    async with hosted(folder, adapters=["polite"]) as host:
        yield host


@pytest.fixture
async def slow(folder: Path) -> AsyncIterator[WorkerServer]:
    """A worker in real time: a request of thousands of tokens runs for as long as any test."""
    async with hosted(folder, speedup=1.0, drain_s=0.2) as host:
        yield host


@pytest.fixture
async def stub(host: WorkerServer) -> AsyncIterator[worker_pb2_grpc.WorkerAsyncStub]:
    async with stub_of(host) as stub:
        yield stub


async def failure(call: Awaitable[object]) -> SluiceError:
    """The typed error of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return from_rpc_error(raised.value, "worker")


async def test_interleaved_requests_all_get_their_own_tokens(
    host: WorkerServer, stub: worker_pb2_grpc.WorkerAsyncStub
) -> None:
    caller = Caller(stub)
    prompts = {slot: (0, 20 + slot, 21, 1) for slot in range(64)}
    await caller.send({slot: generation(f"r{slot}", prompt) for slot, prompt in prompts.items()})
    await caller.ended(*prompts)
    together = {slot: ids.tobytes() for slot, ids in caller.token_ids.items()}
    for slot, prompt in list(prompts.items())[:5]:
        caller.forget(slot)
        await caller.send({slot: generation("again", prompt)})
        await caller.ended(slot)
        assert caller.token_ids[slot].tobytes() == together[slot]
    for slot, terminal in caller.terminals.items():
        assert terminal.finish_reason == STOP
        assert terminal.stop_token_id == caller.token_ids[slot][-1]
        assert terminal.usage.completion_tokens == len(caller.token_ids[slot])
        assert terminal.usage.prompt_tokens == 4
        assert caller.cached[slot] == terminal.usage.cached_tokens
    assert len(set(together.values())) == 64
    assert host.worker.live_requests == 0
    await caller.close()


async def test_a_step_of_many_requests_is_one_message(stub: worker_pb2_grpc.WorkerAsyncStub) -> None:
    caller = Caller(stub)
    await caller.send({slot: generation(f"r{slot}", max_tokens=100, ignore_eos=True) for slot in range(32)})
    await caller.ended(*range(32))
    assert sum(map(len, caller.token_ids.values())) == 3200
    assert caller.batches <= 320
    await caller.close()


async def test_bad_requests_end_their_own_slot_and_nothing_else(stub: worker_pb2_grpc.WorkerAsyncStub) -> None:
    caller = Caller(stub)
    broken = generation("broken")
    broken.tokens.token_ids = b"\1\2\3"
    deep = generation("deep")
    deep.sampling.engine_options_json = b'{"a":' * 100_000
    bad = {
        1: (generation("empty", ()), ErrorKind.INVALID_ARGUMENT, ""),
        2: (generation("outside", (1 << 20,)), ErrorKind.INVALID_ARGUMENT, ""),
        3: (generation("long", [5] * 5000), ErrorKind.INVALID_ARGUMENT, "context_length_exceeded"),
        4: (generation("model", model="gpt"), ErrorKind.NOT_FOUND, "model_not_found"),
        5: (generation("none", max_tokens=0), ErrorKind.INVALID_ARGUMENT, ""),
        6: (broken, ErrorKind.INVALID_ARGUMENT, ""),
        7: (generation(""), ErrorKind.INVALID_ARGUMENT, ""),
        8: (worker_pb2.GenerateRequest(request_id="t", model="tiny", text="x"), ErrorKind.FAILED_PRECONDITION, ""),
        9: (deep, ErrorKind.INVALID_ARGUMENT, ""),
    }
    await caller.send({0: generation("good"), **{slot: asked for slot, (asked, _, _) in bad.items()}})
    await caller.ended(0, *bad)
    assert caller.terminals[0].finish_reason == STOP
    for slot, (_, kind, code) in bad.items():
        terminal = caller.terminals[slot]
        assert terminal.finish_reason == ERROR
        assert ErrorKind(terminal.error.kind) is kind
        assert terminal.error.code.startswith(code)
        assert "Traceback" not in terminal.error.message
        assert slot not in caller.token_ids
    await caller.close()


async def test_a_caller_that_does_not_read_is_cut_off_and_others_are_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_TOKENS", 2 * outbox.PAGE_TOKENS)
    async with (
        hosted(folder, context_length=200_000, drain_s=0.2) as host,
        stub_of(host) as stub,
        stub_of(host) as mine,
    ):
        deaf = stub.Session()
        await deaf.write(
            worker_pb2.WorkerSessionRequest(
                starts=[
                    worker_pb2.SessionStart(slot=slot, request=generation(f"d{slot}", ignore_eos=True))
                    for slot in range(4)
                ]
            )
        )
        caller = Caller(mine)
        await caller.send({0: generation("heard")})
        await caller.ended(0)
        await until(lambda: len(host.service.sessions) == 1, timeout_s=60)
        assert host.worker.live_requests == 0
        await caller.send({1: generation("still heard")})
        await caller.ended(1)
        assert caller.terminals[1].finish_reason == STOP
        deaf.cancel()
        await caller.close()


async def test_what_the_engine_cannot_do_is_said_so(stub: worker_pb2_grpc.WorkerAsyncStub) -> None:
    asked = generation("grammar")
    asked.guided.ebnf = "root ::= 'a'"
    grammar = await failure(stub.Generate(asked).read())
    assert grammar.kind is ErrorKind.FAILED_PRECONDITION
    assert "guided_grammar" in grammar.message
    nothing = await failure(stub.Control(worker_pb2.ControlRequest()))
    assert nothing.kind is ErrorKind.INVALID_ARGUMENT
    alone = await failure(stub.Control(worker_pb2.ControlRequest(action=worker_pb2.ControlRequest.ACTION_RESYNC)))
    assert alone.kind is ErrorKind.FAILED_PRECONDITION
    embed = await failure(stub.Embed(worker_pb2.EmbedRequest(request_id="e", model="tiny")))
    assert embed.kind is ErrorKind.INVALID_ARGUMENT


async def test_shutdown_lets_requests_finish_and_tells_the_others(folder: Path) -> None:
    async with hosted(folder, speedup=10.0, drain_s=30.0) as host, stub_of(host) as stub:
        caller = Caller(stub)
        await caller.send({1: generation("short", max_tokens=40, ignore_eos=True)})
        await caller.began(1)
        stopping = asyncio.create_task(host.shut_down())
        await until(lambda: host.worker.draining)
        await caller.ended(1)
        assert caller.terminals[1].finish_reason == LENGTH
        assert len(caller.token_ids[1]) == 40
        async with asyncio.timeout(10):
            await stopping
        await caller.close()


async def test_requests_that_outlast_the_drain_hear_why(slow: WorkerServer) -> None:
    async with stub_of(slow) as stub:
        caller = Caller(stub)
        await caller.send({1: generation("endless", ignore_eos=True)})
        await caller.began(1)
        async with asyncio.timeout(10):
            await slow.shut_down()
        await caller.ended(1)
        assert ErrorKind(caller.terminals[1].error.kind) is ErrorKind.ENGINE_SHUTDOWN
        assert caller.terminals[1].error.retryable
        assert caller.terminals[1].usage.completion_tokens == len(caller.token_ids[1])
        await caller.close()
