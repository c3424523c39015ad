"""The client library's certificate rotates with its file."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
from sluice_client import Tls

from services.common.rpc.server import GrpcServer
from services.common.settings.service import GrpcServiceSettings
from sluice.v1 import worker_pb2
from tests.support.data.authority import Authority


async def handshake(server: GrpcServer, context: ssl.SSLContext) -> None:
    """Connects and waits until the server has taken or refused the certificate."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
    assert await asyncio.wait_for(reader.read(9), 20)  # the server's settings; TLS 1.3 refuses after the handshake
    writer.close()


async def test_a_new_connection_shows_the_new_certificate(tmp_path: Path) -> None:
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    trust = new.issue("worker")
    settings = GrpcServiceSettings(
        listen="127.0.0.1:0", tls_require_client_cert=True, **trust.model_dump(exclude={"tls_require_client_cert"})
    )
    server = GrpcServer(settings, worker_pb2.DESCRIPTOR)
    await server.start()
    mine = old.issue("scheduler")
    assert mine.tls_cert is not None
    assert mine.tls_key is not None
    context = Tls(ca=new.file, cert=mine.tls_cert, key=mine.tls_key).context()
    with pytest.raises((OSError, AssertionError)):
        await handshake(server, context)
    ours = new.issue("scheduler")
    assert ours.tls_cert is not None
    assert ours.tls_key is not None
    mine.tls_cert.write_bytes(ours.tls_cert.read_bytes())
    with pytest.raises((OSError, AssertionError)):
        await handshake(server, context)  # half of the new pair changes nothing
    mine.tls_key.write_bytes(ours.tls_key.read_bytes())
    await handshake(server, context)
    mine.tls_key.unlink()
    await handshake(server, context)
    await server.stop(0)
