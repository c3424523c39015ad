"""Clients that go to another server when theirs is gone, and only then."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import httpx
import pytest

from tests.support.faults.entrances import Attempts, Entrances, RequestFailedError, is_cut

GATEWAYS = ["127.0.0.1:1", "127.0.0.1:2"]


@pytest.mark.parametrize(
    ("error", "cut"),
    [
        (httpx.ConnectError("refused"), True),
        (httpx.ReadTimeout("silent"), True),
        (ConnectionError("closed"), True),
        (RequestFailedError("503 No postprocess replica is ready; try again later."), True),
        (RequestFailedError("503 The preprocess service cannot be reached."), True),
        (AssertionError("{'message': 'The gateway is shutting down; retry the request.'}"), True),
        (TimeoutError("timed out during opening handshake"), True),
        (RequestFailedError("POST /v1/messages: 500 broken"), False),
        (AssertionError("wrong"), False),
    ],
)
def test_only_a_server_that_is_gone_is_cut(error: Exception, cut: bool) -> None:
    assert is_cut(error) is cut


async def asked(retries: tuple[str, ...], failing: set[str], error: Exception) -> tuple[list[str], Attempts]:
    """Asks once, first at the second gateway; returns the gateways that were asked."""
    entrances, attempts, seen = Entrances(GATEWAYS, [], []), Attempts(turn=1), []
    entrances.retries = retries

    async def call(client: Any) -> str:
        seen.append(client.base_url.netloc.decode())
        if seen[-1] in failing:
            raise error
        return "answer"

    try:
        assert await entrances.at_one("gateways", call, attempts) == "answer"
    finally:
        await entrances.close()
    return seen, attempts


async def test_request_whose_gateway_is_gone_is_repeated_at_the_other_one() -> None:
    seen, attempts = await asked(("gateways",), {GATEWAYS[1]}, httpx.ConnectError("refused"))
    assert seen == [GATEWAYS[1], GATEWAYS[0]]
    assert attempts.retried == 1


async def test_request_of_several_calls_stays_at_the_gateway_that_answered() -> None:
    entrances, attempts, seen = Entrances(GATEWAYS, [], []), Attempts(turn=0), []
    entrances.retries = ("gateways",)

    async def call(client: Any) -> None:
        seen.append(client.base_url.netloc.decode())
        if seen[-1] == GATEWAYS[0]:
            raise httpx.ReadTimeout("silent")

    for _ in range(3):
        await entrances.at_one("gateways", call, attempts)
    await entrances.close()
    assert seen == [GATEWAYS[0], *GATEWAYS[1:] * 3]


@pytest.mark.parametrize(
    ("retries", "error"),
    [((), httpx.ConnectError("refused")), (("gateways",), RequestFailedError("500 broken"))],
)
async def test_request_that_fails_otherwise_is_not_repeated(retries: tuple[str, ...], error: Exception) -> None:
    with pytest.raises(type(error)):
        await asked(retries, {GATEWAYS[1]}, error)


async def test_request_that_fails_at_both_gateways_has_failed() -> None:
    with pytest.raises(httpx.ConnectError):
        await asked(("gateways",), set(GATEWAYS), httpx.ConnectError("refused"))


@pytest.mark.parametrize(("retried", "status", "passes"), [(1, 404, True), (0, 404, False), (1, 500, False)])
async def test_deletion_that_was_repeated_may_find_nothing(
    monkeypatch: pytest.MonkeyPatch, retried: int, status: int, passes: bool
) -> None:
    entrances, attempts = Entrances(GATEWAYS, [], []), Attempts()

    async def http(attempts: Attempts, method: str, path: str) -> None:
        attempts.retried += retried
        raise RequestFailedError(f"{method} {path}: {status} gone")

    monkeypatch.setattr(entrances, "http", http)
    try:
        with nullcontext() if passes else pytest.raises(RequestFailedError, match=str(status)):
            await entrances.delete(attempts, "/v1/files/f")
    finally:
        await entrances.close()
