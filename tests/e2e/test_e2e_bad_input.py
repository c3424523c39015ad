"""Bad input: a 4xx in OpenAI's form that names the field; never a traceback, never a hang."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from sluice import __version__
from tests.support.servers.suite import Suite

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def http(suite: Suite) -> httpx.Client:
    return httpx.Client(base_url=suite.url, timeout=30)


def post(http: httpx.Client, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    return http.post(path, json={"model": "tekken", "max_tokens": 5, **body})


def check(response: httpx.Response, status: int, param: str | None, code: str | None = None) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    assert "Traceback" not in response.text
    assert error["message"]
    return str(error["message"])


def test_unknown_model_lists_the_models(http: httpx.Client) -> None:
    for path, extra in (("/v1/chat/completions", {"messages": USER}), ("/v1/completions", {"prompt": "x"})):
        message = check(post(http, path, **{**extra, "model": "nope"}), 404, "model", "model_not_found")
        assert "tekken" in message


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"null", b'"x"', b'{"model": NaN}', b"\xff\xfe", b'{"a": "\\ud800"}']
)
def test_malformed_bodies(http: httpx.Client, raw: bytes) -> None:
    response = http.post("/v1/chat/completions", content=raw, headers={"content-type": "application/json"})
    check(response, 400, None)


def test_a_prompt_longer_than_the_context(http: httpx.Client) -> None:
    long = [{"role": "user", "content": "word " * 200_000}]
    check(post(http, messages=long), 400, "messages", "context_length_exceeded")
    check(post(http, messages=USER, max_tokens=10_000_000), 400, "max_tokens", "context_length_exceeded")
    check(post(http, "/v1/completions", prompt="word " * 200_000), 400, "prompt", "context_length_exceeded")


def test_a_broken_template(http: httpx.Client) -> None:
    response = post(http, messages=USER, chat_template="{% for x in %}")
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "chat_template"


def test_a_body_over_the_limit(http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", content=b" " * (11 << 20))
    check(response, 413, None, "request_too_large")

    def chunks() -> Any:
        for _ in range(12):
            yield b" " * (1 << 20)

    check(http.post("/v1/chat/completions", content=chunks()), 413, None, "request_too_large")


def test_ranks_are_the_routers_to_choose(http: httpx.Client) -> None:
    message = check(post(http, messages=USER, data_parallel_rank=0), 400, "data_parallel_rank", "unsupported_parameter")
    assert "routing direct" in message


def test_unknown_paths_and_methods(http: httpx.Client) -> None:
    check(http.get("/v1/nothing"), 404, None)
    check(http.get("/v1/chat/completions"), 405, None)


def test_streams_refuse_before_they_start(http: httpx.Client) -> None:
    check(post(http, messages=USER, stream=True, max_tokens=0), 400, "max_tokens")
    check(post(http, messages=USER, stream=True, model="nope"), 404, "model")


def test_root_names_the_service_and_where_to_look(http: httpx.Client) -> None:
    answer = http.get("/")
    assert answer.status_code == 200
    found = answer.json()
    assert (found["service"], found["version"]) == ("sluice-gateway", __version__)
    assert "tekken" not in answer.text
    for name in ("docs", "openapi", "live_view", "ready"):
        assert http.get(found[name], follow_redirects=True).status_code == 200
    assert http.get(f"{found['api']}/models").status_code == 200
    assert http.post("/").status_code == 405


def test_operations_endpoints(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    ready = http.get("/ready")
    assert ready.status_code == 200
    assert ready.json()["workers"] == 2
    assert post(http, messages=USER).status_code == 200
    metrics = http.get("/metrics").text
    assert "sluice_gateway_generations" in metrics
    assert "sluice_gateway_http_requests" in metrics
    document = http.get("/openapi.json").json()
    assert "/v1/chat/completions" in document["paths"]
    assert "ChatCompletionRequest" in json.dumps(document["paths"]["/v1/chat/completions"]["post"]["requestBody"])
    assert "messages" in document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
