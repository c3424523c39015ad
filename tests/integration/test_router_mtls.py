"""The router behind mTLS: only callers with a certificate of its authority are answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import trustme

from services.common.runner import Stop
from services.router.__main__ import serve
from services.router.settings import RouterSettings
from sluice.v1 import router_pb2, router_pb2_grpc


@asynccontextmanager
async def mtls_router(folder: Path, authority: trustme.CA) -> AsyncIterator[str]:
    """The address of a router that wants a certificate of `authority`."""
    identity = authority.issue_cert("localhost", "127.0.0.1")
    identity.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    identity.private_key_pem.write_to_path(folder / "key.pem")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    settings = RouterSettings(
        listen="127.0.0.1:0",
        tls_cert=folder / "cert.pem",
        tls_key=folder / "key.pem",
        tls_ca=folder / "ca.pem",
        tls_require_client_cert=True,
        drain_s=1,
    )
    stop = Stop()
    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(serve(settings, stop, listening))
    try:
        yield f"127.0.0.1:{await asyncio.wait_for(listening, 20)}"
    finally:
        stop.set()
        await asyncio.wait_for(running, 20)


async def list_workers(address: str, trusted: trustme.CA, shown: trustme.CA | None) -> router_pb2.ListWorkersResponse:
    """Asks with a certificate of `shown`, or with none."""
    mine = shown.issue_cert("scheduler") if shown else None
    credentials = grpc.ssl_channel_credentials(
        trusted.cert_pem.bytes(),
        mine.private_key_pem.bytes() if mine else None,
        mine.cert_chain_pems[0].bytes() if mine else None,
    )
    async with grpc.aio.secure_channel(address, credentials) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        return await stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=10, wait_for_ready=False)


async def test_only_certificates_of_the_authority_are_let_in(tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    async with mtls_router(tmp_path, authority) as address:
        assert list((await list_workers(address, authority, authority)).workers) == []
        for shown in (None, stranger):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await list_workers(address, authority, shown)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        async with grpc.aio.insecure_channel(address) as plain:
            with pytest.raises(grpc.aio.AioRpcError):
                await router_pb2_grpc.RouterStub(plain).ListWorkers(router_pb2.ListWorkersRequest(), timeout=10)
        assert list((await list_workers(address, authority, authority)).workers) == []
