"""Commands for a running suite that are pointed at something else: one sentence that says so, never a guess."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat
from cryptography.hazmat.primitives.serialization import load_pem_private_key as load_key
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from sluice.cli import certs
from sluice.cli.doctor.checks import examine
from sluice.cli.doctor.finding import FindingState
from sluice.cli.errors import BadFlag
from sluice.cli.live.client import UNREACHABLE, NotReached, Running, reached
from sluice.cli.live.endpoint import Endpoint
from sluice.cli.trust import Trust

Answer = Callable[[httpx.Request], httpx.Response]


@asynccontextmanager
async def asked(place: Endpoint, answer: Answer) -> AsyncIterator[Running]:
    """A suite whose gateway answers like this."""
    async with httpx.AsyncClient(base_url=place.gateway, transport=httpx.MockTransport(answer)) as http:
        running = Running(place, http, None)
        yield running
        await running.close()


def says(body: object) -> Answer:
    return lambda _: httpx.Response(200, json=body)


def refuses(_: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


@pytest.mark.parametrize(
    "gateway",
    ["http://[::1", "http://h:abc", "http://h:99999", "http://h:0", "http://", "http://:8000", "ftp://h", "h:8000"],
)
async def test_what_is_no_url_is_a_wrong_flag(gateway: str) -> None:
    with pytest.raises(BadFlag, match=r"--gateway .* is not a URL"):
        async with reached(Endpoint(gateway)):
            pass


@pytest.mark.parametrize("gateway", ["http://h", "https://h:8443/", "http://[::1]:8000", "http://h:8000/prefix"])
async def test_what_is_a_url_is_taken(gateway: str) -> None:
    async with reached(Endpoint(gateway)) as running:
        assert running.endpoint.gateway == gateway


@pytest.mark.parametrize("secret", ["schlüssel", "one\ntwo", "sluice-1\n"])
async def test_secrets_that_cannot_be_sent_are_a_wrong_flag_that_does_not_show_them(secret: str) -> None:
    for place, flag in ((Endpoint(api_key=secret), "--api-key"), (Endpoint(router_token=secret), "--router-token")):
        with pytest.raises(BadFlag, match=flag) as refused:
            async with reached(place):
                pass
        assert secret not in str(refused.value)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    certs.make(folder, certs.Options(names=("client", "router")))
    return folder


def _encrypted(key: Path) -> None:
    found = load_key(key.read_bytes(), None)
    key.write_bytes(found.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "ca.pem").write_text("no certificate"), "ca.pem contains no certificate"),
        (lambda folder: (folder / "ca.pem").write_text(""), "ca.pem contains no certificate"),
        (lambda folder: (folder / "client.key").unlink(), "client.key cannot be read: No such file"),
        (lambda folder: shutil.copy(folder / "router.key", folder / "client.key"), "must be a certificate and its"),
        (lambda folder: _encrypted(folder / "client.key"), "unencrypted key"),
    ],
)
async def test_files_that_do_not_fit_are_a_wrong_flag(
    spoil: Callable[[Path], object], message: str, sound: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "certs"
    shutil.copytree(sound, folder)
    spoil(folder)
    with pytest.raises(BadFlag, match=f"--tls {folder}: .*{message}"):
        async with reached(Endpoint("https://h", trust=Trust(folder))):
            pass


@pytest.mark.parametrize("body", [{}, [], None, "x", {"nodes": {}}, {"detail": "Not Found"}])
async def test_another_service_that_answers_json_is_no_gateway(body: object) -> None:
    async with asked(Endpoint("http://other"), says(body)) as running:
        for question in (running.state, running.workers, lambda: running.tokens("hi", "m", False)):
            with pytest.raises(NotReached, match="is not a Sluice gateway"):
                await question()
        findings = await examine(running, "")
        assert findings[0].state is FindingState.FAIL
        assert "is not a Sluice gateway" in findings[0].found
        async with asked(Endpoint("http://other"), says(body)) as other:
            with pytest.raises(NotReached, match="is not a Sluice gateway"):
                await anext(other.deltas())


async def test_a_gateway_that_is_away_is_never_replaced_by_the_router_of_this_machine() -> None:
    async with asked(Endpoint("http://production:8000"), refuses) as running:
        with pytest.raises(NotReached, match=r"http://production:8000 cannot be reached.*--router"):
            await running.router_addresses()
    async with asked(Endpoint("http://127.0.0.1:8000/"), refuses) as running:
        assert await running.router_addresses() == ["127.0.0.1:50052"]
    async with asked(Endpoint("http://production:8000", router="production:50052"), refuses) as running:
        assert await running.router_addresses() == ["production:50052"]


async def test_a_server_that_loses_its_first_connection_is_asked_once_more() -> None:
    server = grpc.aio.server()
    health_service = health.aio.HealthServicer()
    await health_service.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    connections = 0

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        if connections == 1:
            writer.transport.abort()
            return
        answers, requests = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(passed(reader, requests), passed(answers, writer))

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as front:
        host, front_port = front.sockets[0].getsockname()
        async with asked(Endpoint("http://h"), refuses) as running:
            status = await running.status_of(f"{host}:{front_port}")
    await server.stop(0)
    assert (status.health, connections) == ("SERVING", 2)


async def passed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(4096):
        writer.write(chunk)
    writer.close()


async def test_a_server_that_is_not_there_is_unreachable_and_says_why() -> None:
    with socket.socket() as unheard:  # bound without listening: its port refuses connections and stays reserved
        unheard.bind(("127.0.0.1", 0))
        async with asked(Endpoint("http://h"), refuses) as running:
            status = await running.status_of(f"127.0.0.1:{unheard.getsockname()[1]}")
    assert status.health == UNREACHABLE
    assert "refused" in status.reason
