"""The router behind mTLS: only callers with a certificate of its authority that names them are answered."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from services.common.rpc.channels import open_channel
from services.common.security.tls import channel_credentials
from services.common.settings import TlsSettings
from sluice.v1 import router_pb2, router_pb2_grpc
from tests.support.data.authority import Authority
from tests.support.servers.router_cluster import routers


async def list_workers(address: str, shown: TlsSettings | None) -> router_pb2.ListWorkersResponse:
    """Asks with a certificate, or in plain text."""
    credentials = None if shown is None else channel_credentials(shown)
    async with open_channel(address, credentials) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        return await stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=10, wait_for_ready=False)


async def test_only_named_certificates_of_the_authority_are_let_in(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    trust = authority.issue("router", "spiffe://sluice/router")
    ours = authority.issue("scheduler", "spiffe://sluice/scheduler")
    none = trust.model_copy(update={"tls_cert": None, "tls_key": None})
    foreign = stranger.issue("foreign").model_copy(update={"tls_ca": authority.file})
    unnamed = authority.issue("unnamed", named=False)
    settings = trust.model_dump(include={"tls_cert", "tls_key", "tls_ca"})
    async with routers(tls_require_client_cert=True, **settings) as (router,):
        address = f"127.0.0.1:{router.port}"
        assert list((await list_workers(address, ours)).workers) == []
        for shown, status in (
            (none, grpc.StatusCode.UNAVAILABLE),
            (foreign, grpc.StatusCode.UNAVAILABLE),
            (None, grpc.StatusCode.UNAVAILABLE),
            (unnamed, grpc.StatusCode.PERMISSION_DENIED),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await list_workers(address, shown)
            assert refused.value.code() is status
        assert list((await list_workers(address, ours)).workers) == []


async def test_without_a_trust_domain_every_certificate_of_the_authority_may_call_everything(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    trust = authority.issue("router", "spiffe://sluice/router")
    unnamed = authority.issue("unnamed", named=False)
    settings = trust.model_dump(include={"tls_cert", "tls_key", "tls_ca"})
    async with routers(tls_require_client_cert=True, tls_trust_domain="", **settings) as (router,):
        assert list((await list_workers(f"127.0.0.1:{router.port}", unnamed)).workers) == []
