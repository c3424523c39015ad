"""Who may call the picker: tokens and certificates over real connections of gRPC."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import SecretStr

from services.common.base.errors import ErrorKind
from services.common.net.ports import free_port
from services.common.rpc.bearer_channel import BearerChannel
from services.common.rpc.channels import open_channel
from services.common.rpc.errors import from_rpc_error
from services.common.security.tls import channel_credentials
from services.common.settings.service import TlsSettings
from services.router.picker.server import SERVICE
from tests.support.clients.ext_proc import Exchange
from tests.support.data.authority import Authority
from tests.support.data.tokens import accept
from tests.support.servers.router_cluster import routers
from tests.support.waiting import until

SERVING = health_pb2.HealthCheckResponse.SERVING


Refusal = tuple[ErrorKind, str]


async def refusal_of(channel: grpc.aio.Channel, again: bool = True) -> Refusal | None:
    """The error with which a request is refused; None if it is answered."""
    try:
        answered = await Exchange(channel).request(b"", method="GET", path="/v1/models")
    except grpc.aio.AioRpcError as error:
        refused = from_rpc_error(error, "picker")
        if refused.kind is ErrorKind.INTERNAL and again:
            # From grpcio's client, when a stream is refused while its first message is being written.
            return await refusal_of(channel, again=False)
        return refused.kind, refused.code
    assert answered.status == 503, "no endpoint is known here"
    return None


async def serves(listen: str, credentials: grpc.ChannelCredentials | None) -> bool:
    """Whether the picker is ready."""
    async with open_channel(listen, credentials) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == SERVING)


async def test_only_schedulers_with_a_token_are_served(tmp_path: Path) -> None:
    listen = f"127.0.0.1:{free_port()}"
    tokens = accept(tmp_path / "tokens", "right scheduler", "other postprocess")
    async with routers(picker_listen=listen, tokens_file=tokens) as [_]:
        await until(lambda: serves(listen, None))
        for token, expected in (
            ("", (ErrorKind.UNAUTHENTICATED, "token_missing")),
            ("wrong", (ErrorKind.UNAUTHENTICATED, "invalid_token")),
            ("other", (ErrorKind.PERMISSION_DENIED, "caller_not_allowed")),
            ("right", None),
        ):
            async with BearerChannel(open_channel(listen), partial(str, token)) as channel:
                assert await refusal_of(channel) == expected
                health = health_pb2_grpc.HealthStub(channel)
                answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=10)
                assert answer.status == SERVING


async def test_health_needs_a_token_if_it_is_not_open() -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with routers(picker_listen=listen, token=SecretStr("right"), open_health=False):
        for token in ("", "right"):
            async with BearerChannel(open_channel(listen), partial(str, token)) as channel:
                call = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=10, wait_for_ready=True
                )
                assert await call.code() is (grpc.StatusCode.OK if token else grpc.StatusCode.UNAUTHENTICATED)


async def test_only_named_certificates_of_the_authority_are_served(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    trust = authority.issue("router", "spiffe://sluice/router")
    ours = authority.issue("scheduler", "spiffe://sluice/scheduler")
    foreign = stranger.issue("foreign").model_copy(update={"tls_ca": authority.file})
    unnamed = authority.issue("unnamed", named=False)
    settings = trust.model_dump(include={"tls_cert", "tls_key", "tls_ca"})
    listen = f"127.0.0.1:{free_port()}"
    shown: list[tuple[TlsSettings | None, ErrorKind | None]] = [
        (ours, None),
        (foreign, ErrorKind.UNAVAILABLE),
        (None, ErrorKind.UNAVAILABLE),
        (unnamed, ErrorKind.PERMISSION_DENIED),
    ]
    async with routers(picker_listen=listen, tls_require_client_cert=True, **settings) as [_]:
        await until(lambda: serves(listen, channel_credentials(ours)))
        for certificate, expected in shown:
            credentials = None if certificate is None else channel_credentials(certificate)
            async with open_channel(listen, credentials) as channel:
                refused = await refusal_of(channel)
                assert (None if refused is None else refused[0]) is expected


async def test_unknown_methods_and_services_are_unimplemented() -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with routers(picker_listen=listen) as [_]:
        await until(lambda: serves(listen, None))
        async with open_channel(listen) as channel:
            other: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{SERVICE}/Other")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await other(b"", timeout=10)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="x"), timeout=10)
            assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watch_of_health_follows_until_the_picker_stops() -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with routers(picker_listen=listen) as [_]:
        await until(lambda: serves(listen, None))
        channel = open_channel(listen)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        statuses = [(await watch.read()).status]
        while statuses[-1] != SERVING:
            statuses.append((await asyncio.wait_for(watch.read(), 20)).status)
    last = await asyncio.wait_for(watch.read(), 20)
    assert last.status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert await asyncio.wait_for(watch.read(), 20) is grpc.aio.EOF
    await channel.close()
