"""Background responses through the client library: polling, cancellation, and streams that are resumed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.support.oracles.open_responses import RESPONSE, event_problems, problems
from tests.support.servers.suite import Suite
from tests.support.waiting import until

LONG: Any = {
    "model": "tekken",
    "input": "Hi.",
    "background": True,
    "max_output_tokens": 50_000,
    "extra_body": {"ignore_eos": True},
}
FINAL = ("completed", "incomplete", "failed", "cancelled")


def events_of(url: str, **query: Any) -> list[dict[str, Any]]:
    with httpx.stream("GET", url, params={"stream": "true", **query}, timeout=60) as response:
        assert response.status_code == 200, response.read()
        return [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]


async def ended(client: openai.OpenAI, response_id: str) -> Any:
    await until(lambda: client.responses.retrieve(response_id).status in FINAL)
    return client.responses.retrieve(response_id)


async def test_a_background_response_is_polled_until_it_is_complete(client: openai.OpenAI) -> None:
    text = "the same words"
    queued = client.responses.create(model="tekken", input=f"Say <<<script: {text}>>>", background=True)
    assert (queued.status, queued.background, queued.output) == ("queued", True, [])
    response = await ended(client, queued.id)
    assert (response.status, response.background, response.output_text) == ("completed", True, text)
    raw = json.loads(client.responses.with_raw_response.retrieve(queued.id).text)
    assert problems(raw, RESPONSE) == []
    following = client.responses.create(model="tekken", input="More.", previous_response_id=queued.id)
    assert following.usage is not None
    assert following.usage.input_tokens > response.usage.total_tokens


async def test_a_background_response_is_cancelled_once_and_again(client: openai.OpenAI) -> None:
    queued = client.responses.create(**LONG)
    with pytest.raises(openai.BadRequestError) as continued:
        client.responses.create(model="tekken", input="More.", previous_response_id=queued.id)
    assert continued.value.code == "response_in_progress"
    for _ in range(2):
        assert client.responses.cancel(queued.id).status == "cancelled"
    assert client.responses.retrieve(queued.id).status == "cancelled"


def test_events_of_a_background_response_are_resumed(suite: Suite, client: openai.OpenAI) -> None:
    body = {"model": "tekken", "input": "Hi.", "background": True, "stream": True, "max_output_tokens": 200}
    seen: list[dict[str, Any]] = []
    with httpx.stream("POST", f"{suite.url}/v1/responses", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                seen.append(json.loads(line[6:]))
            if len(seen) == 5:
                break
    url = f"{suite.url}/v1/responses/{seen[0]['response']['id']}"
    rest = events_of(url, starting_after=4)
    assert event_problems([*seen, *rest]) == []
    assert rest[-1]["response"] == httpx.get(url).json()
    assert events_of(url) == [*seen, *rest]
    assert events_of(url, starting_after=len(seen) + len(rest) - 1) == []


def test_wrong_requests_about_stored_responses_name_their_field(suite: Suite, client: openai.OpenAI) -> None:
    plain = client.responses.create(model="tekken", input="Hi.", max_output_tokens=4)
    url = f"{suite.url}/v1/responses/{plain.id}"
    for query, param in (
        ({"stream": "true"}, "stream"),
        ({"stream": "maybe"}, "stream"),
        ({"starting_after": "1"}, "starting_after"),
        ({"stream": "true", "starting_after": "x"}, "starting_after"),
    ):
        refused = httpx.get(url, params=query)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="unknown", input="Hi.", background=True)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_unknown")


def test_a_deleted_background_response_is_gone(client: openai.OpenAI) -> None:
    queued = client.responses.create(**LONG)
    client.responses.delete(queued.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(queued.id)
