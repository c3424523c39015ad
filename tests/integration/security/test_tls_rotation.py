"""Certificates that rotate while calls run: new connections take the new ones, nothing is lost."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from services.common.net.ports import free_port
from services.common.rpc import rotating_channel as peers
from services.common.rpc.channels import open_channel
from services.common.rpc.server import GrpcServer
from services.common.security import file_watcher as watched
from services.common.security.tls import PeerCredentials, channel_credentials
from services.common.settings.service import GrpcServiceSettings, TlsSettings
from sluice.v1 import worker_pb2, worker_pb2_grpc
from tests.support.data.authority import Authority


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(watched, "CHECK_EVERY_S", 0.0)
    monkeypatch.setattr(peers, "RETRY_S", 0.1)
    monkeypatch.setattr(peers, "READY_S", 1.0)


class Worker(worker_pb2_grpc.WorkerServicer):
    """Tells callers which certificate they showed, and streams for as long as it is listened to."""

    async def GetInfo(self, request, context):  # type: ignore[no-untyped-def]
        names = context.auth_context().get("x509_pem_cert", [b""])
        return worker_pb2.GetInfoResponse(worker_id=names[0].decode())

    async def Generate(self, request, context):  # type: ignore[no-untyped-def]
        while True:
            yield worker_pb2.GenerateDelta()
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(trust: TlsSettings, mutual: bool = True) -> AsyncIterator[GrpcServer]:
    settings = GrpcServiceSettings(
        listen="127.0.0.1:0", tls_require_client_cert=mutual, **trust.model_dump(exclude={"tls_require_client_cert"})
    )
    server = GrpcServer(settings, worker_pb2.DESCRIPTOR)
    worker_pb2_grpc.add_WorkerServicer_to_server(Worker(), server.server)  # type: ignore[abstract]
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


async def shown(channel: grpc.aio.Channel) -> str:
    """The certificate that a call shows, as the server saw it."""
    answer = await worker_pb2_grpc.WorkerStub(channel).GetInfo(worker_pb2.GetInfoRequest(), timeout=20)
    return str(answer.worker_id)


async def until_shown(channel: grpc.aio.Channel, file: Path | None) -> None:
    assert file is not None
    wanted = (await asyncio.to_thread(file.read_text)).split()
    for _ in range(600):
        if (await shown(channel)).split() == wanted:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the new certificate is never shown")


def served(port: int, authority: Authority) -> str:
    """The certificate that a server shows to a new connection."""
    return ssl.get_server_certificate(("127.0.0.1", port), timeout=20, ca_certs=str(authority.file))


async def test_a_server_shows_its_new_certificate_to_new_connections_and_keeps_the_old_ones(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    trust = authority.issue("server")
    async with serving(trust, mutual=False) as server:
        before = await asyncio.to_thread(served, server.port, authority)
        async with open_channel(f"127.0.0.1:{server.port}", channel_credentials(authority.issue("client"))) as channel:
            stream = worker_pb2_grpc.WorkerStub(channel).Generate(worker_pb2.GenerateRequest())
            await stream.read()
            authority.issue("server")
            after = await asyncio.to_thread(served, server.port, authority)
            assert before != after
            assert trust.tls_cert is not None
            assert after.split() == trust.tls_cert.read_text().split()
            await stream.read()
            stream.cancel()


async def test_a_channel_shows_its_new_certificate_and_finishes_what_runs_on_the_old_connection(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    trust = authority.issue("client")
    async with (
        serving(authority.issue("server")) as server,
        open_channel(f"127.0.0.1:{server.port}", channel_credentials(trust)) as channel,
    ):
        await until_shown(channel, trust.tls_cert)
        stub = worker_pb2_grpc.WorkerStub(channel)
        stream = stub.Generate(worker_pb2.GenerateRequest())
        for _ in range(3):
            authority.issue("client")
            await until_shown(channel, trust.tls_cert)
            await stream.read()
        stream.cancel()


async def test_whoever_waits_for_a_connection_waits_on_while_the_certificate_is_renewed(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    trust = authority.issue("client")
    address = f"127.0.0.1:{free_port()}"  # without a listener yet
    async with open_channel(address, channel_credentials(trust)) as channel:
        waiting = asyncio.create_task(channel.channel_ready())
        await asyncio.sleep(0.1)
        authority.issue("client")
        with pytest.raises(grpc.aio.AioRpcError):
            await shown(channel)  # takes another line, and closes the unused one
        await asyncio.sleep(0.2)
        assert not waiting.done(), "the channel was closed under it"
        waiting.cancel()


async def test_a_new_authority_on_both_sides_refuses_who_only_has_the_old_one(tmp_path: Path) -> None:
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    trust = old.issue("server")
    async with serving(trust) as server:
        address = f"127.0.0.1:{server.port}"
        left_behind = old.issue("client")
        async with open_channel(address, channel_credentials(left_behind)) as channel:
            await until_shown(channel, left_behind.tls_cert)
        ours = new.issue("server")
        assert None not in (trust.tls_cert, trust.tls_key, trust.tls_ca, ours.tls_cert, ours.tls_key)
        for mine, theirs in (
            (trust.tls_ca, ours.tls_ca),
            (trust.tls_cert, ours.tls_cert),
            (trust.tls_key, ours.tls_key),
        ):
            mine.write_bytes(theirs.read_bytes())  # type: ignore[union-attr]
        client = new.issue("client")
        async with open_channel(address, channel_credentials(client)) as channel:
            await until_shown(channel, client.tls_cert)
        stale = left_behind.model_copy(update={"tls_ca": new.file})
        async with open_channel(address, channel_credentials(stale)) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await shown(channel)


async def test_a_certificate_that_the_peer_does_not_accept_costs_nothing_while_the_old_connection_lives(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, foreign = Authority(tmp_path / "ours"), Authority(tmp_path / "foreign")
    trust = ours.issue("client")
    assert trust.tls_cert is not None
    assert trust.tls_key is not None
    async with (
        serving(ours.issue("server")) as server,
        open_channel(f"127.0.0.1:{server.port}", channel_credentials(trust)) as channel,
    ):
        await until_shown(channel, trust.tls_cert)
        wrong = foreign.issue("client")
        for mine, theirs in ((trust.tls_cert, wrong.tls_cert), (trust.tls_key, wrong.tls_key)):
            mine.write_bytes(theirs.read_bytes())  # type: ignore[union-attr]
        deadline = time.monotonic() + 30
        while "rejected the new certificate" not in caplog.text:
            assert time.monotonic() < deadline
            assert await shown(channel)
            await asyncio.sleep(0.02)
        ours.issue("client")
        await until_shown(channel, trust.tls_cert)


async def test_files_that_break_or_vanish_change_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = Authority(tmp_path)
    server_trust, client_trust = authority.issue("server"), authority.issue("client")
    assert server_trust.tls_cert is not None
    assert server_trust.tls_key is not None
    async with serving(server_trust) as server:
        address = f"127.0.0.1:{server.port}"
        credentials = channel_credentials(client_trust)
        certificate, key = server_trust.tls_cert.read_bytes(), server_trust.tls_key.read_bytes()
        authority.issue("other")
        for broken in (b"", b"no certificate", (tmp_path / "other.pem").read_bytes(), None):
            if broken is None:
                server_trust.tls_cert.unlink()
            else:
                server_trust.tls_cert.write_bytes(broken)
            async with open_channel(address, credentials) as channel:
                await until_shown(channel, client_trust.tls_cert)
        warnings = [record for record in caplog.records if "stays in use" in record.message]
        assert 2 <= len(warnings) <= 4
        server_trust.tls_cert.write_bytes(certificate)
        server_trust.tls_key.write_bytes(key)
        async with open_channel(address, credentials) as channel:
            await until_shown(channel, client_trust.tls_cert)


async def test_a_peer_known_by_address_only_may_be_checked_by_a_name(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with serving(authority.issue("server"), mutual=False) as server:
        address = f"127.0.0.1:{server.port}"
        for name, works in (("server.test", True), ("worker.test", False)):
            trust = TlsSettings(tls_ca=authority.file, tls_worker_name=name)
            credentials = channel_credentials(trust)
            assert isinstance(credentials, PeerCredentials)
            async with open_channel(address, credentials) as channel:
                if works:
                    assert await shown(channel) == ""
                else:
                    with pytest.raises(grpc.aio.AioRpcError):
                        await shown(channel)


@pytest.mark.parametrize("kind", ["none", "expired", "foreign"])
async def test_wrong_client_certificates_are_refused(tmp_path: Path, kind: str) -> None:
    authority = Authority(tmp_path / "ours")
    async with serving(authority.issue("server")) as server:
        trust = {
            "none": TlsSettings(tls_ca=authority.file),
            "expired": authority.issue("late", expired=True),
            "foreign": Authority(tmp_path / "theirs").issue("them").model_copy(update={"tls_ca": authority.file}),
        }[kind]
        async with open_channel(f"127.0.0.1:{server.port}", channel_credentials(trust)) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await shown(channel)
