"""A direction that cannot be followed is refused in the words of its sender: the header's name, or the body's field."""

from __future__ import annotations

from collections.abc import Iterator
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


@pytest.mark.parametrize("name", [*WORKER, ENDPOINT])
def test_header_of_an_absent_worker_is_named(direct: Suite, name: str) -> None:
    error = refused(direct, 503, {name: "gone-1"})
    assert (error["param"], error["code"]) == (name, "worker_not_found")
    assert "gone-1" in error["message"]


@pytest.mark.parametrize("name", PREFILL)
def test_header_of_an_absent_prefill_worker_is_named(direct: Suite, name: str) -> None:
    error = refused(direct, 503, {"x-sluice-worker": "worker-0", name: "gone-1"})
    assert (error["param"], error["code"]) == (name, "worker_not_found")


@pytest.mark.parametrize("name", [*WORKER, ENDPOINT])
def test_header_of_a_worker_that_does_not_answer_is_named(direct: Suite, name: str) -> None:
    error = refused(direct, 400, {name: "prefill-0"})
    assert (error["param"], error["code"]) == (name, "wrong_role")


@pytest.mark.parametrize("name", PREFILL)
def test_header_of_a_worker_that_does_not_prefill_is_named(direct: Suite, name: str) -> None:
    error = refused(direct, 400, {"x-sluice-worker": "worker-0", name: "worker-0"})
    assert (error["param"], error["code"]) == (name, "wrong_role")


@pytest.mark.parametrize("name", [*RANK, *PREFILL_RANK])
@pytest.mark.parametrize("rank", ["x", "7"])
def test_header_of_a_rank_that_is_not_there_is_named(direct: Suite, name: str, rank: str) -> None:
    error = refused(direct, 400, {**HERE, name: rank})
    assert (error["param"], error["code"]) == (name, "invalid_value")


@pytest.mark.parametrize("field", ["decode_worker_id", "backend_instance_id"])
def test_field_of_an_absent_worker_is_named(direct: Suite, field: str) -> None:
    error = refused(direct, 503, nvext={field: "gone-1"})
    assert (error["param"], error["code"]) == (f"nvext.{field}", "worker_not_found")


@pytest.mark.parametrize(
    ("worker", "status", "code"), [("gone-1", 503, "worker_not_found"), ("worker-0", 400, "wrong_role")]
)
def test_field_of_a_prefill_worker_is_named(direct: Suite, worker: str, status: int, code: str) -> None:
    error = refused(direct, status, nvext={"decode_worker_id": "worker-0", "prefill_worker_id": worker})
    assert (error["param"], error["code"]) == ("nvext.prefill_worker_id", code)


def test_field_of_a_rank_that_is_not_there_is_named(direct: Suite) -> None:
    error = refused(direct, 400, HERE, data_parallel_rank=7)
    assert (error["param"], error["code"]) == ("data_parallel_rank", "invalid_value")


@pytest.mark.parametrize("name", [*WORKER, ENDPOINT])
def test_header_without_a_worker_is_named(direct: Suite, name: str) -> None:
    error = refused(direct, 400, {name: ","})
    assert (error["param"], error["code"]) == (name, "no_worker_named")


def test_request_without_a_worker_is_rejected_with_the_usual_header(direct: Suite) -> None:
    error = refused(direct, 400)
    assert (error["param"], error["code"]) == ("x-sluice-worker", "no_worker_named")


def test_unknown_model_is_not_found_whatever_worker_is_named(direct: Suite) -> None:
    error = refused(direct, 404, {"x-sluice-worker": "gone-1"}, model="gone")
    assert (error["param"], error["code"]) == ("model", "model_not_found")


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
