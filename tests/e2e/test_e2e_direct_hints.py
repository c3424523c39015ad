"""A direction that cannot be followed is refused in the words of its sender: the header's name, or the body's field."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import pytest

from services.gateway.http.middleware.routing_hints import ENDPOINT, PREFILL, PREFILL_RANK, RANK, SUBSET, WORKER
from tests.support.servers.suite import Suite

BODY = {"model": "tekken", "prompt": "hi", "max_tokens": 1}
HERE = {"x-sluice-worker": "worker-0", "x-sluice-prefill-worker": "prefill-0"}


@pytest.fixture(scope="module")
def direct() -> Iterator[Suite]:
    """A prefill and a decode worker, and a gateway that runs requests where they say."""
    flags = ("--workers", "1", "--prefill-workers", "1", "--routing", "direct", "--no-migration")
    with Suite("--speedup", "1000", *flags) as running:
        yield running


def refused(suite: Suite, status: int, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, str]:
    """The error of a request that is refused; its param is in its message."""
    answer = httpx.post(f"{suite.url}/v1/completions", json={**BODY, **fields}, headers=headers, timeout=60)
    assert answer.status_code == status, answer.text
    error: dict[str, str] = answer.json()["error"]
    assert error["param"] in error["message"], error
    return error


DECODE = {"x-sluice-worker": "worker-0"}
PAIR = {"decode_worker_id": "worker-0"}
HEADERS: list[tuple[Iterable[str], dict[str, str], str, int, str]] = [
    ((*WORKER, ENDPOINT), {}, "gone-1", 503, "worker_not_found"),
    ((*WORKER, ENDPOINT), {}, "prefill-0", 400, "wrong_role"),
    ((*WORKER, ENDPOINT), {}, ",", 400, "no_worker_named"),
    (PREFILL, DECODE, "gone-1", 503, "worker_not_found"),
    (PREFILL, DECODE, "worker-0", 400, "wrong_role"),
    ((*RANK, *PREFILL_RANK), HERE, "x", 400, "invalid_value"),
    ((*RANK, *PREFILL_RANK), HERE, "7", 400, "invalid_value"),
]


@pytest.mark.parametrize(("names", "others", "value", "status", "code"), HEADERS)
def test_header_that_cannot_be_followed_is_named(
    direct: Suite, names: Iterable[str], others: dict[str, str], value: str, status: int, code: str
) -> None:
    for name in names:
        error = refused(direct, status, {**others, name: value})
        assert (error["param"], error["code"]) == (name, code)
        assert value in error["message"] or code != "worker_not_found"


@pytest.mark.parametrize(
    ("headers", "fields", "status", "param", "code"),
    [
        ({}, {"nvext": {"decode_worker_id": "gone-1"}}, 503, "nvext.decode_worker_id", "worker_not_found"),
        ({}, {"nvext": {"backend_instance_id": "gone-1"}}, 503, "nvext.backend_instance_id", "worker_not_found"),
        ({}, {"nvext": {**PAIR, "prefill_worker_id": "gone-1"}}, 503, "nvext.prefill_worker_id", "worker_not_found"),
        ({}, {"nvext": {**PAIR, "prefill_worker_id": "worker-0"}}, 400, "nvext.prefill_worker_id", "wrong_role"),
        (HERE, {"data_parallel_rank": 7}, 400, "data_parallel_rank", "invalid_value"),
        ({}, {}, 400, "x-sluice-worker", "no_worker_named"),
        ({"x-sluice-worker": "gone-1"}, {"model": "gone"}, 404, "model", "model_not_found"),
    ],
)
def test_field_that_cannot_be_followed_is_named(
    direct: Suite, headers: dict[str, str], fields: dict[str, Any], status: int, param: str, code: str
) -> None:
    error = refused(direct, status, headers, **fields)
    assert (error["param"], error["code"]) == (param, code)


def test_header_counts_before_the_field_and_is_named(direct: Suite) -> None:
    error = refused(direct, 503, {"x-dp-rank": "0", "x-sluice-worker": "gone-1"}, nvext={"decode_worker_id": "gone-2"})
    assert error["param"] == "x-sluice-worker"
    assert "gone-2" not in error["message"]


@pytest.mark.parametrize("name", WORKER)
def test_header_of_an_absent_worker_is_named_where_a_router_chooses(suite: Suite, name: str) -> None:
    error = refused(suite, 503, {name: "gone-1"})
    assert (error["param"], error["code"]) == (name, "worker_not_found")


def test_subset_without_a_worker_is_named_where_a_router_chooses(suite: Suite) -> None:
    error = refused(suite, 503, {SUBSET: "10.0.0.1:9"})
    assert (error["param"], error["code"]) == (SUBSET, "no_workers")
    assert refused(suite, 503, nvext={"decode_worker_id": "gone-1"})["param"] == "nvext.decode_worker_id"
