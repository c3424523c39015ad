"""How long a request may take: headers, shares, and what is refused."""

from __future__ import annotations

import asyncio
from math import inf
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from services.common.errors import ErrorKind, SluiceError
from services.gateway.core import deadlines
from services.gateway.core.deadlines import NO_DEADLINE, Deadline, parse_grpc_timeout, parse_timeout_ms
from services.gateway.http.middleware.deadlines import DeadlineMiddleware


def test_headers_say_seconds() -> None:
    assert parse_timeout_ms("1500") == 1.5
    assert parse_grpc_timeout("1500m") == 1.5
    assert parse_grpc_timeout("2S") == 2
    assert parse_grpc_timeout("1M") == 60
    assert parse_grpc_timeout("1H") == 3600
    assert parse_grpc_timeout("500000u") == 0.5


@pytest.mark.parametrize("value", ["", "0", "-1", "1.5", "soon", "٣", "99999999999", "86400001"])
def test_a_timeout_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(SluiceError) as refused:
        parse_timeout_ms(value)
    assert refused.value.kind is ErrorKind.INVALID_ARGUMENT
    assert refused.value.param == "x-request-timeout-ms"


@pytest.mark.parametrize("value", ["", "5", "0m", "m", "5 m", "123456789m", "99H", "5x"])
def test_a_grpc_timeout_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(SluiceError) as refused:
        parse_grpc_timeout(value)
    assert refused.value.param == "grpc-timeout"


async def test_each_stage_gets_a_share_of_what_is_left() -> None:
    assert NO_DEADLINE.share(0.5, 15) == 15
    deadline = Deadline(asyncio.get_running_loop().time() + 100)
    assert 49 < deadline.share(0.5, 1000) <= 50
    assert deadline.share(0.5, 2) == 2
    with pytest.raises(SluiceError) as late:
        Deadline(asyncio.get_running_loop().time() - 1).share(0.5, 2)
    assert (late.value.kind, late.value.code) == (ErrorKind.DEADLINE_EXCEEDED, "request_timeout")


async def passed(longest_s: float, *headers: tuple[bytes, bytes]) -> tuple[float, int]:
    """Seconds that a request with these headers gets, and the status when it was refused."""
    seen: list[float] = []
    status = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(deadlines.current().left_s)

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
