"""C5: what a server tells any client."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.common.base import budgets
from services.common.rpc import server as rpc_server
from services.common.rpc.channels import open_channel
from services.common.rpc.errors import from_rpc_error
from services.common.rpc.replicas import ReplicaSet
from services.common.rpc.server import GrpcServer
from services.common.settings.service import GrpcServiceSettings
from sluice.v1 import (
    worker_pb2,
    worker_pb2_grpc,
)
from tests.support.waiting import until


async def reflects(settings: GrpcServiceSettings) -> bool:
    server = GrpcServer(settings, worker_pb2.DESCRIPTOR)
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{server.port}") as channel:
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            )
            with suppress(grpc.aio.AioRpcError):
                assert [answer async for answer in call]
            code = await call.code()
            # INTERNAL comes from grpcio's client, when a stream is refused while its first message is being written.
            assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL)
            return code is grpc.StatusCode.OK
    finally:
        await server.stop(0)


async def test_reflection_is_off_where_others_reach_the_service() -> None:
    for listen in ("127.0.0.1:0", "localhost:0"):
        assert await reflects(GrpcServiceSettings(listen=listen))
    for listen in ("0.0.0.0:0", "[::]:0"):
        assert not await reflects(GrpcServiceSettings(listen=listen))
    assert await reflects(GrpcServiceSettings(listen="0.0.0.0:0", reflection=True))
    assert not await reflects(GrpcServiceSettings(listen="127.0.0.1:0", reflection=False))


async def test_health_streams_are_bounded_and_refused_callers_still_find_the_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused: list[str] = []
    monkeypatch.setattr(budgets, "on_refused", refused.append)
    monkeypatch.setattr(rpc_server, "MAX_HEALTH_WATCHES", 3)
    server = GrpcServer(GrpcServiceSettings(listen="127.0.0.1:0"), worker_pb2.DESCRIPTOR)
    await server.start()
    await server.set_serving(True)
    address = f"127.0.0.1:{server.port}"
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(3)]
        for watch in watches:
            await watch.read()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Watch(health_pb2.HealthCheckRequest()).read()
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert from_rpc_error(error.value, "worker").code == "budget_exceeded"
        assert refused == ["health_watches"]
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        peers: ReplicaSet[Any] = ReplicaSet("worker", [address], worker_pb2_grpc.WorkerStub)
        await peers.start()
        assert await peers.wait_ready(20), "a caller whose stream is refused asks now and then"
        await server.set_serving(False)
        await until(lambda: not peers.serving)
        watches[0].cancel()
        await server.set_serving(True)
        await until(lambda: bool(peers.serving))
        await peers.close()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Watch(health_pb2.HealthCheckRequest(service=1_000_000 * "x")).read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Check(health_pb2.HealthCheckRequest(service=1_000_000 * "x\n"))
        assert len(error.value.details() or "") < 400
    await server.stop(0)
