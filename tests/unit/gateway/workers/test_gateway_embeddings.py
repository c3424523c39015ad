"""Embedding through workers that can, with another one where a call breaks; requests choose workers by capability."""

from __future__ import annotations

import asyncio
import struct
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from services.common.base.errors import (
    ENGINE_UNHEALTHY,
    NOT_STARTED,
    SHUTTING_DOWN,
    STEP_FAILED,
    ErrorKind,
    SluiceError,
)
from services.common.base.packing import pack_u32
from services.common.rpc.errors import DETAIL_KEY, status_of, to_detail
from services.gateway.apis.openai.embeddings import EmbeddingOperations
from services.gateway.backends.placement.interfaces import Placement
from services.gateway.backends.rpc.worker_link import WorkerLink
from services.gateway.backends.workers.capabilities import able
from services.gateway.backends.workers.connections import ConnectionManager
from services.gateway.backends.workers.embeddings import INPUTS_PER_CALL, EmbedClient, EmbedInput
from services.gateway.backends.workers.registry import WorkerEntry, WorkerRegistry
from services.gateway.core import context
from services.gateway.core.context import RequestContext
from services.gateway.core.deadlines import Deadline
from services.gateway.core.request import (
    GenerationRequest,
    Route,
    SamplingParams,
    StopParams,
    TextPrompt,
    TokenizedPrompt,
)
from services.gateway.metrics import GatewayMetrics
from services.gateway.operations.operation import Caller
from services.gateway.streams.manager import StreamManager
from services.gateway.streams.watchdog import WorkerWatchdog
from sluice.v1 import common_pb2, worker_pb2
from tests.support.data.bodies import BUDGETS
from tests.support.oracles.errors import raises_error


class Stub:
    """Embeds a list of ids as its sum, or fails as told."""

    def __init__(self, *failures: grpc.StatusCode | SluiceError | asyncio.CancelledError) -> None:
        self.failures = list(failures)
        self.asked: list[worker_pb2.EmbedRequest] = []
        self.timeouts: list[float] = []

    async def Embed(self, message: worker_pb2.EmbedRequest, **how: Any) -> worker_pb2.EmbedResponse:
        assert how["timeout"] > 0
        self.timeouts.append(how["timeout"])
        self.asked.append(message)
        await asyncio.sleep(0)
        if self.failures:
            failure, trailing = self.failures.pop(0), grpc.aio.Metadata()
            if isinstance(failure, asyncio.CancelledError):  # as grpc.aio does when a channel closes
                raise failure
            if isinstance(failure, SluiceError):
                trailing.add(DETAIL_KEY, to_detail(failure).SerializeToString())
                failure = status_of(failure.kind)
            raise grpc.aio.AioRpcError(failure, grpc.aio.Metadata(), trailing, "broken")
        sums = [sum(memoryview(one.token_ids).cast("I")) for one in message.inputs]
        return worker_pb2.EmbedResponse(
            embeddings=[worker_pb2.Embedding(values=struct.pack("<f", total)) for total in sums],
            usage=common_pb2.Usage(prompt_tokens=sum(len(one.token_ids) // 4 for one in message.inputs)),
        )


def entry(worker_id: str, *capabilities: str) -> WorkerEntry:
    return WorkerEntry(worker_id, "127.0.0.1:1", 1, "m", 16, 64, 256, frozenset(capabilities), 0)


class Workers:
    """A catalogue and a fleet of stubs."""

    def __init__(self, stubs: dict[str, Stub], without: tuple[str, ...] = ()) -> None:
        self.stubs = stubs
        self.links = {
            name: SimpleNamespace(worker_id=name, peer=name, live=0, embedding=0, stub=stub)
            for name, stub in stubs.items()
        }
        self.registry = WorkerRegistry(cast(Any, None), lambda worker: None, lambda worker_id: None)
        self.registry.synced = True
        for name in stubs:
            self.registry.workers[name] = entry(name, *([] if name in without else ["embeddings"]))
        self.client = EmbedClient(self.registry, cast(ConnectionManager, self), 5)

    def least_busy(self, worker_ids: list[str]) -> WorkerLink | None:
        links = [self.links[worker_id] for worker_id in worker_ids]
        return cast(WorkerLink, min(links, key=lambda link: link.embedding)) if links else None

    async def embed(self, *inputs: int) -> list[float]:
        found = await self.client.embed("r", "m", [EmbedInput(pack_u32([one])) for one in inputs], 0)
        assert found.prompt_tokens == len(inputs)
        return [struct.unpack("<f", vector)[0] for vector in found.vectors]


async def test_many_inputs_are_several_calls_in_order() -> None:
    workers = Workers({"a": Stub(), "b": Stub()})
    inputs = list(range(3 * INPUTS_PER_CALL + 5))
    assert await workers.embed(*inputs) == inputs
    assert sum(len(stub.asked) for stub in workers.stubs.values()) == 4
    assert all(stub.asked for stub in workers.stubs.values())
    assert all(link.embedding == 0 for link in workers.links.values())


async def test_only_workers_that_embed_are_asked() -> None:
    workers = Workers({"a": Stub(), "b": Stub()}, without=("a",))
    assert await workers.embed(1, 2) == [1, 2]
    assert not workers.stubs["a"].asked


async def test_a_broken_call_is_made_elsewhere() -> None:
    workers = Workers({"a": Stub(grpc.StatusCode.UNAVAILABLE), "b": Stub()})
    assert await workers.embed(7) == [7]
    assert len(workers.stubs["b"].asked) == 1


async def test_call_whose_channel_closes_is_made_on_another_worker() -> None:
    class Closing(Stub):
        async def Embed(self, message: worker_pb2.EmbedRequest, **how: Any) -> worker_pb2.EmbedResponse:
            raise asyncio.CancelledError  # as grpc.aio does

    workers = Workers({"a": Closing(), "b": Stub()})
    assert await workers.embed(7) == [7]


async def test_invalid_input_is_not_retried_on_another_worker() -> None:
    workers = Workers({"a": Stub(grpc.StatusCode.INVALID_ARGUMENT), "b": Stub(grpc.StatusCode.INVALID_ARGUMENT)})
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT):
        await workers.embed(7)
    assert sum(len(stub.asked) for stub in workers.stubs.values()) == 1


async def test_failure_on_all_workers_raises_the_last_error() -> None:
    workers = Workers({"a": Stub(*[grpc.StatusCode.UNAVAILABLE] * 9), "b": Stub(*[grpc.StatusCode.UNAVAILABLE] * 9)})
    with raises_error(retryable=True):
        await workers.embed(7)
    assert all(len(stub.asked) == 1 for stub in workers.stubs.values())


def unavailable(code: str) -> SluiceError:
    return SluiceError(ErrorKind.UNAVAILABLE, "Not now.", code=code)


@pytest.mark.parametrize(
    ("failure", "tried"),
    [
        (grpc.StatusCode.UNAVAILABLE, 2),
        (asyncio.CancelledError(), 2),
        (SluiceError(ErrorKind.ENGINE_SHUTDOWN, "The engine has ended."), 2),
        (unavailable(ENGINE_UNHEALTHY), 2),
        (unavailable(STEP_FAILED), 2),
        (unavailable(SHUTTING_DOWN), 3),
        (unavailable(NOT_STARTED), 3),
        (SluiceError(ErrorKind.CANNOT_CONNECT, "No one listens."), 3),
    ],
)
async def test_call_that_ends_its_worker_is_tried_on_one_more_only(
    failure: grpc.StatusCode | SluiceError | asyncio.CancelledError, tried: int
) -> None:
    workers = Workers({name: Stub(failure) for name in "abcde"})
    with raises_error(retryable=True):
        await workers.embed(7)
    assert sum(len(stub.asked) for stub in workers.stubs.values()) == tried


async def test_request_of_many_calls_ends_two_workers_at_most() -> None:
    class Mortal(Stub):
        async def Embed(self, message: worker_pb2.EmbedRequest, **how: Any) -> worker_pb2.EmbedResponse:
            if message.inputs[0].token_ids == pack_u32([1]):
                self.failures = [grpc.StatusCode.UNAVAILABLE] * 100
            return await super().Embed(message, **how)

    workers = Workers({name: Mortal() for name in "abcdef"})
    with raises_error(kind=ErrorKind.DISCONNECTED):
        await workers.embed(*range(1, 5 * INPUTS_PER_CALL))
    assert sum(bool(stub.failures) for stub in workers.stubs.values()) == 2


async def test_model_without_embedding_workers_raises_an_error_that_names_model() -> None:
    workers = Workers({"a": Stub()}, without=("a",))
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="model"):
        await workers.embed(7)


def test_workers_that_can_do_it_all() -> None:
    both, one, none = entry("both", "logprobs", "guided_json"), entry("one", "logprobs"), entry("none")
    assert able([both, one, none], ()) == [both, one, none]
    assert able([both, one, none], [("logprobs", "logprobs")]) == [both, one]
    assert able([both, one, none], [("logprobs", "logprobs"), ("guided_json", "response_format")]) == [both]
    with raises_error(param="response_format", code="unsupported_parameter"):
        able([one, none], [("logprobs", "logprobs"), ("guided_json", "response_format")])


async def test_the_time_that_a_request_has_is_that_of_its_vectors_too() -> None:
    workers = Workers({"a": Stub(grpc.StatusCode.DEADLINE_EXCEEDED)})
    context.enter(RequestContext(deadline=Deadline.after(0.001)))
    await asyncio.sleep(0.01)
    with raises_error(kind=ErrorKind.DEADLINE_EXCEEDED, code="request_timeout"):
        await workers.embed(7)
    context.enter(RequestContext(deadline=Deadline.after(2.0)))
    assert await workers.embed(7) == [7]
    assert all(timeout <= 2 for timeout in workers.stubs["a"].timeouts)
    assert all(link.embedding == 0 for link in workers.links.values())


async def test_embedding_of_a_disconnected_client_is_cancelled() -> None:
    begun, ended, gone = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Slow:
        async def embed(self, *how: Any) -> None:
            begun.set()
            try:
                await asyncio.sleep(3600)
            finally:
                ended.set()

    class Preprocess:
        async def tokenize(self, *how: Any) -> Any:
            return SimpleNamespace(token_ids=pack_u32([1, 2]), context_limit=lambda worker_limit: 64, second_text_at=0)

    registry = Workers({"a": Stub()}).registry
    pipeline = SimpleNamespace(registry=registry, preprocess=Preprocess())
    settings = SimpleNamespace(budgets=BUDGETS)
    operations = EmbeddingOperations(cast(Any, pipeline), cast(Any, Slow()), cast(Any, settings))

    async def wait_until_gone() -> None:
        await gone.wait()

    async with asyncio.timeout(20):
        body = {"model": "m", "input": "x"}
        answering = asyncio.create_task(operations.embeddings(body, Caller({}, wait_until_gone)))
        await begun.wait()
        gone.set()
        await ended.wait()
        assert await answering is None


async def test_worker_after_embeddings_only_is_not_stalled_at_its_first_generation() -> None:
    board = StreamManager(10, cast(Any, None), GatewayMetrics())
    link = WorkerLink("w", "", grpc.aio.insecure_channel("127.0.0.1:1"), 1.0, board.events)
    link._connected.set()
    link.embedding = 1  # vectors are under way all the time
    link._active_at -= 1000
    request = GenerationRequest("r", "m", TextPrompt("x"), 1, SamplingParams(), StopParams())
    prompt = TokenizedPrompt(b"\1\0\0\0", b"", "", b"", b"", 100, b"")
    board.connect(request, 0, prompt, Placement(Route("w"), link), 10, cast(Any, None))
    silent: list[bool] = []
    WorkerWatchdog(lambda: [link], 30.0, lambda: silent.append(True), cast(Any, None)).look()
    assert not silent
