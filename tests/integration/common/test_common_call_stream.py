"""Calls that share a stream behave like unary ones: answers, typed refusals, late answers, callers that leave, a peer
that goes, one that knows no sessions. With several replicas behind them, too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from services.common.base import logs
from services.common.base.errors import ErrorKind, SluiceError, not_found, unavailable
from services.common.observability import telemetry
from services.common.rpc import multiplexed_call as call_stream
from services.common.rpc.call_server import MultiplexedCallServer
from services.common.rpc.errors import answer
from services.common.rpc.multiplexed_call import MultiplexedCall
from services.common.rpc.replicas import ReplicaSet
from services.common.rpc.server import GrpcServer
from services.common.settings.service import GrpcServiceSettings
from sluice.v1 import common_pb2, preprocess_pb2, preprocess_pb2_grpc
from tests.support.waiting import until

DEADLINE_S = 20
LATE_S = 0.2


class Tokenizer(preprocess_pb2_grpc.PreprocessServicer):
    """Answers with the text; what it does first is in the text's words."""

    def __init__(self, sessions: bool = True, most_calls: int = 100) -> None:
        self.sessions = sessions
        self.most_calls = most_calls
        self.unary = self.shared = self.running = self.streams = 0
        self.metadata: dict[str, str | bytes] = {}
        self.named = ""
        self.gate = asyncio.Event()

    async def _tokenize(self, request: preprocess_pb2.TokenizeRequest) -> preprocess_pb2.TokenizeResponse:
        self.running += 1
        try:
            if request.model == "unknown":
                raise not_found("No such model.", param="model", code="model_not_found")
            if request.model == "broken":
                raise KeyError("secret")
            if request.model == "slow":
                await self.gate.wait()
            return preprocess_pb2.TokenizeResponse(token_ids=request.text.text.encode())
        finally:
            self.running -= 1

    async def Tokenize(self, request: Any, context: Any) -> preprocess_pb2.TokenizeResponse:
        self.unary += 1
        return await answer(context, self._tokenize, request)

    async def Session(self, calls: Any, context: Any) -> None:  # type: ignore[override]
        if not self.sessions:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED)

        async def handle(call: Any, metadata: Iterable[tuple[str, str | bytes]]) -> Any:
            self.shared += 1
            self.metadata = dict(metadata)
            self.named = logs.request_id.get()
            return {"response": await self._tokenize(call.request)}

        self.streams += 1
        kinds = preprocess_pb2.TokenizeAnswer, preprocess_pb2.TokenizeAnswers
        await MultiplexedCallServer(handle, *kinds, most_calls=self.most_calls).serve(context)


class Host:
    """One replica."""

    def __init__(self, service: Tokenizer) -> None:
        self.service = service
        self.server = GrpcServer(GrpcServiceSettings(listen="127.0.0.1:0"), preprocess_pb2.DESCRIPTOR)
        preprocess_pb2_grpc.add_PreprocessServicer_to_server(service, self.server.server)


def stub_of(channel: grpc.aio.Channel) -> Any:
    stub: Any = preprocess_pb2_grpc.PreprocessStub(channel)
    stub.Tokenize = MultiplexedCall(
        "preprocess", stub.Tokenize, stub.Session, preprocess_pb2.TokenizeCall, preprocess_pb2.TokenizeCalls
    )
    return stub


@asynccontextmanager
async def suite(*services: Tokenizer) -> AsyncIterator[tuple[list[Host], ReplicaSet[Any]]]:
    hosts = [Host(service) for service in services]
    for host in hosts:
        await host.server.start()
        await host.server.set_serving(True)
    targets = [f"127.0.0.1:{host.server.port}" for host in hosts]
    chosen: ReplicaSet[Any] = ReplicaSet("preprocess", targets, stub_of, shared=lambda stub: stub.Tokenize)
    await chosen.start()
    try:
        await until(lambda: len(chosen.serving) == len(hosts))
        yield hosts, chosen
    finally:
        await chosen.close()
        for host in hosts:
            await host.server.stop(0)


async def opened(chosen: ReplicaSet[Any], *services: Tokenizer) -> None:
    """Waits until every replica's session takes calls."""
    await until(lambda: all(replica.stub.Tokenize._announced is not None for replica in chosen.serving))
    assert all(service.streams == 1 for service in services)


async def ask(chosen: ReplicaSet[Any], text: str = "a", model: str = "m", timeout_s: float = DEADLINE_S) -> str:
    request = preprocess_pb2.TokenizeRequest(model=model, text=preprocess_pb2.TextInput(text=text))
    answered = await chosen.call(lambda stub: stub.Tokenize, request, timeout_s)
    return str(answered.token_ids.decode())


async def test_calls_share_a_stream_and_each_gets_its_answer() -> None:
    service = Tokenizer()  # type: ignore[abstract]
    async with suite(service) as (_, chosen):
        await opened(chosen, service)
        texts = [f"text {index}" for index in range(50)]
        assert await asyncio.gather(*(ask(chosen, text) for text in texts)) == texts
        assert (service.shared, service.unary, service.streams) == (50, 0, 1)


async def test_a_slow_call_holds_nobody_up_and_metadata_arrives() -> None:
    service = Tokenizer()  # type: ignore[abstract]
    async with suite(service) as (_, chosen):
        await opened(chosen, service)
        slow = asyncio.create_task(ask(chosen, "late", "slow"))
        assert await ask(chosen, "quick") == "quick"
        stub = chosen.serving[0].stub
        request = preprocess_pb2.TokenizeRequest(model="m")
        sent = {"traceparent": "00-1", telemetry.REQUEST_KEY: "req-7"}
        await stub.Tokenize(request, timeout=DEADLINE_S, metadata=tuple(sent.items()))
        assert service.metadata == sent
        assert service.named == "req-7", "log lines about the call name its request"
        service.gate.set()
        assert await slow == "late"


async def test_refusals_are_typed_and_failures_keep_their_text() -> None:
    service = Tokenizer()  # type: ignore[abstract]
    async with suite(service) as (_, chosen):
        await opened(chosen, service)
        with pytest.raises(SluiceError) as refused:
            await ask(chosen, model="unknown")
        assert (refused.value.kind, refused.value.param, refused.value.code) == (
            ErrorKind.NOT_FOUND,
            "model",
            "model_not_found",
        )
        with pytest.raises(SluiceError) as failed:
            await ask(chosen, model="broken")
        assert failed.value.kind is ErrorKind.INTERNAL
        assert "secret" not in failed.value.message
        assert service.unary == 0


class Newer(Tokenizer):
    """A version whose errors are of a kind that is unknown here."""

    async def Session(self, calls: Any, context: Any) -> None:  # type: ignore[override]
        self.streams += 1
        await context.write(preprocess_pb2.TokenizeAnswers())
        async for message in calls:
            for call in message.calls:
                self.shared += 1
                detail = common_pb2.ErrorDetail(kind=99, message="Of a new kind.")  # type: ignore[arg-type]
                one = preprocess_pb2.TokenizeAnswer(number=call.number, error=detail)
                await context.write(preprocess_pb2.TokenizeAnswers(answers=[one]))


async def test_an_error_of_a_kind_that_is_not_known_here_costs_its_own_call_only() -> None:
    service = Newer()  # type: ignore[abstract]
    async with suite(service) as (_, chosen):
        await opened(chosen, service)
        for _ in range(2):
            with pytest.raises(SluiceError, match="Of a new kind") as failed:
                await ask(chosen)
            assert failed.value.kind is ErrorKind.INTERNAL
        assert (service.shared, service.unary, service.streams) == (2, 0, 1)


async def test_a_call_that_is_late_or_left_stops_on_the_server() -> None:
    service = Tokenizer()  # type: ignore[abstract]
    async with suite(service) as (_, chosen):
        await opened(chosen, service)
        with pytest.raises(SluiceError) as late:
            await ask(chosen, model="slow", timeout_s=LATE_S)
        assert late.value.kind is ErrorKind.DEADLINE_EXCEEDED
        await until(lambda: service.running == 0)
        leaving = asyncio.create_task(ask(chosen, model="slow"))
        await until(lambda: service.running == 1)
        leaving.cancel()
        await until(lambda: service.running == 0)
        assert await ask(chosen, "still here") == "still here"


async def test_a_peer_without_sessions_is_called_one_by_one() -> None:
    service = Tokenizer(sessions=False)  # type: ignore[abstract]
    async with suite(service) as (_, chosen):
        assert await asyncio.gather(*(ask(chosen, text) for text in "abc")) == ["a", "b", "c"]
        assert (service.unary, service.shared) == (3, 0)


async def test_a_large_request_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_stream, "MAX_BYTES", 1000)
    service = Tokenizer()  # type: ignore[abstract]
    async with suite(service) as (_, chosen):
        await opened(chosen, service)
        assert await ask(chosen, "x" * 1001) == "x" * 1001
        assert await ask(chosen, "x") == "x"
        assert (service.unary, service.shared) == (1, 1)


async def test_what_is_larger_than_a_message_goes_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_stream, "BYTES_PER_MESSAGE", 50)
    service = Tokenizer()  # type: ignore[abstract]
    async with suite(service) as (_, chosen):
        await opened(chosen, service)
        texts = [str(index) * 100 for index in range(10)]
        assert await asyncio.gather(*(ask(chosen, text) for text in texts)) == texts


async def test_calls_of_a_lost_session_are_made_again_on_another_replica() -> None:
    services = [Tokenizer(), Tokenizer()]  # type: ignore[abstract]
    async with suite(*services) as (hosts, chosen):
        await opened(chosen, *services)
        asking = [asyncio.create_task(ask(chosen, str(index), "slow")) for index in range(20)]
        await until(lambda: sum(service.running for service in services) == 20)
        assert services[0].running == 10
        await hosts[0].server.stop(0)
        services[1].gate.set()
        assert await asyncio.gather(*asking) == [str(index) for index in range(20)]


async def test_a_session_ends_with_its_last_answer_when_its_peer_is_not_serving_any_more() -> None:
    service = Tokenizer()  # type: ignore[abstract]
    async with suite(service) as (hosts, chosen):
        await opened(chosen, service)
        last = asyncio.create_task(ask(chosen, "last", "slow"))
        await until(lambda: service.running == 1)
        stopping = asyncio.create_task(hosts[0].server.stop(DEADLINE_S))  # waits for streams that are open
        await until(lambda: not chosen.serving)
        service.gate.set()
        assert await last == "last"
        await asyncio.wait_for(stopping, DEADLINE_S / 2)


async def test_a_peer_that_comes_back_gets_a_session_again() -> None:
    service = Tokenizer()  # type: ignore[abstract]
    async with suite(service) as (hosts, chosen):
        await opened(chosen, service)
        await hosts[0].server.set_serving(False)
        await until(lambda: not chosen.serving)
        await hosts[0].server.set_serving(True)
        await until(lambda: service.streams == 2)
        await until(lambda: chosen.serving[0].stub.Tokenize._announced is not None)
        assert await ask(chosen, "again") == "again"
        assert service.shared == 1


async def test_a_caller_that_asks_without_end_is_cut_off() -> None:
    service = Tokenizer(most_calls=5)  # type: ignore[abstract]
    async with suite(service) as (_, chosen):
        await opened(chosen, service)
        asking = [ask(chosen, model="slow", timeout_s=5) for _ in range(6)]
        outcomes = await asyncio.gather(*asking, return_exceptions=True)
        assert all(isinstance(outcome, SluiceError) for outcome in outcomes)
        await until(lambda: service.running == 0)


async def test_a_caller_that_is_done_gets_every_answer() -> None:
    service = Tokenizer()  # type: ignore[abstract]
    async with suite(service) as (_, chosen):
        call = chosen.serving[0].stub.Session(timeout=DEADLINE_S)
        request = preprocess_pb2.TokenizeRequest(model="slow", text=preprocess_pb2.TextInput(text="x"))
        await call.write(
            preprocess_pb2.TokenizeCalls(
                calls=[preprocess_pb2.TokenizeCall(number=number, request=request) for number in (7, 9)]
            )
        )
        await call.done_writing()
        await until(lambda: service.running == 2)
        service.gate.set()
        got = [one.number async for message in call for one in message.answers]
        assert sorted(got) == [7, 9]


async def test_two_calls_of_one_number_are_refused_and_others_of_the_session_served() -> None:
    service = Tokenizer()  # type: ignore[abstract]
    async with suite(service) as (_, chosen):
        call = chosen.serving[0].stub.Session(timeout=DEADLINE_S)
        twice = [preprocess_pb2.TokenizeCall(number=1, request=preprocess_pb2.TokenizeRequest(model="slow"))] * 2
        other = preprocess_pb2.TokenizeCall(number=2, request=preprocess_pb2.TokenizeRequest(model="m"))
        await call.write(preprocess_pb2.TokenizeCalls(calls=[*twice, other]))
        answers: dict[int, Any] = {}
        async for message in call:
            answers |= {answer.number: answer for answer in message.answers}
            if len(answers) == 2:
                break
        assert answers[1].error.kind == common_pb2.ERROR_KIND_INVALID_ARGUMENT
        assert answers[2].HasField("response")
        await until(lambda: service.running == 0)
        call.cancel()


async def test_typed_unavailability_is_retried_elsewhere() -> None:
    services = [Tokenizer(), Tokenizer()]  # type: ignore[abstract]
    stopping = unavailable("This replica is stopping.")

    async def refuse(request: Any) -> Any:
        raise stopping

    async with suite(*services) as (_, chosen):
        await opened(chosen, *services)
        services[0]._tokenize = refuse  # type: ignore[method-assign]
        assert await asyncio.gather(*(ask(chosen, str(index)) for index in range(8))) == [
            str(index) for index in range(8)
        ]
