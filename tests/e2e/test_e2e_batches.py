"""Files and batches with the official client, and with gateways and Redis that are killed in between."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from services.gateway.admission.keys import create, write
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.suite import Suite
from tests.support.waiting import wait_until

WAIT_S = 90
ENDED = ("completed", "failed", "cancelled", "expired")


def lines(number: int, path: str = "/v1/chat/completions", **fields: Any) -> list[dict[str, Any]]:
    return [
        {
            "custom_id": f"request-{index}",
            "method": "POST",
            "url": path,
            "body": {
                "model": "tekken",
                "messages": [{"role": "user", "content": f"Number {index}"}],
                "max_tokens": 4,
                **fields,
            },
        }
        for index in range(number)
    ]


def started(client: openai.OpenAI, requests: list[Any], path: str = "/v1/chat/completions") -> Any:
    text = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in requests)
    file = client.files.create(file=("requests.jsonl", text.encode()), purpose="batch")
    endpoint: Any = path
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"for": "tests"}
    )


def completed(client: openai.OpenAI, batch_id: str) -> int:
    """The lines that have succeeded; 0 while no gateway answers."""
    try:
        counts = client.batches.retrieve(batch_id).request_counts
    except openai.APIError:
        return 0
    assert counts is not None
    return counts.completed


def ended(client: openai.OpenAI, batch_id: str, wait_s: float = WAIT_S) -> Any:
    def found() -> Any:
        try:
            batch = client.batches.retrieve(batch_id)
        except openai.APIError:  # its gateway or Redis is starting again
            return None
        return batch if batch.status in ENDED else None

    return wait_until(found, wait_s)


def results(client: openai.OpenAI, file_id: str | None) -> dict[str | None, dict[str, Any]]:
    if file_id is None:
        return {}
    found = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    by_id = {line["custom_id"]: line for line in found}
    assert len(by_id) == len(found) or None in by_id
    return by_id


def test_batch_of_chats_completes_with_the_official_client(client: openai.OpenAI) -> None:
    batch = started(client, lines(20))
    assert (batch.status, batch.object, batch.request_counts.total) == ("validating", "batch", 0)
    done = ended(client, batch.id)
    assert (done.status, done.error_file_id, done.metadata) == ("completed", None, {"for": "tests"})
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (20, 20, 0)
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at < done.expires_at
    found = results(client, done.output_file_id)
    assert set(found) == {f"request-{index}" for index in range(20)}
    for line in found.values():
        assert line["response"]["status_code"] == 200
        assert line["response"]["body"]["choices"][0]["message"]["content"]
    assert batch.id in [each.id for each in client.batches.list(limit=100)]
    output = client.files.retrieve(done.output_file_id)
    assert (output.purpose, output.object) == ("batch_output", "file")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "tekken", "prompt": "hi", "max_tokens": 2}),
        ("/v1/embeddings", {"model": "tekken", "input": "hi"}),
        ("/v1/responses", {"model": "tekken", "input": "hi", "max_output_tokens": 2}),
    ],
)
def test_other_endpoints_run_in_batches(client: openai.OpenAI, path: str, body: dict[str, Any]) -> None:
    batch = started(client, [{"custom_id": "one", "method": "POST", "url": path, "body": body}], path)
    done = ended(client, batch.id)
    assert (done.status, done.request_counts.completed) == ("completed", 1)
    assert results(client, done.output_file_id)["one"]["response"]["body"]["model"] == "tekken"


def test_broken_lines_are_errors_of_their_own(client: openai.OpenAI) -> None:
    good = lines(2)
    wrong_body = {**lines(3)[2], "body": {"model": "tekken", "messages": "text"}}
    unknown_model = {**lines(4)[3], "body": {"model": "unknown", "messages": [{"role": "user", "content": "hi"}]}}
    other_url = {**lines(5)[4], "url": "/v1/embeddings"}
    batch = started(client, [*good, "{broken", good[0], wrong_body, unknown_model, other_url])
    done = ended(client, batch.id)
    assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 2, 5)
    assert set(results(client, done.output_file_id)) == {"request-0", "request-1"}
    errors = [json.loads(line) for line in client.files.content(done.error_file_id).text.splitlines()]
    errors.sort(key=lambda error: error["id"])
    assert [error["error"] and error["error"]["code"] for error in errors] == [
        "invalid_json_line",
        "duplicate_custom_id",
        None,
        None,
        "invalid_url",
    ]
    assert [error["response"]["status_code"] for error in errors if error["response"]] == [400, 404]
    assert errors[2]["response"]["body"]["error"]["param"] == "messages"


def test_file_without_lines_fails_the_batch(client: openai.OpenAI) -> None:
    done = ended(client, started(client, ["", " "]).id)
    assert (done.status, done.errors.data[0].code) == ("failed", "empty_file")


def test_file_of_more_broken_lines_than_allowed_fails_the_batch_with_some_of_them(client: openai.OpenAI) -> None:
    done = ended(client, started(client, ["{"] * 1_001).id)
    assert (done.status, done.output_file_id, done.error_file_id) == ("failed", None, None)
    first, *rest = done.errors.data
    assert (first.code, first.param) == ("too_many_broken_lines", "input_file_id")
    assert [(error.code, error.line) for error in rest] == [("invalid_json_line", at + 1) for at in range(10)]


def test_deleted_batch_is_gone_with_its_results(suite: Suite, client: openai.OpenAI) -> None:
    batch = started(client, lines(400, max_tokens=200, ignore_eos=True))
    url = f"{suite.url}/v1/batches/{batch.id}"
    refused = httpx.delete(url)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "batch_in_progress")
    wait_until(lambda: completed(client, batch.id))
    client.batches.cancel(batch.id)
    done = ended(client, batch.id)
    assert httpx.delete(url).json() == {"id": batch.id, "object": "batch", "deleted": True}
    for gone in (httpx.get(url), httpx.delete(url), httpx.get(f"{suite.url}/v1/files/{done.output_file_id}")):
        assert gone.status_code == 404
    assert client.files.retrieve(batch.input_file_id).id == batch.input_file_id


def test_cancelled_batch_keeps_the_results_that_it_has(client: openai.OpenAI) -> None:
    batch = started(client, lines(400, max_tokens=200, ignore_eos=True))
    wait_until(lambda: completed(client, batch.id))
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = ended(client, batch.id)
    assert done.status == "cancelled"
    assert 0 < len(results(client, done.output_file_id)) == done.request_counts.completed < 400
    with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
        client.batches.cancel(batch.id)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input_file_id": "file-unknown"}, 404, "input_file_id"),
        ({"endpoint": "/v1/messages"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"input_file_id": 3}, 400, "input_file_id"),
        ({"priority": 1}, 400, "priority"),
    ],
)
def test_wrong_batch_is_refused(suite: Suite, fields: dict[str, Any], status: int, param: str) -> None:
    body = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h", **fields}
    answer = httpx.post(f"{suite.url}/v1/batches", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_wrong_upload_is_refused(suite: Suite, client: openai.OpenAI) -> None:
    url = f"{suite.url}/v1/files"
    for answer, param in (
        (httpx.post(url, json={"purpose": "batch"}), "file"),
        (httpx.post(url, data={"purpose": "batch"}, files={"other": b"x"}), "file"),
        (httpx.post(url, data={"purpose": "vision"}, files={"file": b"x"}), "purpose"),
        (httpx.post(url, files={"file": b"x"}), "purpose"),
    ):
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    with pytest.raises(openai.NotFoundError):
        client.files.content("file-unknown")
    file = client.files.create(file=("x.jsonl", b"{}"), purpose="batch")
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_tenants_neither_see_nor_run_each_others_batches(tmp_path_factory: pytest.TempPathFactory) -> None:
    one, one_record = create("one", models=("tekken",))
    two, two_record = create("two", models=("tekken",))
    three, three_record = create("three", models=("other",))
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    write(keys, [one_record, two_record, three_record])
    with Suite("--workers", "1", "--speedup", "20", env={"SLUICE_GATEWAY_API_KEYS_FILE": str(keys)}) as running:
        first, second = (
            openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0, timeout=60) for key in (one, two)
        )
        batch = started(first, lines(3))
        assert ended(first, batch.id).request_counts.completed == 3
        with pytest.raises(openai.NotFoundError):
            second.batches.retrieve(batch.id)
        with pytest.raises(openai.NotFoundError):
            second.files.content(batch.input_file_id)
        assert list(second.batches.list()) == []
        done = ended(second, started(second, lines(2, model="other")).id)
        assert (done.request_counts.completed, done.request_counts.failed) == (0, 2)
        statuses = {line["response"]["status_code"] for line in results(second, done.error_file_id).values()}
        assert statuses == {403}
        third = openai.OpenAI(base_url=f"{running.url}/v1", api_key=three, max_retries=0)
        with pytest.raises(openai.PermissionDeniedError, match="none of the models"):
            third.files.create(file=("x.jsonl", b"{}"), purpose="batch")


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path, durable=True)
    server.start()
    yield server
    server.stop()


def test_every_line_has_one_result_when_a_gateway_and_redis_are_killed(durable: RedisServer) -> None:
    with Suite("--gateways", "2", "--redis", durable.url, "--restart", "--speedup", "20") as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0, timeout=60)
        batch = started(client, lines(300, max_tokens=40, ignore_eos=True))
        wait_until(lambda: completed(client, batch.id) > 20)
        running.processes("gateway")[0].kill()
        wait_until(lambda: completed(client, batch.id) > 60)
        durable.stop()
        durable.start()
        done = ended(client, batch.id, 180)
        assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 300, 0)
        assert set(results(client, done.output_file_id)) == {f"request-{index}" for index in range(300)}
