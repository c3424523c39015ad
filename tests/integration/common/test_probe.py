import asyncio
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from services.common.rpc import probe
from services.common.rpc.server import GrpcServer
from services.common.settings.service import GrpcServiceSettings
from sluice.v1 import router_pb2


async def start(serving: bool, **settings: Any) -> GrpcServer:
    server = GrpcServer(GrpcServiceSettings(listen="127.0.0.1:0", **settings), router_pb2.DESCRIPTOR)
    await server.start()
    await server.set_serving(serving)
    return server


async def ask(*arguments: str) -> tuple[int, str]:
    """Exit code and standard error of a probe in a process of its own, as a container runs it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.common.rpc.probe", *arguments, stderr=subprocess.PIPE
    )
    _, said = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode or 0, said.decode()


async def test_a_serving_service_passes() -> None:
    server = await start(serving=True)
    try:
        assert await ask(f"127.0.0.1:{server.port}") == (0, "")
    finally:
        await server.stop(0)


async def test_a_service_that_is_not_ready_fails_and_says_so() -> None:
    server = await start(serving=False)
    try:
        assert await ask(f"127.0.0.1:{server.port}") == (1, f"probe: 127.0.0.1:{server.port} is NOT_SERVING\n")
    finally:
        await server.stop(0)


@pytest.mark.parametrize("serving", [True, False])
async def test_a_service_that_loads_or_drains_is_alive(serving: bool) -> None:
    server = await start(serving=serving)
    try:
        assert await ask(f"127.0.0.1:{server.port}", "--live") == (0, "")
    finally:
        await server.stop(0)


async def test_nobody_there_fails_with_one_sentence() -> None:
    server = await start(serving=True)
    address = f"127.0.0.1:{server.port}"
    await server.stop(0)
    assert await ask(address) == (1, f"probe: {address} cannot be reached: UNAVAILABLE\n")


@pytest.mark.parametrize("mutual", [False, True])
async def test_tls_variables_of_the_service_apply(
    mutual: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("router")
    ca, cert, key = tmp_path / "ca.pem", tmp_path / "cert.pem", tmp_path / "key.pem"
    authority.cert_pem.write_to_path(ca)
    certificate.cert_chain_pems[0].write_to_path(cert)
    certificate.private_key_pem.write_to_path(key)
    server = await start(serving=True, tls_cert=cert, tls_key=key, tls_ca=ca, tls_require_client_cert=mutual)
    address = f"127.0.0.1:{server.port}"
    try:
        assert (await ask(address))[0] == 1, "plain text must not pass for TLS"
        for name, path in (("CERT", cert), ("KEY", key), ("CA", ca)):
            monkeypatch.setenv(f"SLUICE_ROUTER_TLS_{name}", str(path))
        assert await ask(address, "--service", "router") == (0, "")
        assert (await ask(address, "--service", "router", "--server-name", "elsewhere"))[0] == 1
        monkeypatch.setenv("SLUICE_ROUTER_TLS_CA", str(tmp_path / "missing.pem"))
        code, said = await ask(address, "--service", "router")
        assert code == 1
        assert said.startswith(f"probe: {address} cannot be probed: tls-ca")
        assert said.count("\n") == 1
    finally:
        await server.stop(0)


@pytest.fixture
def http_status() -> Iterator[tuple[list[int], str]]:
    """The status that a small HTTP server answers, to be changed, and its URL."""
    status = [200]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status[0])
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            del arguments

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield status, f"http://127.0.0.1:{server.server_port}/ready"
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_http_address_passes_when_it_answers_ok(
    http_status: tuple[list[int], str], capsys: pytest.CaptureFixture[str]
) -> None:
    status, url = http_status
    assert probe.main([url]) == 0
    status[0] = 503
    assert probe.main([url]) == 1
    assert capsys.readouterr().err == f"probe: {url} responded with 503\n"


@pytest.mark.parametrize("url", ["http://[::1", "http://h:abc", "http://h h/"])
async def test_what_is_no_url_is_a_sentence(url: str) -> None:
    code, said = await ask(url)
    assert code == 1
    assert said.startswith(f"probe: {url} cannot be reached")
    assert said.count("\n") == 1


async def test_what_speaks_no_http_is_a_sentence() -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ready\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        code, said = await ask(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/ready")
    assert code == 1
    assert "Traceback" not in said
    assert said.count("\n") == 1
