"""How the client library reaches a service: addresses, credentials, trust."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import trustme
from sluice_client import RouterClient, Tls, WorkerClient
from sluice_client.errors import SluiceError, error_of
from sluice_client.options import Options, host_and_port
from sluice_client.wire import ErrorKind, RouteQueryRequest, RouteQueryResponse, WorkerTarget


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("router:50052", ("router", 50052)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_addresses(address: str, expected: tuple[str, int]) -> None:
    assert host_and_port(address) == expected


@pytest.mark.parametrize(
    "address", ["", "router", "router:", ":50052", "router:x", "router:0", "router:65536", "::1:50052", "[]:1", "a:-1"]
)
def test_what_is_no_address_is_refused_at_once(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        RouterClient(address)
    with pytest.raises(ValueError, match="host:port"):
        WorkerClient(address)


def test_a_router_client_needs_an_address() -> None:
    with pytest.raises(ValueError, match="at least one"):
        RouterClient()


def test_a_token_may_rotate() -> None:
    tokens = iter(["one", "two", ""])
    options = Options(token=lambda: next(tokens), metadata=lambda: {"traceparent": "00-1"})
    assert options.headers() == {"traceparent": "00-1", "authorization": "Bearer one"}
    assert options.headers() == {"traceparent": "00-1", "authorization": "Bearer two"}
    assert options.headers() == {"traceparent": "00-1"}


@pytest.mark.parametrize("token", ["secret\n", "secret\r\nx: y", "sécret"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_repeated(token: str) -> None:
    with pytest.raises(ValueError, match="token") as caught:
        Options(token=token).headers()
    assert "cret" not in str(caught.value)


def test_tls_files_are_checked_at_once(tmp_path: Path) -> None:
    certificate = trustme.CA().issue_cert("localhost")
    cert, key, other = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "other.pem"
    certificate.cert_chain_pems[0].write_to_path(cert)
    certificate.private_key_pem.write_to_path(key)
    trustme.CA().issue_cert("localhost").private_key_pem.write_to_path(other)
    assert Tls(ca=cert, cert=cert, key=key).context()
    with pytest.raises(ValueError, match="belong together"):
        RouterClient("a:1", tls=Tls(cert=cert))
    with pytest.raises(FileNotFoundError):
        RouterClient("a:1", tls=Tls(ca=tmp_path / "none.pem"))
    with pytest.raises(OSError, match=r"(?i)mismatch|values"):
        RouterClient("a:1", tls=Tls(cert=cert, key=other))


def test_a_client_is_made_without_an_event_loop_and_closes_unused() -> None:
    async def use(client: RouterClient) -> None:
        async with client:
            pass
        with pytest.raises(RuntimeError, match="closed"):
            await client.list_workers()

    asyncio.run(use(RouterClient("127.0.0.1:1")))


class Asked:
    """A replica that answers, or refuses as it is told, and remembers how long it was given."""

    closed = False

    def __init__(self, refuse: SluiceError | None = None) -> None:
        self.given: list[float] = []
        self.refuse = refuse

    async def unary(self, method: object, request: object, timeout_s: float) -> RouteQueryResponse:
        self.given.append(timeout_s)
        if self.refuse is not None:
            raise self.refuse
        return RouteQueryResponse(decode=WorkerTarget(worker_id="w"), reservation_id="r")


def client_of(*replicas: Asked) -> RouterClient:
    client = RouterClient(*(f"127.0.0.1:{number + 1}" for number in range(len(replicas))), timeout_s=5.0)
    connections: Any = list(replicas)
    client._replicas._connections = connections
    return client


async def test_call_with_a_wait_keeps_its_place_for_the_wait() -> None:
    first, second = Asked(), Asked()
    await client_of(first, second).select_and_reserve("r", "m", [1], max_wait_s=60)
    assert first.given == [pytest.approx(62.5, abs=1)], "the wait, and a share of the rest"
    assert second.given == []


async def test_the_next_replica_has_what_is_left() -> None:
    first, second = Asked(error_of(ErrorKind.UNAVAILABLE, "Stopping.", retryable=True)), Asked()
    client = client_of(first, second)
    await client.select_and_reserve("r", "m", [1], max_wait_s=60)
    assert second.given == [pytest.approx(65, abs=1)]


async def test_a_call_without_a_wait_shares_its_time_equally() -> None:
    first, second = Asked(), Asked()
    await client_of(first, second).query("m", [1])
    assert first.given == [pytest.approx(2.5, abs=0.5)]


async def test_a_wait_longer_than_the_call_s_time_takes_no_more_than_that() -> None:
    first, second = Asked(), Asked()
    await client_of(first, second).route(RouteQueryRequest(max_wait_ms=60_000), timeout_s=4.0)
    assert first.given == [pytest.approx(4, abs=0.5)]
