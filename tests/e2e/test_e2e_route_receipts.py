"""Route receipts: what the router predicted and what the worker delivered, on request, in header and body."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.support.servers.suite import Suite

PROMPT = "The quick brown fox jumps over the lazy dog. " * 40
CHAT = {"model": "tekken", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8}
ASKED = {"x-sluice-receipt": "true"}
HEADER = "x-sluice-route-receipt"


def test_receipt_of_a_repeated_prompt_shows_predicted_and_delivered_tokens(suite: Suite) -> None:
    url = f"{suite.url}/v1/chat/completions"
    first = httpx.post(url, json=CHAT, headers=ASKED, timeout=60)
    (cold,) = json.loads(first.headers[HEADER])
    answer = httpx.post(url, json=CHAT, headers=ASKED, timeout=60)
    (warm,) = json.loads(answer.headers[HEADER])
    assert warm["worker"] == cold["worker"]
    assert warm["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert warm["delivered_cached_tokens"] == answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert warm["available_cached_tokens"] >= warm["predicted_cached_tokens"] > 0
    assert warm["reason"] == "longest_prefix"
    assert answer.json()["choices"][0]["route"] == warm


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "stream": True}),
        ("/v1/completions", {"model": "tekken", "prompt": PROMPT, "max_tokens": 8, "stream": True}),
        ("/v1/messages", {**CHAT, "stream": True}),
        ("/v1/responses", {"model": "tekken", "input": PROMPT, "max_output_tokens": 16, "stream": True}),
    ],
    ids=["chat", "completion", "messages", "responses"],
)
def test_streams_have_the_receipt_in_header_and_last_events(suite: Suite, path: str, body: dict[str, object]) -> None:
    with httpx.stream("POST", f"{suite.url}{path}", json=body, headers=ASKED, timeout=60) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
        (receipt,) = json.loads(answer.headers[HEADER])
    routes = [line for line in lines if '"route":{"worker"' in line]
    assert len(routes) == 1
    assert receipt["worker"] in routes[0]
    assert '"delivered_cached_tokens"' in routes[0]


def test_answer_without_a_request_for_it_has_no_receipt(suite: Suite) -> None:
    answer = httpx.post(f"{suite.url}/v1/chat/completions", json=CHAT, timeout=60)
    assert HEADER not in answer.headers
    assert "route" not in answer.json()["choices"][0]
