"""Headers that set deadlines and routing hints."""

from __future__ import annotations

import asyncio
from math import inf
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.packing import pack_u32
from services.gateway.apis.openai.schemas import CompletionRequest
from services.gateway.apis.openai.validation import check
from services.gateway.core import context
from services.gateway.core.deadlines import NO_DEADLINE, Deadline, parse_grpc_timeout, parse_timeout_ms
from services.gateway.core.routing_hints import RoutingHints
from services.gateway.http.middleware.deadlines import DeadlineMiddleware
from services.gateway.http.middleware.routing_hints import of_headers
from tests.support.data.bodies import BUDGETS
from tests.support.oracles.errors import raises_error


def test_timeout_headers_parse_to_seconds() -> None:
    assert parse_timeout_ms("1500") == 1.5
    assert parse_grpc_timeout("1500m") == 1.5
    assert parse_grpc_timeout("2S") == 2
    assert parse_grpc_timeout("1M") == 60
    assert parse_grpc_timeout("1H") == 3600
    assert parse_grpc_timeout("500000u") == 0.5


@pytest.mark.parametrize("value", ["", "0", "-1", "1.5", "soon", "٣", "99999999999", "86400001"])
def test_a_timeout_that_is_none_is_refused(value: str) -> None:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="x-request-timeout-ms"):
        parse_timeout_ms(value)


@pytest.mark.parametrize("value", ["", "5", "0m", "m", "5 m", "123456789m", "99H", "5x"])
def test_a_grpc_timeout_that_is_none_is_refused(value: str) -> None:
    with raises_error(param="grpc-timeout"):
        parse_grpc_timeout(value)


async def test_each_stage_gets_a_share_of_what_is_left() -> None:
    assert NO_DEADLINE.share(0.5, 15) == 15
    deadline = Deadline(asyncio.get_running_loop().time() + 100)
    assert 49 < deadline.share(0.5, 1000) <= 50
    assert deadline.share(0.5, 2) == 2
    with raises_error(kind=ErrorKind.DEADLINE_EXCEEDED, code="request_timeout"):
        Deadline(asyncio.get_running_loop().time() - 1).share(0.5, 2)


async def passed(longest_s: float, *headers: tuple[bytes, bytes]) -> tuple[float, int]:
    """Seconds that a request with these headers gets, and the status when it was refused."""
    seen: list[float] = []
    status = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(context.current().deadline.left_s)

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)

    async def receive() -> Any:
        return {"type": "http.request"}

    scope = {"type": "http", "headers": list(headers), "method": "POST", "path": "/"}
    await DeadlineMiddleware(app, longest_s)(scope, receive, send)
    return (seen[0] if seen else -1.0), status


async def test_the_shortest_limit_counts() -> None:
    assert await passed(0) == (inf, 0)
    left_s, _ = await passed(0, (b"x-request-timeout-ms", b"60000"), (b"grpc-timeout", b"40S"))
    assert 30 < left_s <= 40
    left_s, _ = await passed(20, (b"grpc-timeout", b"40S"))
    assert 10 < left_s <= 20
    assert await passed(0, (b"x-request-timeout-ms", b"soon")) == (-1.0, 400)


@pytest.mark.parametrize(
    ("headers", "workers", "prefill"),
    [
        ({"x-sluice-worker": "a, b"}, ("a", "b"), ()),
        ({"x-dynamo-worker-instance-id": "7", "x-dynamo-prefill-instance-id": "8"}, ("7",), ("8",)),
        ({"x-worker-instance-id": "7", "x-prefill-instance-id": "8"}, ("7",), ("8",)),
        ({"x-gateway-destination-endpoint": "1.2.3.4:5,1.2.3.5:5"}, ("1.2.3.4:5", "1.2.3.5:5"), ()),
        ({"x-data-parallel-host-port": "a:5", "x-prefiller-host-port": "b:5"}, ("a:5",), ("b:5",)),
        ({"x-sluice-worker": "a", "x-dynamo-worker-instance-id": "b"}, ("a",), ()),
        ({"x-sluice-worker": "a", "x-gateway-destination-endpoint": "c:1"}, ("a",), ()),
    ],
)  # fmt: skip
def test_every_schedulers_headers(headers: dict[str, str], workers: tuple[str, ...], prefill: tuple[str, ...]) -> None:
    said = of_headers(headers)
    assert (said.answering, said.prefill) == (workers, prefill)


def test_ranks_and_subsets() -> None:
    said = of_headers({"x-dynamo-dp-rank": "3", "x-prefill-dp-rank": "1"})
    assert (said.rank, said.prefill_rank, said.subset) == (3, 1, None)
    assert of_headers({"x-gateway-destination-endpoint-subset": ""}).subset == ()
    assert of_headers({"x-gateway-destination-endpoint-subset": "a:1,b:2"}).subset == ("a:1", "b:2")
    for wrong in ("-1", "x", "99999999", "²"):
        with pytest.raises(SluiceError, match="x-dp-rank"):
            of_headers({"x-dp-rank": wrong})


def test_a_rank_in_the_body_is_that_of_whichever_worker_is_named() -> None:
    for headers, rank in (({"x-sluice-worker": "a"}, 3), ({"x-sluice-worker": "a", "x-data-parallel-rank": "1"}, 1)):
        hints = of_headers(headers).with_rank(3)
        assert (hints.workers, hints.rank) == (("a",), rank)


def test_hints_allow_only_the_named_workers() -> None:
    subset = RoutingHints(subset=("a:1",))
    assert subset.allows("w", "a:1", False)
    assert not subset.allows("w", "b:1", False)
    assert not RoutingHints(subset=()).allows("w", "a:1", False)
    named = RoutingHints(workers=("w",), prefill=("p",))
    assert named.allows("w", "a:1", False)
    assert not named.allows("w", "a:1", True)
    assert named.allows("p", "a:2", True)
    assert RoutingHints(workers=("w",)).allows("any", "a:3", True)
    # A scheduler in front of gateways names the gateway there.
    assert RoutingHints(endpoints=("gateway:8000",)).allows("w", "a:1", False)


def nvext(**fields: object) -> RoutingHints:
    found = check(CompletionRequest, {"model": "m", "prompt": "x", "nvext": fields}, BUDGETS).nvext
    assert found is not None
    return found.hints()


def test_headers_come_before_nvext() -> None:
    body = nvext(backend_instance_id=7, prefill_worker_id="p", token_data=[1, 2], annotations=["query_instance_id:"])
    assert body == RoutingHints(("7",), (), ("p",), token_ids=pack_u32([1, 2]), query_only=True)
    both = of_headers({"x-sluice-worker": "h"}).over(body)
    assert (both.workers, both.prefill, both.token_ids, both.query_only) == (("h",), ("p",), pack_u32([1, 2]), True)
    assert of_headers({"x-gateway-destination-endpoint": "e:1"}).over(body).answering == ("e:1",)
    assert nvext(decode_worker_id="d", backend_instance_id="b").workers == ("d",)


@pytest.mark.parametrize(
    "fields",
    [{"unknown": 1}, {"annotations": ["other"]}, {"token_data": []}, {"token_data": [-1]}, {"decode_worker_id": ""},
     {"backend_instance_id": -1}, {"prefill_worker_id": 1.5}],
)  # fmt: skip
def test_nvext_is_checked(fields: dict[str, object]) -> None:
    with pytest.raises(SluiceError) as refused:
        nvext(**fields)
    assert refused.value.param.startswith("nvext")
