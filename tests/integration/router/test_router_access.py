"""Tokens on every router RPC, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from pydantic import SecretStr

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.packing import pack_u32
from services.common.rpc.bearer_channel import BearerChannel
from services.common.rpc.channels import open_channel
from services.common.rpc.errors import from_rpc_error
from services.common.security import file_watcher as watched
from services.common.security.tls import PeerCredentials
from services.gateway.backends.rpc.router import RouterClient
from services.gateway.backends.workers.registry import WorkerRegistry
from services.gateway.core.request import TokenizedPrompt
from sluice.v1 import router_pb2, router_pb2_grpc
from tests.support.data.tiny_models import build_tiny_model
from tests.support.data.tokens import accept, shows
from tests.support.servers.router_cluster import MODEL, FakeWorker, RouterProcess, routers
from tests.support.servers.workers import hosted
from tests.support.waiting import until

SERVICE = router_pb2.DESCRIPTOR.services_by_name["Router"]


class Caller:
    """A stub on a channel that shows a token, or none."""

    def __init__(self, router: RouterProcess, token: str | None) -> None:
        self.channel = open_channel(f"127.0.0.1:{router.port}")
        if token is not None:
            self.channel = BearerChannel(self.channel, lambda: token)
        self.stub = router_pb2_grpc.RouterStub(self.channel)
        self.port = router.port


async def outcome(call: Any) -> SluiceError | None:
    """How a call of any kind ends: the error, or None when it is answered."""
    try:
        if isinstance(call, grpc.aio.UnaryUnaryCall):
            await asyncio.wait_for(call, 20)
        else:
            await asyncio.wait_for(call.read(), 20)
            if call.done() and await call.code() is not grpc.StatusCode.OK:
                raise AssertionError("an error that read did not raise")
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error, "router")
    finally:
        call.cancel()
    return None


def every_rpc(stub: Any) -> list[tuple[str, Callable[[], Any]]]:
    """A call of each method the service has; a new method is in here by itself."""
    calls: list[tuple[str, Callable[[], Any]]] = []
    for method in SERVICE.methods:
        request: type[Message] = getattr(router_pb2, method.input_type.name)
        invoke = getattr(stub, method.name)
        calls.append((method.name, invoke if method.client_streaming else partial(invoke, request())))
    return calls


async def test_no_rpc_answers_without_a_valid_token() -> None:
    async with routers(token=SecretStr("right")) as (router,):
        for token, code in ((None, "token_missing"), ("wrong", "invalid_token")):
            caller = Caller(router, token)
            calls = every_rpc(caller.stub)
            assert len(calls) == len(SERVICE.methods) >= 12
            for name, call in calls:
                error = await outcome(call())
                assert error is not None, name
                assert (error.kind, error.code) == (ErrorKind.UNAUTHENTICATED, code), name
            await caller.channel.close()
        caller = Caller(router, "right")
        for name, call in every_rpc(caller.stub):
            if name != "Attach":  # says nothing before it is spoken to
                error = await outcome(call())
                assert error is None or error.kind is not ErrorKind.UNAUTHENTICATED, name
        await caller.channel.close()


async def test_health_and_reflection_are_open_unless_told_otherwise() -> None:
    for open_health in (True, False):
        async with routers(token=SecretStr("right"), open_health=open_health) as (router,):
            for token in (None, "right"):
                caller = Caller(router, token)
                health = await outcome(
                    health_pb2_grpc.HealthStub(caller.channel).Check(health_pb2.HealthCheckRequest())
                )
                allowed = open_health or token is not None
                call = reflection_pb2_grpc.ServerReflectionStub(caller.channel).ServerReflectionInfo()
                if allowed:  # a write to a call that has just been refused fails in ways of its own
                    await call.write(reflection_pb2.ServerReflectionRequest(list_services="*"))
                reflected = await outcome(call)
                for error in (health, reflected):
                    if allowed:
                        assert error is None
                    else:
                        assert error is not None
                        assert error.kind is ErrorKind.UNAUTHENTICATED
                await caller.channel.close()


async def test_tokens_rotate_without_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "CHECK_EVERY_S", 0.0)
    path = accept(tmp_path / "tokens", "old scheduler")
    async with routers(tokens_file=path) as (router,):
        old, new = Caller(router, "old"), Caller(router, "new")

        async def works(caller: Caller) -> bool:
            error = await outcome(caller.stub.ListWorkers(router_pb2.ListWorkersRequest()))
            assert error is None or error.kind is ErrorKind.UNAUTHENTICATED
            return error is None

        await until(lambda: works(old))
        assert not await works(new)
        both = ("old scheduler", "new scheduler")
        for lines, old_works, new_works in ((both, True, True), (both[1:], False, True)):
            accept(path, *lines)
            assert (await works(old), await works(new)) == (old_works, new_works)
        await old.channel.close()
        await new.channel.close()


async def test_gateway_clients_and_workers_show_their_token() -> None:
    async with routers(token=SecretStr("right")) as (router,):
        caller = Caller(router, "right")
        worker = FakeWorker("a")
        await worker.attach(caller)
        credentials = PeerCredentials(None, shows("right", "router"))
        client = RouterClient([f"127.0.0.1:{router.port}"], credentials, 20, owner="me")
        catalogue = WorkerRegistry(client.replicas, lambda entry: None, lambda worker_id: None, client.owner)
        await client.replicas.start()
        following = asyncio.create_task(catalogue.run())
        reporting = asyncio.create_task(client.run_reports())
        assert await client.replicas.wait_ready(20)
        await until(lambda: "a" in catalogue.workers)
        route = await client.route("r", MODEL, TokenizedPrompt(pack_u32(range(64)), b"", "", b"", b"", 0, b""), 16)
        assert route.worker_id == "a"
        client.free(route.reservation_id, 0, 5)
        await client.flush_reports(20)
        decisions = await caller.stub.GetDecisions(router_pb2.GetDecisionsRequest())
        (decision,) = decisions.decisions
        assert (decision.delivered_cached_tokens, decision.output_tokens) == (0, 5)
        loads = await caller.stub.GetLoads(router_pb2.GetLoadsRequest())
        assert [load.requests for load in loads.loads] == [0]
        for task in (following, reporting):
            task.cancel()
        await client.replicas.close()
        await worker.detach()
        await caller.channel.close()


async def test_a_worker_attaches_with_its_token_file(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("mine router\n")
    folder = build_tiny_model(tmp_path / "tiny")
    accepted = accept(tmp_path / "accepted", "mine worker", "right scheduler")
    async with routers(tokens_file=accepted) as (router,):
        caller = Caller(router, "right")

        async def attached() -> list[str]:
            answer = await caller.stub.ListWorkers(router_pb2.ListWorkersRequest())
            return [worker.worker_id for worker in answer.workers]

        address = f"127.0.0.1:{router.port}"
        async with hosted(folder, routers=[address], peer_token_file=token, worker_id="w") as _:

            async def is_there() -> bool:
                return await attached() == ["w"]

            await until(is_there)
        await caller.channel.close()
