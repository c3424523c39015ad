"""The client library on real connections: deadlines, lost and silent peers, replicas, credentials, trust."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
from grpclib.client import Channel
from sluice_client import (
    ConnectionFailedError,
    DeadlineExceededError,
    ErrorKind,
    FinishReason,
    RouterClient,
    SluiceError,
    StopOptions,
    Tls,
    UnauthenticatedError,
    UnavailableError,
    WorkerChangeKind,
    WorkerClient,
)
from sluice_client.wire import CostOverrides

from services.common.base.errors import ErrorKind as ServiceErrorKind
from services.common.base.errors import SluiceError as ServiceError
from services.common.base.errors import unavailable
from services.common.net.ports import free_port
from services.common.rpc.errors import abort
from services.common.rpc.server import GrpcServer
from services.common.settings.service import GrpcServiceSettings
from sluice.v1 import common_pb2, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc


class ScriptedRouter(router_pb2_grpc.RouterServicer):
    """Lists one worker named after itself; holds, refuses and counts as told."""

    def __init__(self, name: str = "w") -> None:
        self.name = name
        self.calls = 0
        self.metadata: dict[str, Any] = {}
        self.refuse: ServiceError | None = None
        self.hold = False
        self.asked: list[Any] = []
        self.watching = asyncio.Event()
        self.unwatched = asyncio.Event()

    async def ListWorkers(self, request, context):  # type: ignore[no-untyped-def]
        self.calls += 1
        self.metadata = dict(context.invocation_metadata())
        if self.refuse is not None:
            await abort(context, self.refuse)
        if self.hold:
            await asyncio.Event().wait()
        return router_pb2.ListWorkersResponse(workers=[router_pb2.WorkerInfo(worker_id=self.name)])

    async def RouteQuery(self, request, context):  # type: ignore[no-untyped-def]
        self.asked.append(request)
        target = router_pb2.WorkerTarget(worker_id=self.name, address="host:1")
        return router_pb2.RouteQueryResponse(decode=target if self.name else None, reservation_id="m:r")

    async def AddRequest(self, request, context):  # type: ignore[no-untyped-def]
        self.asked.append(request)
        return router_pb2.AddRequestResponse(reservation_id="m:r")

    async def FreeRequest(self, request, context):  # type: ignore[no-untyped-def]
        self.asked.append(request)
        if self.refuse is not None:
            await abort(context, self.refuse)
        return router_pb2.FreeRequestResponse()

    async def MarkPrefillComplete(self, request, context):  # type: ignore[no-untyped-def]
        self.asked.append(request)
        if self.refuse is not None:
            await abort(context, self.refuse)
        return router_pb2.MarkPrefillCompleteResponse()

    async def ReportProgress(self, request, context):  # type: ignore[no-untyped-def]
        self.asked.append(request)
        return router_pb2.ReportProgressResponse(unknown=1)

    async def GetDecisions(self, request, context):  # type: ignore[no-untyped-def]
        self.asked.append(request)
        return router_pb2.GetDecisionsResponse(
            decisions=[router_pb2.Decision(request_id="r", predicted_cached_tokens=7)]
        )

    async def WatchWorkers(self, request, context):  # type: ignore[no-untyped-def]
        self.asked.append(request)
        try:
            yield router_pb2.WorkerChange(kind=router_pb2.WorkerChange.KIND_SYNCED)
            self.watching.set()
            if self.refuse is not None:
                await abort(context, self.refuse)
            await asyncio.Event().wait()
        finally:
            self.unwatched.set()


class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """Generates the deltas it is given, then ends or holds."""

    def __init__(self, *deltas: worker_pb2.GenerateDelta, hold: bool = False) -> None:
        self.deltas = deltas
        self.hold = hold
        self.left = asyncio.Event()

    async def Generate(self, request, context):  # type: ignore[no-untyped-def]
        try:
            for delta in self.deltas:
                yield delta
            if self.hold:
                await asyncio.Event().wait()
        finally:
            self.left.set()


def scripted_router(name: str = "w") -> ScriptedRouter:
    return ScriptedRouter(name)  # type: ignore[abstract]  # has only the calls that the tests make


def scripted_worker(*deltas: worker_pb2.GenerateDelta, hold: bool = False) -> ScriptedWorker:
    return ScriptedWorker(*deltas, hold=hold)  # type: ignore[abstract]  # has only the call that the tests make


@asynccontextmanager
async def serving(servicer: ScriptedRouter | ScriptedWorker, **changes: Any) -> AsyncIterator[GrpcServer]:
    settings = GrpcServiceSettings(**{"listen": "127.0.0.1:0", **changes})
    if isinstance(servicer, ScriptedRouter):
        server = GrpcServer(settings, router_pb2.DESCRIPTOR)
        router_pb2_grpc.add_RouterServicer_to_server(servicer, server.server)
    else:
        server = GrpcServer(settings, worker_pb2.DESCRIPTOR)
        worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server.server)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


def at(server: GrpcServer) -> str:
    return f"127.0.0.1:{server.port}"


def port_of(server: asyncio.Server) -> str:
    return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def names(client: RouterClient, **options: Any) -> list[str]:
    return [worker.worker_id for worker in await client.list_workers(**options)]


def delta(*token_ids: int, **extra: Any) -> worker_pb2.GenerateDelta:
    return worker_pb2.GenerateDelta(
        token_ids=b"".join(token_id.to_bytes(4, "little") for token_id in token_ids),
        extra=worker_pb2.TokenExtra(**extra) if extra else None,
    )


async def test_a_deadline_is_a_typed_error_and_the_connection_lives_on() -> None:
    router = scripted_router()
    async with serving(router) as server, RouterClient(at(server)) as client:
        router.hold = True
        with pytest.raises(DeadlineExceededError) as caught:
            await client.list_workers(timeout_s=0.2)
        assert caught.value.kind == ErrorKind.DEADLINE_EXCEEDED
        router.hold = False
        assert await names(client) == ["w"]


async def test_a_deadline_does_not_confuse_timeouts_around_the_call() -> None:
    router = scripted_router()
    router.hold = True
    task = asyncio.current_task()
    assert task is not None

    async def time_out_twice(client: RouterClient) -> None:
        async with asyncio.timeout(1.0):
            with pytest.raises(DeadlineExceededError):
                await client.list_workers(timeout_s=0.1)
            assert task.cancelling() == 0
            await asyncio.Event().wait()

    async with serving(router) as server, RouterClient(at(server)) as client:
        with pytest.raises(TimeoutError):
            await time_out_twice(client)


async def test_nobody_there_is_a_typed_error() -> None:
    async with serving(scripted_router()) as server:
        address = at(server)
    async with RouterClient(address) as client:
        with pytest.raises(ConnectionFailedError, match=address) as caught:
            await client.list_workers()
    assert (caught.value.kind, caught.value.code) == (ErrorKind.CANNOT_CONNECT, "cannot_connect")


async def test_a_peer_that_speaks_something_else_is_a_typed_error() -> None:
    async def speak_http1(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(speak_http1, "127.0.0.1", 0)
    async with server, RouterClient(port_of(server)) as client:
        with pytest.raises(SluiceError):
            await client.list_workers(timeout_s=5)


async def test_a_service_without_the_method_is_a_typed_error() -> None:
    async with serving(scripted_worker()) as server, RouterClient(at(server)) as client:
        with pytest.raises(SluiceError, match="UNIMPLEMENTED") as caught:
            await client.list_workers()
        assert caught.value.kind == ErrorKind.FAILED_PRECONDITION


async def test_a_restarted_router_is_found_again() -> None:
    async with serving(scripted_router("before"), listen=f"127.0.0.1:{free_port()}") as server:
        client = RouterClient(at(server))
        assert await names(client) == ["before"]
    async with client, serving(scripted_router("after"), listen=at(server)):
        assert await names(client) == ["after"]


async def test_a_silent_peer_ends_a_watch() -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(4096):
            pass
        writer.close()

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    address = port_of(server)
    async with server, RouterClient(address, keepalive_s=0.2) as client:
        async with asyncio.timeout(20):
            with pytest.raises(ConnectionFailedError) as caught:
                await anext(client.watch_workers())
        assert caught.value.kind == ErrorKind.DISCONNECTED


async def test_an_answering_peer_keeps_a_quiet_watch() -> None:
    router = scripted_router()
    async with (
        serving(router) as server,
        RouterClient(at(server), keepalive_s=2.0) as client,
        aclosing(client.watch_workers()) as changes,
    ):
        assert (await anext(changes)).kind == WorkerChangeKind.SYNCED
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(changes), 5)


class Connecting:
    """Attempts to connect that are never answered, as by a host that is gone; the first, or all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, only_first: bool = False) -> None:
        self.begun = asyncio.Event()
        connect = Channel._create_connection

        async def hold(channel: Channel) -> Any:
            if not (only_first and self.begun.is_set()):
                self.begun.set()
                await asyncio.Event().wait()
            return await connect(channel)

        monkeypatch.setattr(Channel, "_create_connection", hold)


async def test_a_watch_leaves_a_replica_that_takes_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    Connecting(monkeypatch, only_first=True)
    async with (
        serving(scripted_router()) as server,
        RouterClient("127.0.0.1:1", at(server), keepalive_s=1.0) as client,
        asyncio.timeout(20),
    ):
        with pytest.raises(ConnectionFailedError) as caught:
            await anext(client.watch_workers())
        assert caught.value.kind == ErrorKind.CANNOT_CONNECT
        async with aclosing(client.watch_workers()) as changes:
            assert (await anext(changes)).kind == WorkerChangeKind.SYNCED


async def test_closing_the_client_ends_what_still_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    connecting = Connecting(monkeypatch)
    client = RouterClient("127.0.0.1:1", keepalive_s=60)

    async def watch() -> list[WorkerChangeKind]:
        return [change.kind async for change in client.watch_workers()]

    watching, asking = asyncio.create_task(watch()), asyncio.create_task(client.list_workers(timeout_s=60))
    await asyncio.wait_for(connecting.begun.wait(), 20)
    client.close()
    assert await asyncio.wait_for(watching, 20) == []
    with pytest.raises(ConnectionFailedError):
        await asyncio.wait_for(asking, 20)


async def test_leaving_a_watch_ends_it_on_the_router() -> None:
    router = scripted_router()
    async with serving(router) as server, RouterClient(at(server)) as client:
        async with aclosing(client.watch_workers()) as changes:
            await anext(changes)
        await asyncio.wait_for(router.unwatched.wait(), 20)
        assert await names(client) == ["w"]


async def test_a_watch_that_the_router_ends_is_a_typed_error() -> None:
    router = scripted_router()
    router.refuse = unavailable("Stopping.", code="stopping", retry_after_ms=100)
    async with serving(router) as server, RouterClient(at(server)) as client:
        with pytest.raises(UnavailableError) as caught:
            async for _ in client.watch_workers():
                pass
    assert (caught.value.code, caught.value.retry_after_s) == ("stopping", 0.1)


async def test_a_lost_watch_leaves_the_task_as_it_was() -> None:
    task = asyncio.current_task()
    assert task is not None
    router = scripted_router()
    async with serving(router) as server:
        client = RouterClient(at(server))
        changes = client.watch_workers()
        await anext(changes)
        stopping = asyncio.create_task(server.stop(0))
        with pytest.raises(UnavailableError):
            await anext(changes)
        assert task.cancelling() == 0
        await stopping
        client.close()


async def test_another_replica_is_asked_when_one_cannot_answer() -> None:
    first, second = scripted_router("first"), scripted_router("second")
    async with serving(first) as one, serving(second) as two, RouterClient(at(one), at(two)) as client:
        assert await names(client) == ["first"]
        first.refuse = unavailable("Stopping.", code="stopping")
        assert await names(client) == ["second"]
        first.refuse = None
        assert await names(client) == ["second"], "a client stays with the replica that answers"
        second.hold = True
        assert await names(client, timeout_s=6.0) == ["first"]


async def test_the_error_of_the_last_replica_is_the_caller_s() -> None:
    first, second = scripted_router("first"), scripted_router("second")
    first.refuse = unavailable("One.", code="one")
    second.refuse = unavailable("Two.", code="two")
    async with serving(first) as one, serving(second) as two, RouterClient(at(one), at(two)) as client:
        with pytest.raises(UnavailableError, match="Two"):
            await client.list_workers()
        assert (first.calls, second.calls) == (1, 1)


async def test_a_mistake_of_the_caller_is_not_repeated() -> None:
    first, second = scripted_router("first"), scripted_router("second")
    first.refuse = ServiceError(ServiceErrorKind.UNAUTHENTICATED, "Who are you?")
    async with serving(first) as one, serving(second) as two, RouterClient(at(one), at(two)) as client:
        with pytest.raises(UnauthenticatedError, match="Who"):
            await client.list_workers()
        assert (first.calls, second.calls) == (1, 0)


async def test_token_and_metadata_travel() -> None:
    router = scripted_router()
    options: dict[str, Any] = {"token": "s3cret", "metadata": lambda: {"traceparent": "00-ab-cd-01"}}
    async with serving(router) as server, RouterClient(at(server), **options) as client:
        await client.list_workers()
    assert router.metadata["authorization"] == "Bearer s3cret"
    assert router.metadata["traceparent"] == "00-ab-cd-01"


async def test_everything_that_is_asked_arrives() -> None:
    router = scripted_router()
    async with serving(router) as server, RouterClient(at(server)) as client:
        common: dict[str, Any] = {
            "lora": "l",
            "cache_salt": "s",
            "priority": -1,
            "expected_output_tokens": 9,
            "candidates": ["w", "v"],
            "policy": "kv",
            "cost": CostOverrides(temperature=0.0, host_credit=0.5),
            "explain": True,
        }
        await client.query("m", [1, 2], **common)
        await client.select_and_reserve(
            "r", "m", [1, 2], ttl_s=1.5, session_id="c", session_ttl_s=2, owner="o", max_wait_s=0.25, **common
        )
    prompt = router_pb2.PromptRef(token_ids=b"\x01\0\0\0\x02\0\0\0")
    asked = router_pb2.RouteQueryRequest(
        mode=router_pb2.RouteQueryRequest.MODE_QUERY_ONLY,
        model="m",
        prompt=prompt,
        lora="l",
        cache_salt="s",
        priority=-1,
        expected_output_tokens=9,
        candidates=router_pb2.CandidateSet(worker_ids=["w", "v"]),
        cost=router_pb2.CostOverrides(temperature=0.0, host_credit=0.5),
        explain=True,
        policy="kv",
    )
    assert router.asked[0] == asked
    asked.MergeFrom(
        router_pb2.RouteQueryRequest(
            mode=router_pb2.RouteQueryRequest.MODE_SELECT_AND_RESERVE,
            request_id="r",
            ttl_ms=1500,
            session_id="c",
            session_ttl_ms=2000,
            owner="o",
            max_wait_ms=250,
        )
    )
    assert router.asked[1] == asked


async def test_an_empty_candidate_set_is_not_an_unset_one() -> None:
    router = scripted_router()
    async with serving(router) as server, RouterClient(at(server)) as client:
        await client.query("m", [1], candidates=[])
        await client.query("m", [1])
    assert [request.HasField("candidates") for request in router.asked] == [True, False]


async def test_the_router_hears_how_requests_go() -> None:
    router = scripted_router()
    async with serving(router) as server, RouterClient(at(server)) as client:
        assert await client.report_progress({"m:r": 12}) == 1
        [decision] = await client.get_decisions("m", 5)
        async with await client.add_request("r", "m", "w", [1], expected_output_tokens=4, owner="o") as reservation:
            reservation.report(output_tokens=12, cached_tokens=0)
            await reservation.mark_prefill_complete()
            await reservation.mark_prefill_complete()
    assert decision.predicted_cached_tokens == 7
    progress, decisions, added, marked, freed = router.asked
    assert [(each.reservation_id, each.output_tokens) for each in progress.progress] == [("m:r", 12)]
    assert (decisions.model, decisions.limit) == ("m", 5)
    assert (added.worker_id, added.expected_output_tokens, added.owner) == ("w", 4, "o")
    assert marked.reservation_ids == ["m:r"]
    assert freed.reservation_ids == ["m:r"]
    [outcome] = freed.outcomes
    assert (outcome.reservation_id, outcome.output_tokens, outcome.HasField("cached_tokens")) == ("m:r", 12, True)


async def test_a_router_that_cannot_be_told_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    router = scripted_router()
    router.refuse = unavailable("Stopping.", code="stopping")
    async with serving(router) as server, RouterClient(at(server)) as client:
        async with await client.select_and_reserve("r", "m", [1]) as reservation:
            await reservation.mark_prefill_complete()
        await reservation.free()
        with pytest.raises(UnavailableError):
            await client.free("m:r")
    assert [record.levelname for record in caplog.records if record.name == "sluice_client"] == ["WARNING"] * 2
    assert len(router.asked) == 4


async def test_an_answer_without_a_worker_is_a_typed_error() -> None:
    async with serving(scripted_router("")) as server, RouterClient(at(server)) as client:
        with pytest.raises(SluiceError) as caught:
            await client.select_and_reserve("r", "m", [1])
        assert caught.value.kind == ErrorKind.INTERNAL


async def test_a_watch_may_be_a_lease() -> None:
    router = scripted_router()
    async with (
        serving(router) as server,
        RouterClient(at(server)) as client,
        aclosing(client.watch_workers("m", owner="o")) as changes,
    ):
        await anext(changes)
    assert (router.asked[0].model, router.asked[0].owner) == ("m", "o")


class Trust:
    """An authority, a server's certificate and a client's, as files."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        self.ca = folder / "ca.pem"
        authority.cert_pem.write_to_path(self.ca)
        self.server = self._pair(authority, folder, "localhost")
        self.client = self._pair(authority, folder, "scheduler.example")

    @staticmethod
    def _pair(authority: trustme.CA, folder: Path, name: str) -> tuple[Path, Path]:
        issued, cert, key = authority.issue_cert(name), folder / f"{name}.pem", folder / f"{name}.key"
        issued.cert_chain_pems[0].write_to_path(cert)
        issued.private_key_pem.write_to_path(key)
        return cert, key


async def test_tls_and_mtls(tmp_path: Path) -> None:
    trust = Trust(tmp_path)
    cert, key = trust.server
    settings = {"tls_cert": cert, "tls_key": key, "tls_ca": trust.ca, "tls_require_client_cert": True}
    settings["tls_trust_domain"] = ""
    async with serving(scripted_router(), **settings) as server:
        proven = Tls(ca=trust.ca, cert=trust.client[0], key=trust.client[1], server_name="localhost")
        async with RouterClient(at(server), tls=proven) as client:
            assert await names(client) == ["w"]
        for wrong in (
            None,
            Tls(ca=trust.ca, server_name="localhost"),
            Tls(cert=trust.client[0], key=trust.client[1], server_name="localhost"),
            Tls(ca=trust.ca, cert=trust.client[0], key=trust.client[1]),
        ):
            async with RouterClient(at(server), tls=wrong) as client:
                with pytest.raises(ConnectionFailedError):
                    await client.list_workers(timeout_s=20)


async def test_a_generation_comes_as_deltas() -> None:
    usage = common_pb2.Usage(prompt_tokens=2, completion_tokens=3)
    worker = scripted_worker(
        delta(5, 6, cached_tokens=1), delta(7, finish_reason=common_pb2.FINISH_REASON_STOP, usage=usage)
    )
    async with serving(worker) as server, WorkerClient(at(server)) as client:
        deltas = [each async for each in client.generate("r", "m", [1, 2])]
    assert [list(each.token_ids) for each in deltas] == [[5, 6], [7]]
    assert [each.finish_reason for each in deltas] == [FinishReason.UNSPECIFIED, FinishReason.STOP]
    assert deltas[0].extra is not None
    assert deltas[0].extra.cached_tokens == 1
    assert deltas[1].usage is not None
    assert deltas[1].usage.completion_tokens == 3


async def test_a_generation_that_fails_half_way_raises() -> None:
    error = common_pb2.ErrorDetail(
        kind=common_pb2.ERROR_KIND_ENGINE_SHUTDOWN, message="The engine is gone.", retryable=True
    )
    worker = scripted_worker(delta(5), delta(finish_reason=common_pb2.FINISH_REASON_ERROR, error=error))
    async with serving(worker) as server, WorkerClient(at(server)) as client:
        generation = client.generate("r", "m", [1])
        assert list((await anext(generation)).token_ids) == [5]
        with pytest.raises(ConnectionFailedError, match="The engine is gone") as caught:
            await anext(generation)
    assert (caught.value.kind, caught.value.retryable) == (ErrorKind.ENGINE_SHUTDOWN, True)


async def test_a_generation_without_an_end_raises() -> None:
    async with serving(scripted_worker(delta(5))) as server, WorkerClient(at(server)) as client:
        generation = client.generate("r", "m", [1])
        await anext(generation)
        with pytest.raises(ConnectionFailedError) as caught:
            await anext(generation)
    assert caught.value.kind == ErrorKind.STREAM_INCOMPLETE


async def test_a_reader_that_leaves_cancels_the_generation() -> None:
    worker = scripted_worker(delta(5), hold=True)
    async with serving(worker) as server, WorkerClient(at(server)) as client:
        async with aclosing(client.generate("r", "m", [1])) as generation:
            await anext(generation)
        await asyncio.wait_for(worker.left.wait(), 20)


async def test_a_lost_worker_ends_a_generation_with_a_typed_error() -> None:
    worker = scripted_worker(delta(5), hold=True)
    async with serving(worker) as server, WorkerClient(at(server)) as client:
        generation = client.generate("r", "m", [1])
        await anext(generation)
        stopping = asyncio.create_task(server.stop(0))
        with pytest.raises(ConnectionFailedError):
            await anext(generation)
        await stopping


async def test_max_tokens_and_stop_exclude_each_other() -> None:
    async with WorkerClient("127.0.0.1:1") as client:
        with pytest.raises(ValueError, match="not both"):
            await anext(client.generate("r", "m", [1], max_tokens=1, stop=StopOptions()))
