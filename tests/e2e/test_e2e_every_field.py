"""Every documented field of every endpoint with values that the OpenAPI document does not allow: a 400 that names the
field, in the style of that API. `SLUICE_TEST_EVERY_VALUE=1` tries every wrong value of each field, not only some."""

from __future__ import annotations

import asyncio
import json
import os
from collections import defaultdict
from typing import Any

import httpx
import pytest

from tests.support.data.wrong_values import Document, Path, Wrong
from tests.support.servers.suite import Suite

EACH = 1_000_000 if os.environ.get("SLUICE_TEST_EVERY_VALUE") else 2
AT_ONCE = 16
WAIT_S = 120
USER = [{"role": "user", "content": "hi"}]
MODEL = {"model": "tekken"}
CLASSIFY = "/v1/classify"
VALID: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**MODEL, "messages": USER, "max_tokens": 2}),
    ("/v1/chat/completions/render", {**MODEL, "messages": USER}),
    ("/v1/completions", {**MODEL, "prompt": "hi", "max_tokens": 2}),
    ("/v1/embeddings", {**MODEL, "input": "hi"}),
    ("/v1/score", {**MODEL, "text_1": "hi", "text_2": ["a", "b"]}),
    ("/v1/rerank", {**MODEL, "query": "hi", "documents": ["a", {"text": "b"}]}),
    (CLASSIFY, {**MODEL, "input": "hi"}),
    ("/v1/load_lora_adapter", {**MODEL, "lora_name": "wrong.only"}),
    ("/v1/unload_lora_adapter", {**MODEL, "lora_name": "wrong.only"}),
    ("/inference/v1/generate", {**MODEL, "token_ids": [1], "sampling_params": {"max_tokens": 2}}),
    ("/tokenize", {**MODEL, "prompt": "hi"}),
    ("/tokenize", {**MODEL, "messages": USER}),
    ("/detokenize", {**MODEL, "tokens": [1]}),
    ("/v1/responses", {**MODEL, "input": "hi", "max_output_tokens": 2}),
    ("/v1/responses/input_tokens", {**MODEL, "input": "hi"}),
    ("/v1/responses/compact", {**MODEL, "input": "hi"}),
    ("/v1/conversations", {"metadata": {"a": "b"}}),
    ("/v1/conversations/{conversation_id}", {"metadata": {"a": "b"}}),
    ("/v1/conversations/{conversation_id}/items", {"items": [USER[0]]}),
    ("/v1/messages", {**MODEL, "max_tokens": 2, "messages": USER}),
    ("/v1/messages/count_tokens", {**MODEL, "messages": USER}),
]


@pytest.fixture(scope="module")
def document(suite: Suite) -> dict[str, Any]:
    document: dict[str, Any] = httpx.get(f"{suite.url}/openapi.json").json()
    return document


def anthropic_name(path: Path) -> str:
    """`messages.0.content`."""
    return ".".join(map(str, path))


def openai_name(path: Path) -> str:
    """`input[0].content`; of values that have several forms, such as a stop string or a list of them, the field."""
    while isinstance(path[-1], int):
        path = path[:-1]
    name = str(path[0])
    for part in path[1:]:
        name += f"[{part}]" if isinstance(part, int) else f".{part}"
    return name


def fault(endpoint: str, wrong: Wrong, answer: httpx.Response) -> str:
    """What is not as it should be with an answer to a wrong body; empty when nothing."""
    if answer.status_code != 400:
        return f"{answer.status_code} {answer.text[:200]}"
    error = answer.json()["error"]
    message = error["message"]
    if endpoint.startswith("/v1/messages"):
        named = message.split(":")[0]
        name = anthropic_name
    else:
        named, name = error["param"] or "", openai_name
    places = [name(path) for path in (wrong.path, wrong.among) if path]
    fine = named in places or named.startswith(tuple(f"{place}{more}" for place in places for more in ".["))
    fine = fine and named in message and error["type"] == "invalid_request_error"
    return "" if fine and "\n" not in message else f"names {named!r}: {message}"


def some(wrongs: list[Wrong]) -> list[Wrong]:
    """Of every field what is missing, what is unknown, and two of the values."""
    by_field = defaultdict(list)
    for wrong in wrongs:
        by_field[wrong.path, wrong.what].append(wrong)
    return [one for each in by_field.values() for one in each[:: -(-len(each) // EACH)]]


def test_every_endpoint_with_a_body_is_tried(document: dict[str, Any]) -> None:
    needs_a_file = {"/v1/batches"}  # see test_e2e_batches
    assert set(Document(document).bodies()) - needs_a_file == {endpoint for endpoint, _ in VALID}


@pytest.mark.parametrize(("endpoint", "valid"), VALID, ids=[f"{path}-{min(body)}" for path, body in VALID])
async def test_a_wrong_value_is_refused_and_its_field_named(
    request: pytest.FixtureRequest, document: dict[str, Any], endpoint: str, valid: dict[str, Any]
) -> None:
    suite: Suite = request.getfixturevalue("classifying_suite" if endpoint == CLASSIFY else "suite")
    reader = Document(document)
    without = {"/tokenize": {"prompt", "messages"} - valid.keys()}.get(endpoint, set())
    wrongs = [
        wrong
        for wrong in reader.wrong(reader.bodies()[endpoint], valid)
        if wrong.path[0] not in without and not (endpoint == "/tokenize" and wrong.value is None)
    ]
    assert len({wrong.path for wrong in wrongs}) > len(valid)
    at_once = asyncio.Semaphore(AT_ONCE)

    async with httpx.AsyncClient(base_url=suite.url, timeout=WAIT_S) as client:
        path = endpoint
        if "{conversation_id}" in path:
            path = path.replace("{conversation_id}", (await client.post("/v1/conversations", json={})).json()["id"])
        assert (await client.post(path, json=valid)).status_code == 200

        async def tried(wrong: Wrong) -> str:
            async with at_once:
                answer = await client.post(
                    path, content=json.dumps(wrong.body), headers={"content-type": "application/json"}
                )
            found = fault(endpoint, wrong, answer)
            return f"{openai_name(wrong.path)} {wrong.what} {str(wrong.value)[:40]}: {found}" if found else ""

        faults = [found for found in await asyncio.gather(*map(tried, some(wrongs))) if found]
    assert not faults, f"{len(faults)} of {len(wrongs)}:\n" + "\n".join(faults[:20])


@pytest.mark.parametrize(
    ("path", "query", "headers", "field"),
    [
        ("/v1/responses/{id}/input_items", {"limit": "0"}, {}, "limit"),
        ("/v1/responses/{id}/input_items", {"limit": "101"}, {}, "limit"),
        ("/v1/responses/{id}/input_items", {"limit": "x"}, {}, "limit"),
        ("/v1/responses/{id}/input_items", {"order": "up"}, {}, "order"),
        ("/v1/responses/{id}/input_items", {"after": "unknown"}, {}, "after"),
        ("/v1/responses/{id}", {"stream": "perhaps"}, {}, "stream"),
        ("/v1/responses/{id}", {"stream": "true"}, {}, "stream"),
        ("/v1/models", {"limit": "0"}, {"anthropic-version": "2023-06-01"}, "limit"),
        ("/v1/models", {"limit": "1001"}, {"anthropic-version": "2023-06-01"}, "limit"),
        ("/v1/models", {"after_id": "unknown"}, {"anthropic-version": "2023-06-01"}, "after_id"),
        ("/v1/models", {"before_id": "unknown"}, {"anthropic-version": "2023-06-01"}, "before_id"),
    ],
)
def test_a_wrong_query_is_refused_and_its_parameter_named(
    suite: Suite, path: str, query: dict[str, str], headers: dict[str, str], field: str
) -> None:
    with httpx.Client(base_url=suite.url, timeout=WAIT_S) as client:
        kept = client.post("/v1/responses", json={**MODEL, "input": "hi", "max_output_tokens": 2}).json()["id"]
        answer = client.get(path.format(id=kept), params=query, headers=headers)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["message"].startswith(field)
        assert error["type"] == "invalid_request_error"
        assert headers or error["param"] == field
        version = client.post(
            "/v1/messages",
            json={**MODEL, "max_tokens": 2, "messages": USER},
            headers={"anthropic-version": "1999-01-01"},
        )
        assert version.status_code == 400
        assert version.json()["error"]["message"].startswith("anthropic-version")
