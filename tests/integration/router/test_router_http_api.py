"""The HTTP API of a real router, over real HTTP, with both stores; its answers equal those of gRPC."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.protobuf import json_format

from services.common.net.ports import free_port
from services.common.types.hashing import block_hashes
from services.router.http_api import server as http_server
from services.router.http_api.route import answer_of
from sluice.v1 import router_pb2
from tests.support.clients.callers import prompt, query, refused
from tests.support.data.authority import Authority
from tests.support.data.tokens import accept
from tests.support.servers.preprocess_server import preprocess
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.router_cluster import BLOCK, MODEL, FakeWorker, RouterProcess, routers
from tests.support.waiting import until

TOKENS = list(range(640))


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "memory":
        return {}
    server: RedisServer = request.getfixturevalue("redis")
    return {"redis_url": server.url, "redis_timeout_s": 10}


@asynccontextmanager
async def served(*workers: str, **settings: Any) -> AsyncIterator[tuple[RouterProcess, httpx.AsyncClient]]:
    """A router with workers, and a client of its HTTP API."""
    address = f"127.0.0.1:{free_port()}"
    async with (
        routers(drain_s=2, lease_ms=60_000, http_listen=address, **settings) as (router,),
        httpx.AsyncClient(base_url=f"http://{address}", timeout=60) as http,
    ):
        if workers:
            await router.ready()
        for name in workers:
            await FakeWorker(name).attach(router)
        yield router, http


async def requests_booked(router: RouterProcess) -> dict[str, int]:
    loads = (await router.stub.GetLoads(router_pb2.GetLoadsRequest())).loads
    return {load.worker_id: load.requests for load in loads}


def body(*tokens: int, model: str = MODEL) -> dict[str, Any]:
    """A completion with token ids."""
    return {"model": model, "prompt": list(tokens)}


async def test_calls_over_http_equal_those_over_grpc(store: dict[str, Any]) -> None:
    async with preprocess() as address, served("a", "b", preprocess=[address], **store) as (router, http):
        stub = router.stub
        reserved = await http.post("/route?request_id=r1", json=body(*TOKENS))
        assert reserved.status_code == 200, reserved.text
        over_http, over_grpc = reserved.json(), await stub.RouteQuery(query(prompt(*TOKENS), "r1"))
        assert over_http["worker"] == over_grpc.decode.worker_id
        assert over_http["reservation"] == over_grpc.reservation_id == f"{MODEL}:r1"
        assert over_http["expires_unix_ms"] == over_grpc.expires_unix_ms
        parameters = "reserve=false&candidates=b&return_token_ids=true"
        over_http = (await http.post(f"/route?{parameters}", json=body(*TOKENS))).json()
        only = router_pb2.CandidateSet(worker_ids=["b"])
        assert over_http == answer_of(
            await stub.RouteQuery(query(prompt(*TOKENS), candidates=only, return_token_ids=True))
        )
        ids = [f"{MODEL}:r1", f"{MODEL}:none", "none"]
        assert (await http.post("/prefill_complete", json={"reservations": ids})).json() == {"unknown": 2}
        listed = await stub.ListWorkers(router_pb2.ListWorkersRequest())
        assert (await http.get("/workers")).json() == json_format.MessageToDict(listed)
        assert (await http.get("/workers", params={"model": MODEL})).json()["workers"][0]["workerId"] == "a"
        assert (await http.get("/workers", params={"model": "none"})).json() == {}
        assert (await http.post("/free", json={"reservations": ids})).json() == {"unknown": 2}
        assert await requests_booked(router) == {"a": 0, "b": 0}


@pytest.mark.parametrize(
    ("parameters", "fields", "request_"),
    [
        ("", {"model": "none"}, query(prompt(1), model="none")),
        ("policy=best", {}, query(prompt(1), policy="best")),
        ("candidates=", {}, query(prompt(1), candidates=router_pb2.CandidateSet())),
        ("candidates=none", {}, query(prompt(1), candidates=router_pb2.CandidateSet(worker_ids=["none"]))),
        ("", {"prompt": None}, query(router_pb2.PromptRef(openai_body=b'{"prompt": null}'))),
    ],
    ids=["model", "policy", "empty", "unknown", "body"],
)
async def test_errors_over_http_equal_those_over_grpc(
    parameters: str, fields: dict[str, Any], request_: router_pb2.RouteQueryRequest
) -> None:
    async with preprocess() as address, served("a", preprocess=[address]) as (router, http):
        error = await refused(router.stub.RouteQuery(request_))
        answer = await http.post(f"/route?reserve=false&{parameters}", json=body(1) | fields)
        assert answer.status_code == error.http_status
        assert answer.json() == {
            "error": {
                "code": error.code or error.kind.name.lower(),
                "message": error.message,
                "param": error.param or None,
            }
        }
        assert ("retry-after" in answer.headers) == (answer.status_code == 503)


async def test_openai_body_in_gives_a_worker_and_a_reservation(store: dict[str, Any]) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Which way does the river run? " * 20}]}
    async with preprocess() as address, served("a", "b", preprocess=[address], **store) as (router, http):

        async def answers() -> bool:
            return (await http.post("/route?reserve=false", json=chat)).status_code == 200

        await until(answers)
        route = (await http.post("/route?return_token_ids=true", json=chat, headers={"x-request-id": "r"})).json()
        assert (route["reservation"], route["rank"], route["prefill"]) == (f"{MODEL}:r", 0, None)
        assert route["address"] == f"{route['worker']}.test:50051"
        assert route["headers"]["x-gateway-destination-endpoint"] == route["address"]
        assert route["expires_unix_ms"] > 1e12
        assert len(route["token_ids"]) == route["tokens_to_compute"] > 100
        grpc = await router.stub.RouteQuery(
            query(router_pb2.PromptRef(openai_body=json.dumps(chat).encode()), "r", return_token_ids=True)
        )
        assert (grpc.reservation_id, grpc.decode.worker_id) == (route["reservation"], route["worker"])
        assert await requests_booked(router) == {"a": 0, "b": 0} | {route["worker"]: 1}
        id_ = {"reservation": route["reservation"]}
        assert (await http.post("/prefill_complete", json=id_)).json() == {"unknown": 0}
        freed = await http.post("/free", json={**id_, "cached_tokens": 16, "output_tokens": 5})
        assert freed.json() == {"unknown": 0}
        assert (await http.post("/free", json=id_)).json() == {"unknown": 1}
        assert (await http.post("/prefill_complete", json={"reservations": ["none"]})).json() == {"unknown": 1}
        decisions = (await router.stub.GetDecisions(router_pb2.GetDecisionsRequest())).decisions
        assert [(each.delivered_cached_tokens, each.output_tokens) for each in decisions] == [(16, 5)]
        assert await requests_booked(router) == {"a": 0, "b": 0}
        unknown = await http.post("/route", json={**chat, "model": "none"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        wrong = await http.post("/route", json={"model": MODEL, "messages": [{"role": "wizard", "content": "hi"}]})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "messages[0].role")


async def test_hint_names_the_peer_with_the_longer_prefix() -> None:
    async with served() as (router, _):
        await router.ready()
        workers = [FakeWorker(name) for name in "ab"]
        for worker in workers:
            await worker.attach(router)
        await workers[0].store(block_hashes(TOKENS, BLOCK))
        asked = query(prompt(*TOKENS), policy="round_robin")
        answers = [await router.stub.RouteQuery(asked) for _ in range(2)]
        assert [answer.HasField("router_hint") for answer in answers] == [False, True]
        assert answers[1].router_hint == router_pb2.PeerHint(
            worker_id="a", address="a.test:50051", blocks=len(TOKENS) // BLOCK
        )
        await workers[1].store(block_hashes(TOKENS, BLOCK))
        assert not (await router.stub.RouteQuery(asked)).HasField("router_hint")


async def test_tokens_are_checked_as_over_grpc(tmp_path: Path) -> None:
    path = accept(tmp_path / "tokens", "s3cret scheduler", "wkr worker", "other gateway")
    async with served("a", tokens_file=None) as (_, http):
        assert (await http.get("/workers")).status_code == 200
    async with served(tokens_file=path) as (_, http):
        assert (await http.get("/health")).status_code in (200, 503)
        cases = [
            ({}, 401, "token_missing"),
            ({"authorization": "Bearer wrong"}, 401, "invalid_token"),
            ({"authorization": "s3cret"}, 401, "invalid_token"),
            ({"authorization": "Bearer wkr"}, 403, "caller_not_allowed"),
        ]
        for path_ in ("/route", "/free", "/prefill_complete"):
            for headers, status, code in cases:
                answer = await http.post(path_, content=b"not even JSON", headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
                assert ("www-authenticate" in answer.headers) == (status == 401)
        twice = [("authorization", "Bearer s3cret"), ("authorization", "Bearer s3cret")]
        assert (await http.get("/workers", headers=twice)).status_code == 401
        assert (await http.get("/workers")).status_code == 401
        assert (await http.get("/workers", headers={"authorization": "Bearer s3cret"})).status_code == 200


async def test_reservations_of_another_caller_are_unknown(tmp_path: Path) -> None:
    path = accept(tmp_path / "tokens", "one scheduler", "two gateway", "w worker")
    async with preprocess() as address, served(tokens_file=path, preprocess=[address]) as (router, http):
        await router.ready()
        router.stub = type(router.stub)(_with_token(router, "w"))
        await FakeWorker("a").attach(router)
        mine, theirs = ({"authorization": f"Bearer {token}"} for token in ("one", "two"))
        made = (await http.post("/route?request_id=r", json=body(1), headers=mine)).json()["reservation"]
        assert (await http.post("/free", json={"reservation": made}, headers=theirs)).json() == {"unknown": 1}
        assert (await http.post("/prefill_complete", json={"reservation": made}, headers=mine)).json() == {"unknown": 0}
        assert (await http.post("/free", json={"reservation": made}, headers=mine)).json() == {"unknown": 0}


def _with_token(router: RouterProcess, token: str) -> Any:
    from services.common.rpc.bearer_channel import BearerChannel

    return BearerChannel(router.channel, lambda: token)


async def test_certificates_are_checked_as_over_grpc(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    trust = authority.issue("router", "spiffe://sluice/router")
    address = f"127.0.0.1:{free_port()}"

    async def status(shown: Any) -> int:
        context = ssl.create_default_context(cafile=str(authority.file))
        if shown is not None:
            context.load_cert_chain(shown.tls_cert, shown.tls_key)
        async with httpx.AsyncClient(verify=context, timeout=60) as http:
            return (await http.get(f"https://{address}/workers")).status_code

    settings = trust.model_dump(include={"tls_cert", "tls_key", "tls_ca"})
    async with routers(tls_require_client_cert=True, http_listen=address, drain_s=2, **settings):
        assert await status(authority.issue("scheduler", "spiffe://sluice/scheduler")) in (200, 503)
        assert await status(authority.issue("worker", "spiffe://sluice/worker/w")) == 403
        assert await status(authority.issue("unnamed", named=False)) == 403
        for shown in (None, stranger.issue("foreign", "spiffe://sluice/scheduler")):
            with pytest.raises(httpx.TransportError):
                await status(shown)
        with pytest.raises(httpx.TransportError):
            async with httpx.AsyncClient(timeout=60) as plain:
                await plain.get(f"http://{address}/health")


async def test_client_that_disconnects_while_it_waits_reserves_nothing() -> None:
    async with preprocess() as address, served("a", busy_requests=1, preprocess=[address]) as (router, http):
        first = await router.stub.RouteQuery(query(prompt(1), "first"))
        with pytest.raises(httpx.ReadTimeout):
            await http.post("/route?request_id=second&max_wait_ms=60000", json=body(2), timeout=0.5)
        await router.stub.FreeRequest(router_pb2.FreeRequestRequest(reservation_ids=[first.reservation_id]))
        third = await router.stub.RouteQuery(query(prompt(3), "third", max_wait_ms=30_000))
        assert third.decode.worker_id == "a"
        assert await requests_booked(router) == {"a": 1}


async def test_busy_workers_over_http_are_503_with_a_delay() -> None:
    async with preprocess() as address, served("a", busy_requests=1, preprocess=[address]) as (_, http):
        answers = [await http.post("/route", json=body(1)) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 503]
        assert int(answers[1].headers["retry-after"]) >= 1


async def raw(address: str, sent: bytes, wait_s: float = 20) -> bytes:
    """Sends bytes; returns everything received until the router closes the connection."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(sent)
        return await asyncio.wait_for(reader.read(), wait_s)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_connections_that_break_the_bounds_are_closed_and_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "MAX_ARRIVAL_S", 1.0)
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 4)
    async with served("a") as (_, http):
        address = f"{http.base_url.host}:{http.base_url.port}"
        start = b"POST /free HTTP/1.1\r\nhost: localhost\r\n"
        assert b" 408 " in await raw(address, start)
        assert await raw(address, b"") == b""
        assert b" 431 " in await raw(address, start + b"x-a: b\r\n" * 200)
        assert b" 431 " in await raw(address, start + b"x-a: " + b"b" * 200_000)
        assert b" 400 " in await raw(address, b"\x16\x03\x01 not HTTP\r\n\r\n")
        assert b" 413 " in await raw(address, start + b"connection: close\r\ncontent-length: 99999999\r\n\r\n{")
        late = await raw(address, start + b"connection: close\r\ncontent-length: 10\r\n\r\n{")
        assert b" 408 " in late
        assert b"body_timeout" in late
        host, port = address.split(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(4)]
        assert b" 503 " in await raw(address, start)
        for _, writer in idle:
            writer.close()

        async def serves() -> bool:
            return (await http.get("/health")).status_code == 200

        await until(serves)


async def test_large_bodies_on_one_connection_are_read_to_their_end() -> None:
    async with preprocess() as address, served("a", preprocess=[address]) as (router, http):
        padding = b" " * 3_900_000
        for _ in range(3):
            answer = await http.post("/route", content=json.dumps(body(1)).encode() + padding)
            assert answer.status_code == 200, answer.text
        answers = await asyncio.gather(*(http.post("/free", content=b"{}" + padding) for _ in range(12)))
        assert {answer.status_code for answer in answers} == {400}
        assert await requests_booked(router) == {"a": 3}


async def test_port_in_use_ends_the_start_with_its_name() -> None:
    async with served() as (_, http):
        address = f"{http.base_url.host}:{http.base_url.port}"
        other = RouterProcess(http_listen=address)
        with pytest.raises(Exception, match=f"Cannot listen on {address}"):
            await asyncio.wait_for(_serve(other), 20)


async def _serve(router: RouterProcess) -> None:
    from services.common.base.tasks import Stop
    from services.router.__main__ import serve

    await serve(router.settings, Stop())
