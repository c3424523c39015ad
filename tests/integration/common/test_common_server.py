"""The server every service has: health, reflection, ports, limits, TLS and mTLS."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.common.base.errors import ErrorKind, SluiceError, not_found
from services.common.rpc.channels import open_channel
from services.common.rpc.errors import answer, from_rpc_error
from services.common.rpc.server import GrpcServer
from services.common.security.tls import channel_credentials
from services.common.settings.service import GrpcServiceSettings, TlsSettings
from sluice.v1 import worker_pb2, worker_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Worker(worker_pb2_grpc.WorkerServicer):
    """Says who it is; refuses and fails on request. Has only the calls that the tests make."""

    def __init__(self) -> None:
        self.busy = asyncio.Event()
        self.may_finish = asyncio.Event()

    async def GetInfo(self, request, context):  # type: ignore[no-untyped-def]
        return worker_pb2.GetInfoResponse(worker_id="w")

    async def Abort(self, request, context):  # type: ignore[no-untyped-def]
        async def handler(request: worker_pb2.AbortRequest) -> worker_pb2.AbortResponse:
            if request.request_id == "unknown":
                raise not_found("No such request.", param="request_id", code="request_not_found")
            raise KeyError("internals")

        return await answer(context, handler, request)

    async def Control(self, request, context):  # type: ignore[no-untyped-def]
        self.busy.set()
        await self.may_finish.wait()
        return worker_pb2.ControlResponse(results={"done": "yes"})


@asynccontextmanager
async def serving(servicer: Worker | None = None, **changes: Any) -> AsyncIterator[tuple[GrpcServer, grpc.aio.Channel]]:
    settings = GrpcServiceSettings(**{"listen": "127.0.0.1:0", **changes})
    server = GrpcServer(settings, worker_pb2.DESCRIPTOR)
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer or Worker(), server.server)  # type: ignore[abstract]
    await server.start()
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        try:
            yield server, channel
        finally:
            await server.stop(0)


async def health(channel: grpc.aio.Channel, service: str = "") -> int:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
    return int(answer.status)


async def info(channel: grpc.aio.Channel) -> str:
    answer = await worker_pb2_grpc.WorkerStub(channel).GetInfo(worker_pb2.GetInfoRequest(), timeout=10)
    return answer.worker_id


async def test_health_says_what_it_was_told_for_the_server_and_the_service() -> None:
    async with serving() as (server, channel):
        assert await health(channel) == NOT_SERVING
        await server.set_serving(True)
        assert await health(channel) == SERVING
        assert await health(channel, "sluice.v1.Worker") == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await health(channel, "sluice.v1.Nothing")
        assert failed.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_watchers_hear_of_the_drain_before_the_end() -> None:
    worker = Worker()  # type: ignore[abstract]
    async with serving(worker) as (server, channel):
        await server.set_serving(True)
        running = worker_pb2_grpc.WorkerStub(channel).Control(worker_pb2.ControlRequest(), timeout=60)
        await worker.busy.wait()
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        stopping = asyncio.create_task(server.stop(60))
        assert (await asyncio.wait_for(watch.read(), 10)).status == NOT_SERVING
        assert not running.done()
        worker.may_finish.set()
        assert (await running).results["done"] == "yes"
        await asyncio.wait_for(stopping, 10)  # a watcher that never leaves holds nothing up


async def reflected(channel: grpc.aio.Channel) -> tuple[set[str], set[str]]:
    """(service names, methods of the worker service) as a tool such as grpcurl sees them."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    questions = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="sluice.v1.Worker"),
    ]
    listed, described = [answer async for answer in stub.ServerReflectionInfo(iter(questions), timeout=10)]
    names = {service.name for service in listed.list_services_response.service}
    files = [FileDescriptorProto.FromString(data) for data in described.file_descriptor_response.file_descriptor_proto]
    return names, {method.name for file in files for service in file.service for method in service.method}


async def test_reflection_lists_and_describes_the_service() -> None:
    async with serving() as (_, channel):
        names, methods = await reflected(channel)
    assert {"sluice.v1.Worker", "grpc.health.v1.Health"} <= names
    assert {"Session", "Generate", "GetInfo"} <= methods


async def test_typed_error_arrives_typed_and_an_unexpected_one_arrives_without_its_text() -> None:
    async with serving() as (_, channel):
        stub = worker_pb2_grpc.WorkerStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Abort(worker_pb2.AbortRequest(request_id="unknown"), timeout=10)
        error = from_rpc_error(failed.value, "worker")
        assert (error.kind, error.param, error.code) == (ErrorKind.NOT_FOUND, "request_id", "request_not_found")
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Abort(worker_pb2.AbortRequest(request_id="x"), timeout=10)
        assert failed.value.code() is grpc.StatusCode.INTERNAL
        assert "internals" not in str(failed.value.details())


@pytest.mark.parametrize("listen", ["127.0.0.1:99999", "127.0.0.1:65536", "127.0.0.1:", "127.0.0.1:http", "h", "-1"])
async def test_an_address_that_is_none_is_refused(listen: str) -> None:
    server = GrpcServer(GrpcServiceSettings(listen=listen), worker_pb2.DESCRIPTOR)
    with pytest.raises(SluiceError, match=r"--listen .* is not host:port") as refused:
        await server.start()
    assert refused.value.kind is ErrorKind.INVALID_ARGUMENT
    await server.server.stop(None)


@pytest.mark.parametrize("listen", ["{taken}", "192.0.2.1:0", "not a host:1"])
async def test_address_that_cannot_be_used_is_one_typed_sentence(listen: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        server = GrpcServer(GrpcServiceSettings(listen=listen.format(taken=taken)), worker_pb2.DESCRIPTOR)
        with pytest.raises(SluiceError, match="Cannot listen") as refused:
            await server.start()
    assert refused.value.kind is ErrorKind.FAILED_PRECONDITION
    assert "\n" not in refused.value.message
    await server.stop(0)


class Authority:
    """Makes certificates in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self.certificate = folder / f"{name}.pem"
        self._make(name, "-addext", "keyUsage=critical,keyCertSign,cRLSign")

    def issue(self, name: str) -> tuple[Path, Path]:
        """(certificate, key) for localhost and 127.0.0.1."""
        key = self._folder / f"{self._name}.key"
        self._make(
            name,
            *("-CA", str(self.certificate), "-CAkey", str(key)),
            *("-addext", "subjectAltName=DNS:localhost,DNS:worker.test,IP:127.0.0.1"),
            *("-addext", "basicConstraints=critical,CA:FALSE"),
        )
        return self._folder / f"{name}.pem", self._folder / f"{name}.key"

    def _make(self, name: str, *extra: str) -> None:
        files = ("-keyout", str(self._folder / f"{name}.key"), "-out", str(self._folder / f"{name}.pem"))
        new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        command = ["openssl", "req", "-x509", *new_key, "-days", "2", "-subj", f"/CN={name}", *files, *extra]
        subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ca")


async def ask_over_tls(server: GrpcServer, trust: TlsSettings, name: str = "") -> str:
    async with open_channel(f"127.0.0.1:{server.port}", channel_credentials(trust), name) as channel:
        return await info(channel)


async def test_tls_serves_who_trusts_it_and_nobody_in_plain_text(authority: Authority) -> None:
    certificate, key = authority.issue("server")
    async with serving(tls_cert=certificate, tls_key=key) as (server, plain):
        assert await ask_over_tls(server, TlsSettings(tls_ca=authority.certificate)) == "w"
        assert await ask_over_tls(server, TlsSettings(tls_ca=authority.certificate), "worker.test") == "w"
        with pytest.raises(grpc.aio.AioRpcError):
            await info(plain)


async def test_tls_client_refuses_a_stranger_and_a_wrong_name(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("server")
    other = Authority(tmp_path, "other-ca")
    async with serving(tls_cert=certificate, tls_key=key) as (server, _):
        for trust, name in (
            (TlsSettings(tls_ca=other.certificate), ""),
            (TlsSettings(tls_ca=authority.certificate), "router.test"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await ask_over_tls(server, trust, name)
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_mtls_serves_only_callers_with_a_certificate_of_the_authority(
    authority: Authority, tmp_path: Path
) -> None:
    certificate, key = authority.issue("server")
    ours = authority.issue("client")
    theirs = Authority(tmp_path, "other-ca").issue("stranger")
    async with serving(
        tls_cert=certificate,
        tls_key=key,
        tls_ca=authority.certificate,
        tls_require_client_cert=True,
        tls_trust_domain="",
    ) as (server, _):
        trust = TlsSettings(tls_ca=authority.certificate, tls_cert=ours[0], tls_key=ours[1])
        assert await ask_over_tls(server, trust) == "w"
        for refused in (
            TlsSettings(tls_ca=authority.certificate),
            TlsSettings(tls_ca=authority.certificate, tls_cert=theirs[0], tls_key=theirs[1]),
        ):
            with pytest.raises(grpc.aio.AioRpcError):
                await ask_over_tls(server, refused)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tls_cert": "{cert}"}, "must be set together"),
        ({"tls_key": "{key}"}, "must be set together"),
        ({"tls_cert": "{missing}", "tls_key": "{key}"}, "cannot be read"),
        ({"tls_cert": "{cert}", "tls_key": "{key}", "tls_require_client_cert": True}, "requires tls-ca"),
        ({"tls_require_client_cert": True}, "requires tls-cert"),
        ({"tls_cert": "{junk}", "tls_key": "{junk}"}, "certificate"),
        ({"tls_cert": "{cert}", "tls_key": "{other_key}"}, "certificate"),
    ],
)
async def test_tls_files_that_do_not_fit_are_one_typed_sentence(
    changes: dict[str, object], says: str, authority: Authority, tmp_path: Path
) -> None:
    certificate, key = authority.issue("server")
    junk = tmp_path / "junk"
    junk.write_text("no certificate")
    _, other_key = authority.issue("other")
    names = {"cert": certificate, "key": key, "missing": tmp_path / "none", "junk": junk, "other_key": other_key}
    settings: dict[str, Any] = {
        field: value.format(**names) if isinstance(value, str) else value for field, value in changes.items()
    }
    with pytest.raises(SluiceError, match=says) as refused:
        async with serving(**settings):
            pass
    assert refused.value.kind is ErrorKind.FAILED_PRECONDITION


async def test_two_servers_never_share_a_port() -> None:
    async with AsyncExitStack() as stack:
        server, _ = await stack.enter_async_context(serving())
        with pytest.raises(SluiceError, match="Cannot listen"):
            await stack.enter_async_context(serving(listen=f"127.0.0.1:{server.port}"))


async def test_health_watch_says_each_change_once_and_knows_what_it_does_not_know() -> None:
    async with serving() as (server, channel):
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="sluice.v1.Worker"))
        stranger = stub.Watch(health_pb2.HealthCheckRequest(service="sluice.v1.Nothing"))
        assert (await watch.read()).status == NOT_SERVING
        await server.set_serving(False)
        await server.set_serving(True)
        assert (await asyncio.wait_for(watch.read(), 10)).status == SERVING
        assert (await asyncio.wait_for(stranger.read(), 10)).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watch.cancel()
        await server.set_serving(False)
        assert await health(channel) == NOT_SERVING


async def test_stopped_server_cannot_become_healthy_again() -> None:
    worker = Worker()  # type: ignore[abstract]
    async with serving(worker) as (server, channel):
        running = worker_pb2_grpc.WorkerStub(channel).Control(worker_pb2.ControlRequest(), timeout=60)
        await worker.busy.wait()
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == NOT_SERVING
        stopping = asyncio.create_task(server.stop(60))
        await asyncio.sleep(0)  # it has begun
        await server.set_serving(True)
        assert await asyncio.wait_for(watch.read(), 10) is grpc.aio.EOF
        worker.may_finish.set()
        await running
        await asyncio.wait_for(stopping, 10)


def burst(port: int, calls: int) -> list[Any]:
    """Sends calls that arrive while the event loop of the caller, and so the server, is busy; returns their futures."""
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    stub = worker_pb2_grpc.WorkerStub(channel)
    futures = [stub.GetInfo.future(worker_pb2.GetInfoRequest(), timeout=60) for _ in range(calls)]
    time.sleep(1)
    return [channel, *futures]


async def test_burst_of_calls_while_the_process_is_busy_is_served_whole() -> None:
    async with serving() as (server, _):
        channel, *futures = burst(server.port, 2_500)
        with channel:
            answers = await asyncio.to_thread(lambda: [future.exception() or future.result() for future in futures])
    assert [answer for answer in answers if isinstance(answer, Exception)] == []
    assert {answer.worker_id for answer in answers} == {"w"}
