"""Bodies and parameters of the HTTP API, without a router."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, cast

import httpx
import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.apis.prompts import ChatPrompt
from services.common.base.budgets import BudgetPool
from services.common.base.errors import overloaded
from services.common.net.http_policy import HttpPolicy
from services.router.http_api.app import HttpApi
from services.router.http_api.bodies import BodyLimits
from services.router.http_api.route import answer_of
from services.router.scheduling.body_intake import BodyIntake
from services.router.scheduling.request_bodies import ReadBody
from sluice.v1 import router_pb2

MIB = 1 << 20
CALLS = {"/route": "RouteQuery", "/free": "FreeRequest", "/prefill_complete": "MarkPrefillComplete"}
FIELDS = [
    *("model", "messages", "prompt", "tools", "documents", "cache_salt", "add_special_tokens", "temperature"),
    *("reservation", "reservations", "output_tokens", "cached_tokens", "role", "content"),
]


class Recorder:
    """Records the requests of RPCs; answers with what a test sets."""

    def __init__(self) -> None:
        self.requests: list[Message] = []
        self.bodies: list[ReadBody] = []
        self.reply: Any = router_pb2.RouteQueryResponse()

    def unary(self, name: str) -> Callable[[Message], Awaitable[Message]]:
        async def handle(request: Message) -> Message:
            self.requests.append(request)
            if isinstance(self.reply, Exception):
                raise self.reply
            found: Message = self.reply
            return found

        return handle

    async def route(self, query: router_pb2.RouteQueryRequest, body: ReadBody) -> Message:
        self.bodies.append(body)
        return await self.unary("RouteQuery")(query)


@pytest.fixture
def calls() -> Recorder:
    return Recorder()


def client(calls: Recorder, size: int = MIB, memory: int = 2 * MIB) -> httpx.AsyncClient:
    pool = BudgetPool("body_bytes", memory, "")
    limits = BodyLimits(size, pool, 10.0, BodyIntake(pool))
    app = HttpApi(cast(Any, calls), None, limits, lambda: True).app(HttpPolicy())
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router")


async def test_route_with_every_parameter_makes_the_whole_query(calls: Recorder) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user"}]}).encode()
    query = (
        "request_id=r&session_id=s&priority=-2&max_wait_ms=5&ttl_ms=6&session_ttl_ms=7&expected_output_tokens=8&policy=p"
        "&max_wait_for_workers_ms=9&first_token_ms=10&tokenize_ms=11&fairness_id=f&fallbacks=2"
        "&owner=o&lora=l&candidates=a,b&return_token_ids=true"
    )
    async with client(calls) as http:
        headers = {"X-Request-Id": "ignored", "X-Tenant": "acme", "authorization": "Bearer secret"}
        assert (await http.post(f"/route?{query}", content=body, headers=headers)).status_code == 200
    (request,) = calls.requests
    assert isinstance(request, router_pb2.RouteQueryRequest)
    assert dict(request.headers) == {"x-request-id": "ignored", "x-tenant": "acme"}
    request.ClearField("headers")
    assert request == router_pb2.RouteQueryRequest(
        mode=router_pb2.RouteQueryRequest.MODE_SELECT_AND_RESERVE,
        request_id="r",
        model="m",
        session_id="s",
        priority=-2,
        max_wait_ms=5,
        ttl_ms=6,
        session_ttl_ms=7,
        expected_output_tokens=8,
        max_wait_for_workers_ms=9,
        first_token_ms=10,
        tokenize_ms=11,
        fairness_id="f",
        fallbacks=2,
        policy="p",
        owner="o",
        lora="l",
        candidates=router_pb2.CandidateSet(worker_ids=["a", "b"]),
        return_token_ids=True,
    )
    assert calls.bodies == [ReadBody(ChatPrompt(b'[{"role":"user"}]'))]


async def test_route_reads_headers_and_makes_a_request_id(calls: Recorder) -> None:
    async with client(calls) as http:
        headers = {"x-session-id": "s", "x-sluice-priority": "3", "x-sluice-max-wait-ms": "9"}
        await http.post("/route", json={"model": "m", "prompt": "x"}, headers=headers)
        await http.post("/route?reserve=false", json={"model": "m", "prompt": "x"})
        names = {"x-gateway-inference-fairness-id": "old", "x-llm-d-inference-fairness-id": "new"}
        await http.post("/route", json={"model": "m", "prompt": "x"}, headers=names)
    reserving, asking, sharing = calls.requests
    assert isinstance(sharing, router_pb2.RouteQueryRequest)
    assert sharing.fairness_id == "new"
    assert isinstance(reserving, router_pb2.RouteQueryRequest)
    assert isinstance(asking, router_pb2.RouteQueryRequest)
    assert (reserving.session_id, reserving.priority, reserving.max_wait_ms) == ("s", 3, 9)
    assert len(reserving.request_id) == 32
    assert (asking.mode, asking.request_id) == (router_pb2.RouteQueryRequest.MODE_QUERY_ONLY, "")
    assert not asking.HasField("candidates")


async def test_route_shows_policies_no_credentials_and_as_many_headers_as_a_query_may_have(calls: Recorder) -> None:
    headers = {"x-api-key": "secret", "x-zone": "eu", "x-long": "v" * 5_000, **{f"x-{n:03}": "v" for n in range(90)}}
    async with client(calls) as http:
        answer = await http.post("/route", json={"model": "m", "prompt": "x"}, headers=headers)
    assert answer.status_code == 200
    (request,) = calls.requests
    assert isinstance(request, router_pb2.RouteQueryRequest)
    assert (request.headers["x-zone"], len(request.headers)) == ("eu", 64)
    assert "x-api-key" not in request.headers
    assert "x-long" not in request.headers


BODY = {"model": "m", "prompt": "x"}
WRONG: list[tuple[str, Any, str]] = [
    ("/route", [], ""),
    ("/route", {}, "model"),
    ("/route", {"model": 3}, "model"),
    ("/route", {"model": "\ud800"}, ""),
    ("/free", {"reservation": "\ud800"}, ""),
    ("/route?priority=high", BODY, "priority"),
    ("/route?priority=99999999999", BODY, "priority"),
    ("/route?max_wait_ms=-1", BODY, "max_wait_ms"),
    ("/route?reserve=maybe", BODY, "reserve"),
    ("/route?colour=blue", BODY, "colour"),
    ("/free", {}, "reservation"),
    ("/free", {"reservation": ""}, "reservation"),
    ("/free", {"reservation": 3}, "reservation"),
    ("/free", {"reservation": "a", "reservations": ["b"]}, "reservation"),
    ("/free", {"reservations": []}, "reservation"),
    ("/free", {"reservation": "a", "output_tokens": -1}, "output_tokens"),
    ("/free", {"reservation": "a", "output_tokens": True}, "output_tokens"),
    ("/free", {"reservation": "a", "colour": 1}, "colour"),
    ("/free", {"reservations": ["a", "b"], "output_tokens": 1}, ""),
    ("/prefill_complete", {"reservation": "a", "output_tokens": 1}, "output_tokens"),
]


@pytest.mark.parametrize(("path", "body", "param"), WRONG)
async def test_request_with_a_wrong_field_is_refused_with_its_name(
    calls: Recorder, path: str, body: Any, param: str
) -> None:
    async with client(calls) as http:
        answer = await http.post(path, content=json.dumps(body))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error.keys() == {"code", "message", "param"}
    assert (error["param"] or "", calls.requests) == (param, [])


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"{", {}, 400, "invalid_argument"),
        (b'{"model": NaN}', {}, 400, "invalid_argument"),
        (b"\xff", {}, 400, "invalid_argument"),
        (b"[" * 100_000, {}, 400, "budget_exceeded"),
        (b'{"a":' * 90_000, {}, 400, "budget_exceeded"),
        (b'{"n": ' + b"9" * 10_000 + b"}", {}, 400, "invalid_argument"),
        (b"{}", {"content-type": "text/plain"}, 400, "invalid_argument"),
        (b"{}", {"content-encoding": "gzip"}, 400, "invalid_argument"),
        (b'{"reservations": [' + b"[]," * 300_000, {}, 400, "budget_exceeded"),
        (b"x" * (MIB + 1), {}, 413, "request_too_large"),
    ],
)
@pytest.mark.parametrize("path", ["/route", "/free"])
async def test_body_that_is_no_json_object_or_too_large_is_refused(
    calls: Recorder, path: str, body: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    async with client(calls) as http:
        answer = await http.post(path, content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"], calls.requests) == (status, code, [])
    assert "Traceback" not in answer.text


async def test_list_with_too_many_items_is_refused_with_its_name(calls: Recorder) -> None:
    async with client(calls) as http:
        answer = await http.post("/free", json={"reservations": ["a"] * 10_001})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "budget_exceeded", "reservations")
    assert calls.requests == []


async def test_chunked_body_beyond_the_limit_is_refused(calls: Recorder) -> None:
    async def endless() -> Any:
        while True:
            yield b"x" * 65_536

    async with client(calls) as http:
        answer = await http.post("/free", content=endless())
    assert answer.status_code == 413


async def test_bodies_beyond_the_memory_of_all_are_refused_with_a_delay(calls: Recorder) -> None:
    async with client(calls, memory=10) as http:
        answer = await http.post("/free", json={"reservation": "a" * 100})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        calls.reply = router_pb2.FreeRequestResponse(unknown=1)
        for _ in range(3):  # each returns its share
            assert (await http.post("/free", content=b"{}        ")).status_code == 400


async def test_errors_of_calls_become_statuses_with_retry_after(calls: Recorder) -> None:
    async with client(calls) as http:
        calls.reply = overloaded("Busy; retry later.", retry_after_ms=2_100)
        answer = await http.post("/route", json=BODY)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")
        assert answer.json() == {"error": {"code": "overloaded", "message": "Busy; retry later.", "param": None}}
        calls.reply = RuntimeError("a secret")
        answer = await http.post("/route", json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
        assert "secret" not in answer.text
        for method, path, status in (("GET", "/route", 405), ("POST", "/none", 404), ("GET", "/../etc", 404)):
            answer = await http.request(method, path)
            assert (answer.status_code, answer.json()["error"].keys()) == (status, {"code", "message", "param"})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS) | st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150)
@given(body=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4) | JSON, path=st.sampled_from([*CALLS]))
async def test_random_json_is_either_understood_or_refused(body: Any, path: str) -> None:
    recorder = Recorder()
    method = router_pb2.DESCRIPTOR.services_by_name["Router"].methods_by_name[CALLS[path]]
    recorder.reply = getattr(router_pb2, method.output_type.name)()
    async with client(recorder) as http:
        answer = await http.post(path, content=json.dumps(body))
    assert answer.status_code == (200 if recorder.requests else 400), answer.text
    for request in recorder.requests:
        assert request.SerializeToString() is not None


def test_answer_to_a_route_has_all_fields() -> None:
    response = router_pb2.RouteQueryResponse(
        decode=router_pb2.WorkerTarget(worker_id="a", address="a:1", data_parallel_rank=2),
        prefill=router_pb2.WorkerTarget(worker_id="p", address="p:1"),
        reservation_id="m:r",
        expires_unix_ms=2**45,
        headers={"x-a": "b"},
        fallbacks=[router_pb2.WorkerTarget(worker_id="c", address="c:1")],
        overlap=router_pb2.Overlap(device_blocks=1, host_blocks=2, disk_blocks=3, predicted_blocks=9),
        router_hint=router_pb2.PeerHint(worker_id="b", address="b:1", blocks=7),
        token_ids=b"\1\0\0\0\2\0\0\0",
    )
    assert answer_of(response) == {
        "worker": "a",
        "address": "a:1",
        "rank": 2,
        "prefill": {"worker": "p", "address": "p:1", "rank": 0},
        "reservation": "m:r",
        "expires_unix_ms": 2**45,
        "headers": {"x-a": "b"},
        "fallbacks": [{"worker": "c", "address": "c:1", "rank": 0}],
        "overlap_blocks": 6,
        "tokens_to_compute": 0,
        "waited_ms": 0,
        "session_hit": False,
        "degraded": None,
        "router_hint": {"worker": "b", "address": "b:1", "rank": 0, "blocks": 7},
        "token_ids": [1, 2],
    }
    assert answer_of(router_pb2.RouteQueryResponse())["prefill"] is None
