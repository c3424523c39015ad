"""B2: what a worker learns, and which service may call what, over real gRPC servers in the test's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import SecretStr

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.tasks import TaskOwner
from services.common.rpc.auth_interceptor import AccessInterceptor
from services.common.rpc.channels import open_channel
from services.common.rpc.server import GrpcServer
from services.common.security.bearer_tokens import shown_tokens
from services.common.security.tls import channel_credentials
from services.common.settings.service import GrpcServiceSettings, TlsSettings
from services.gateway.backends.rpc.router import RouterClient
from services.gateway.backends.workers.connections import ConnectionManager
from services.gateway.backends.workers.registry import WorkerRegistry
from services.gateway.metrics import GatewayMetrics
from services.gateway.settings import GatewaySettings
from services.gateway.streams.manager import StreamManager
from sluice.cli import tokens as made_tokens
from sluice.v1 import (
    postprocess_pb2,
    preprocess_pb2,
    router_pb2,
    router_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.support.clients.callers import Calls, is_attached, now_us
from tests.support.data.authority import Authority
from tests.support.data.tokens import accept
from tests.support.servers.router_cluster import FakeWorker, routers
from tests.support.servers.survival import Bookings
from tests.support.waiting import until

REFUSED = (ErrorKind.UNAUTHENTICATED, ErrorKind.PERMISSION_DENIED)


class Spy(worker_pb2_grpc.WorkerServicer):
    """A worker that keeps the tokens it is shown."""

    def __init__(self) -> None:
        self.shown: set[str] = set()

    def _note(self, context: Any) -> None:
        self.shown |= {str(value) for key, value in context.invocation_metadata() if key == "authorization"}

    async def Session(self, request_iterator: object, context: Any) -> None:  # type: ignore[override]
        self._note(context)
        await asyncio.Event().wait()

    async def GetInfo(self, request: object, context: Any) -> worker_pb2.GetInfoResponse:
        self._note(context)
        return worker_pb2.GetInfoResponse()


@asynccontextmanager
async def spying() -> AsyncIterator[tuple[Spy, str]]:
    spy = Spy()  # type: ignore[abstract]
    server = GrpcServer(GrpcServiceSettings(listen="127.0.0.1:0"), worker_pb2.DESCRIPTOR)
    worker_pb2_grpc.add_WorkerServicer_to_server(spy, server.server)
    await server.start()
    await server.set_serving(True)
    try:
        yield spy, f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def gateway_links(settings: GatewaySettings) -> AsyncIterator[ConnectionManager]:
    """What a gateway has of its workers: it follows the router and opens a session to each of them."""
    credentials = channel_credentials(settings)
    tasks = TaskOwner()
    stream_manager = StreamManager(4, Bookings(), GatewayMetrics())
    connections = ConnectionManager([], credentials, 5.0, stream_manager, tasks)
    client = RouterClient(settings.router, credentials, 20, owner="me")
    registry = WorkerRegistry(client.replicas, connections.worker_up, connections.worker_down, client.owner)
    await client.replicas.start()
    tasks.spawn(registry.run(), "registry")
    try:
        yield connections
    finally:
        await tasks.close()
        await client.replicas.close()


async def test_worker_is_shown_no_token_that_another_service_accepts(tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    shown.write_text("for-the-router router\nfor-workers worker\nfor-w2-alone worker/w2\n")
    async with (
        routers(tokens_file=accept(tmp_path / "accepted", "for-the-router gateway", "w worker")) as (router,),
        spying() as (spy, address),
        spying() as (other, other_address),
    ):
        calls = [Calls(router.port, "w"), Calls(router.port)]
        for worker_id, where in (("w1", address), ("w2", other_address)):
            worker = FakeWorker(worker_id, epoch=now_us())
            worker.registration.address = where
            call = router_pb2_grpc.RouterStub(calls[0].channel).Attach(metadata=calls[0]._metadata)
            await call.write(router_pb2.AttachRequest(registration=worker.registration))
            assert await is_attached(call)
        settings = GatewaySettings(peer_token_file=shown, router=[f"127.0.0.1:{router.port}"])
        async with gateway_links(settings):
            await until(lambda: bool(spy.shown and other.shown))
        assert spy.shown == {"Bearer for-workers"}
        assert other.shown == {"Bearer for-w2-alone"}
        for learned in spy.shown | other.shown:
            caller = Calls(router.port, learned.removeprefix("Bearer "))
            error = await caller.call(router_pb2, "Router", "GetLoads")
            assert error is not None
            assert (error.kind, error.code) == (ErrorKind.UNAUTHENTICATED, "invalid_token")
            await caller.channel.close()
        for each in calls:
            await each.channel.close()


async def test_token_of_one_worker_is_refused_by_another_worker(tmp_path: Path) -> None:
    made_tokens.make(tmp_path, made_tokens.Options(workers=["w1", "w2"]))
    show = shown_tokens(SecretStr(""), tmp_path / "gateway" / made_tokens.SHOWN)
    assert show is not None
    accepted = tmp_path / f"worker-w2/{made_tokens.ACCEPTED}"
    server = GrpcServer(GrpcServiceSettings(listen="127.0.0.1:0", tokens_file=accepted), worker_pb2.DESCRIPTOR)
    worker_pb2_grpc.add_WorkerServicer_to_server(Spy(), server.server)  # type: ignore[abstract]
    await server.start()
    try:
        refusals = {}
        for worker_id in ("w1", "w2"):
            caller = Calls(server.port, show(f"worker/{worker_id}"))
            refusals[worker_id] = await caller.call(worker_pb2, "Worker", "GetInfo")
            await caller.channel.close()
    finally:
        await server.stop(0)
    assert refusals["w2"] is None
    assert refusals["w1"] is not None
    assert (refusals["w1"].kind, refusals["w1"].code) == (ErrorKind.UNAUTHENTICATED, "invalid_token")


def test_token_for_every_service_is_refused_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("one-token\n")
    for settings in (
        GatewaySettings(peer_token_file=path, router=["r:1"]),
        GatewaySettings(peer_token=SecretStr("one-token"), router=["r:1"]),
    ):
        with pytest.raises(SluiceError, match="A token for several services is not accepted") as refused:
            channel_credentials(settings)
        assert "one-token" not in refused.value.message


def test_file_of_accepted_tokens_holds_none(tmp_path: Path) -> None:
    made_tokens.make(tmp_path, made_tokens.Options())
    secret = {line.split()[0] for path in tmp_path.glob("*/shown-tokens") for line in path.read_text().splitlines()}
    assert len(secret) == 14
    for path in tmp_path.glob("*/accepted-tokens"):
        assert not secret & set(path.read_text().split())
    path = tmp_path / "plain"
    path.write_text("secret gateway\n")
    with pytest.raises(SluiceError, match="tokens in plain text are not accepted there") as refused:
        GrpcServer(GrpcServiceSettings(tokens_file=path), worker_pb2.DESCRIPTOR)
    assert "secret" not in refused.value.message


# B2: every RPC, every caller

_GATEWAY = {"gateway", "scheduler"}
_LEARNS = _GATEWAY | {"preprocess", "postprocess"}
MAY_CALL: dict[str, set[str]] = {
    "Router.RouteQuery": _GATEWAY,
    "Router.Session": _GATEWAY,
    "Router.AddRequest": _GATEWAY,
    "Router.MarkPrefillComplete": _GATEWAY,
    "Router.FreeRequest": _GATEWAY,
    "Router.ReportProgress": _GATEWAY,
    "Router.GetDecisions": _GATEWAY,
    "Router.ListWorkers": _LEARNS,
    "Router.WatchWorkers": _LEARNS,
    "Router.GetLoads": _GATEWAY,
    "Router.GetQueues": _GATEWAY,
    "Router.WatchQueues": _GATEWAY,
    "Router.GetOverlaps": _GATEWAY,
    "Router.DumpIndex": set(),
    "Router.Attach": {"worker", "worker/w1"},
    "Worker.Session": _GATEWAY,
    "Worker.Generate": _GATEWAY,
    "Worker.Embed": _GATEWAY,
    "Worker.Abort": _GATEWAY,
    "Worker.GetInfo": _LEARNS,
    "Worker.GetTokenizer": _LEARNS,
    "Worker.Control": set(),
    "Preprocess.Tokenize": _GATEWAY | {"router"},
    "Preprocess.Session": _GATEWAY | {"router"},
    "Preprocess.Render": _GATEWAY,
    "Preprocess.Detokenize": _GATEWAY,
    "Preprocess.ListModels": _GATEWAY,
    "Preprocess.GetFingerprint": _GATEWAY,
    "Postprocess.Session": _GATEWAY,
    "Postprocess.Parse": _GATEWAY,
    "Postprocess.TokenPieces": _GATEWAY,
}
"""Who may call what, beside an operator; written out so that a new RPC has to be put here."""
CALLERS = ("gateway", "preprocess", "router", "worker", "worker/w1", "postprocess", "scheduler", "operator")
MODULES = {"Router": router_pb2, "Worker": worker_pb2, "Preprocess": preprocess_pb2, "Postprocess": postprocess_pb2}


class _Anything(grpc.GenericRpcHandler):
    """Answers every call of the suite's services with nothing."""

    def service(self, details: Any) -> Any:
        async def unary(request: bytes, context: Any) -> bytes:
            return b""

        service, _, method = details.method.rpartition("/")
        found = MODULES[service.rpartition(".")[2]].DESCRIPTOR.services_by_name[service.rpartition(".")[2]]
        described = found.methods_by_name[method]

        async def stream(request: Any, context: Any) -> None:
            await context.write(b"")

        if described.server_streaming and described.client_streaming:
            return grpc.stream_stream_rpc_method_handler(stream)
        if described.server_streaming:
            return grpc.unary_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(unary)


@asynccontextmanager
async def answering(**settings: Any) -> AsyncIterator[int]:
    """The port of a server with every service of the suite behind its access rules."""
    server = GrpcServer(GrpcServiceSettings(listen="127.0.0.1:0", **settings), worker_pb2.DESCRIPTOR)
    server.server.add_generic_rpc_handlers((_Anything(),))
    await server.start()
    try:
        yield server.port
    finally:
        await server.stop(0)


async def allowed(port: int, token: str = "", tls: TlsSettings | None = None) -> set[str]:
    """The RPCs that a caller may make."""
    caller = Calls(port, token, tls)
    try:
        found = set()
        for name in MAY_CALL:
            service, _, method = name.partition(".")
            error = await caller.call(MODULES[service], service, method)
            if error is None:
                found.add(name)
            else:
                assert error.kind in REFUSED, (name, error.message)
        return found
    finally:
        await caller.channel.close()


def expected(caller: str) -> set[str]:
    return {name for name, callers in MAY_CALL.items() if caller in callers or caller == "operator"}


def test_table_of_callers_names_every_rpc() -> None:
    declared = {
        f"{service.name}.{method.name}"
        for module in MODULES.values()
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert declared == set(MAY_CALL)


@pytest.mark.parametrize("proof", ["token", "certificate"])
async def test_caller_may_make_its_own_calls_and_no_other(tmp_path: Path, proof: str) -> None:
    settings: dict[str, Any]
    if proof == "token":
        lines = [f"token-{number} {caller}" for number, caller in enumerate(CALLERS)]
        settings = {"tokens_file": accept(tmp_path / "accepted", *lines)}
        shown: dict[str, dict[str, Any]] = {caller: {"token": f"token-{n}"} for n, caller in enumerate(CALLERS)}
    else:
        authority = Authority(tmp_path)
        trust = authority.issue("server", "spiffe://sluice/router")
        settings = {"tls_require_client_cert": True, **trust.model_dump(include={"tls_cert", "tls_key", "tls_ca"})}
        shown = {
            caller: {"tls": authority.issue(caller.replace("/", "-"), f"spiffe://sluice/{caller}")}
            for caller in CALLERS
        }
        shown["unnamed"] = {"tls": authority.issue("unnamed", named=False)}
        shown["elsewhere"] = {"tls": authority.issue("elsewhere", "spiffe://other/operator")}
    async with answering(**settings) as port:
        for caller, how in shown.items():
            assert await allowed(port, **how) == expected(caller), caller


async def test_token_and_certificate_both_have_to_allow_a_call(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    trust = authority.issue("server").model_dump(include={"tls_cert", "tls_key", "tls_ca"})
    tokens = accept(tmp_path / "accepted", "g gateway", "r router")
    gateway = authority.issue("gateway", "spiffe://sluice/gateway")
    preprocess = authority.issue("preprocess", "spiffe://sluice/preprocess")
    async with answering(tokens_file=tokens, tls_require_client_cert=True, **trust) as port:
        assert await allowed(port, "g", gateway) == expected("gateway")
        assert await allowed(port, "g", preprocess) == expected("gateway") & expected("preprocess")
        assert await allowed(port, "r", gateway) == expected("gateway") & expected("router")
        assert await allowed(port, "", gateway) == set()


async def test_certificate_without_a_name_may_ask_for_health_only(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    trust = authority.issue("server").model_dump(include={"tls_cert", "tls_key", "tls_ca"})
    unnamed = authority.issue("unnamed", named=False)
    async with answering(tls_require_client_cert=True, **trust) as port:
        async with open_channel(f"127.0.0.1:{port}", channel_credentials(unnamed)) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        caller = Calls(port, tls=unnamed)
        error = await caller.call(worker_pb2, "Worker", "GetInfo")
        assert error is not None
        assert (error.kind, error.code) == (ErrorKind.PERMISSION_DENIED, "caller_unnamed")
        assert "spiffe://sluice/SERVICE" in error.message
        await caller.channel.close()


async def test_messages_of_a_guarded_stream_pass_no_further_layer(tmp_path: Path) -> None:
    """A session is long: who calls is found out once, and its handler then reads and writes as without a guard."""
    seen: list[Any] = []

    async def session(request: Any, context: Any) -> None:
        seen.append((request, context))

    interceptor = AccessInterceptor(None, "sluice", open_health=True)
    handler: Any = grpc.stream_stream_rpc_method_handler(session)

    class Details:
        method = "/sluice.v1.Worker/Session"
        invocation_metadata = ()

    class Context:
        def auth_context(self) -> dict[str, list[bytes]]:
            return {"peer_uri": [b"spiffe://sluice/gateway"]}

    async def continuation(details: object) -> Any:
        return handler

    guarded: Any = await interceptor.intercept_service(continuation, cast(Any, Details()))
    assert guarded is not None
    requests, context = object(), Context()
    await guarded.stream_stream(requests, context)
    assert seen == [(requests, context)]
