"""The picker's own certificate: data planes connect with TLS and no certificate, while the router requires one."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.base.errors import SluiceError
from services.common.net.ports import free_port
from services.common.rpc.channels import open_channel
from services.common.security.tls import channel_credentials
from services.common.settings.service import TlsSettings
from services.router.picker.bootstrap import with_own_certificate
from services.router.settings import RouterSettings
from tests.support.clients.ext_proc import Exchange
from tests.support.data.authority import Authority
from tests.support.servers.router_cluster import MODEL, routers
from tests.support.waiting import until

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}]}
SERVING = health_pb2.HealthCheckResponse.SERVING


async def health(address: str, tls: TlsSettings | None) -> int:
    """Returns the status that a server reports to a caller with that certificate, or none."""
    credentials = None if tls is None else channel_credentials(tls)
    async with open_channel(address, credentials) as channel:
        request = health_pb2.HealthCheckRequest()
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=10, wait_for_ready=False)
        return int(answer.status)


async def test_picker_with_its_own_certificate_requires_none_of_envoy(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    router_tls = authority.issue("router", "spiffe://sluice/router")
    own = authority.issue("picker", named=False)
    without = TlsSettings(tls_ca=authority.file)
    listen, health_listen = (f"127.0.0.1:{free_port()}" for _ in range(2))
    async with routers(
        tls_require_client_cert=True,
        **router_tls.model_dump(include={"tls_cert", "tls_key", "tls_ca"}),
        picker_listen=listen,
        picker_health_listen=health_listen,
        picker_tls_cert=own.tls_cert,
        picker_tls_key=own.tls_key,
        drain_s=1,
    ) as [router]:

        async def serves() -> bool:
            return bool(await health(listen, without) == SERVING)

        await until(serves)
        assert await health(health_listen, without) == SERVING
        async with open_channel(listen, channel_credentials(without)) as channel:
            assert (await Exchange(channel).request(CHAT)).status == 503  # a response: there is no worker
        for address, tls in ((listen, None), (f"127.0.0.1:{router.port}", without)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await health(address, tls)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("given", ["picker_tls_cert", "picker_tls_key"])
def test_picker_certificate_without_its_key_is_rejected(given: str) -> None:
    with pytest.raises(SluiceError, match="picker-tls-cert and picker-tls-key must be set together"):
        with_own_certificate(RouterSettings.model_validate({given: Path("tls.pem")}))
