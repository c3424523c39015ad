"""What clients make of refusals: their own exception for each, and their own retries after the time that was said."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import anthropic
import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from services.gateway.admission.keys import create, write
from tests.support.servers.suite import Suite
from tests.support.waiting import wait_until

WAIT_S = 90
RETRIES = 30
FREE, FREE_RECORD = create("free")
SINGLE, SINGLE_RECORD = create("one at once", concurrency=1)
OTHER, OTHER_RECORD = create("other", models=["something-else"])
POOR, POOR_RECORD = create("poor", tokens_per_minute=40)
OPERATOR, OPERATOR_RECORD = create("operator", scopes=["operate"])
MESSAGES: Any = [{"role": "user", "content": "Hello."}]


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """A gateway that serves one request at once."""
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    write(file, [FREE_RECORD, SINGLE_RECORD, OTHER_RECORD, POOR_RECORD, OPERATOR_RECORD])
    env = {
        "SLUICE_GATEWAY_API_KEYS_FILE": str(file),
        "SLUICE_GATEWAY_MAX_REQUESTS": "1",
        "SLUICE_GATEWAY_MAX_WAITING": "0",
        "SLUICE_GATEWAY_BODY_TIMEOUT_S": "300",
    }
    with Suite("--speedup", "20", "--workers", "1", env=env) as running:
        yield running


def of_openai(suite: Suite, key: str, retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{suite.url}/v1", api_key=key, max_retries=retries, timeout=WAIT_S)


def of_anthropic(suite: Suite, key: str, retries: int = 0) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=suite.url, api_key=key, max_retries=retries, timeout=WAIT_S)


def ask_openai(suite: Suite, key: str, retries: int = 0, **more: Any) -> int:
    """How often the client asked again."""
    with of_openai(suite, key, retries) as client:
        arguments: Any = {"model": "tekken", "messages": MESSAGES, "max_tokens": 3, **more}
        raw = client.chat.completions.with_raw_response.create(**arguments)
        assert raw.parse().choices[0].message.content
        return raw.retries_taken


def ask_responses(suite: Suite, key: str, retries: int = 0, **more: Any) -> int:
    with of_openai(suite, key, retries) as client:
        arguments: Any = {"model": "tekken", "input": "Hello.", "max_output_tokens": 3, **more}
        raw = client.responses.with_raw_response.create(**arguments)
        assert raw.parse().output_text
        return raw.retries_taken


def ask_anthropic(suite: Suite, key: str, retries: int = 0, **more: Any) -> int:
    with of_anthropic(suite, key, retries) as client:
        arguments: Any = {"model": "tekken", "messages": MESSAGES, "max_tokens": 3, **more}
        raw = client.messages.with_raw_response.create(**arguments)
        assert raw.parse().content
        return raw.retries_taken


@contextmanager
def busy(suite: Suite, key: str) -> Iterator[Callable[[], None]]:
    """A request of this key is under way, until the function is called."""
    host, _, port = suite.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), WAIT_S) as held:
        head = f"POST /tokenize HTTP/1.1\r\nhost: localhost\r\nx-api-key: {key}\r\ncontent-length: 100\r\n\r\n"
        held.sendall(head.encode())
        wait_until(lambda: figure(suite, "sluice_gateway_admitted_requests") == 1)
        yield held.close
    wait_until(lambda: figure(suite, "sluice_gateway_admitted_requests") == 0)


def figure(suite: Suite, name: str) -> float:
    text = httpx.get(f"{suite.url}/metrics", headers={"x-api-key": OPERATOR}, timeout=WAIT_S).text
    return sum(float(found) for found in re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


def refused(suite: Suite, reason: str) -> float:
    text = httpx.get(f"{suite.url}/metrics", headers={"x-api-key": OPERATOR}, timeout=WAIT_S).text
    found = re.search(rf'^sluice_gateway_refused_total{{reason="{reason}"}} (\S+)$', text, re.MULTILINE)
    assert found
    return float(found[1])


ASKING = [ask_openai, ask_responses, ask_anthropic]


@pytest.mark.parametrize("ask", ASKING)
@pytest.mark.parametrize(("key", "reason"), [(SINGLE, "concurrency"), (FREE, "queue_full")], ids=["429", "503"])
def test_clients_ask_again_until_they_are_served(suite: Suite, ask: Callable[..., int], key: str, reason: str) -> None:
    before = refused(suite, reason)
    with ThreadPoolExecutor(1) as pool, busy(suite, SINGLE) as let_go:
        asked = pool.submit(ask, suite, key, RETRIES)
        wait_until(lambda: refused(suite, reason) > before)
        let_go()
        assert asked.result(WAIT_S) >= 1


def test_langchain_asks_again(suite: Suite) -> None:
    model = ChatOpenAI(
        model="tekken", base_url=f"{suite.url}/v1", api_key=SecretStr(FREE), max_retries=RETRIES, max_tokens=3
    )
    before = refused(suite, "queue_full")
    with ThreadPoolExecutor(1) as pool, busy(suite, FREE) as let_go:
        asked = pool.submit(model.invoke, "Hello.")
        wait_until(lambda: refused(suite, "queue_full") > before)
        let_go()
        assert asked.result(WAIT_S).content


@pytest.mark.parametrize("ask", ASKING)
def test_refusals_say_when_to_ask_again(suite: Suite, ask: Callable[..., int]) -> None:
    errors: Any = anthropic if ask is ask_anthropic else openai
    with busy(suite, SINGLE):
        with pytest.raises(errors.RateLimitError) as limited:
            ask(suite, SINGLE)
        full_error = errors.ServiceUnavailableError if ask is ask_anthropic else errors.InternalServerError
        with pytest.raises(full_error) as full:
            ask(suite, FREE)
    assert (limited.value.status_code, full.value.status_code) == (429, 503)
    assert int(limited.value.response.headers["retry-after"]) >= 1
    assert int(full.value.response.headers["retry-after"]) >= 1
    with pytest.raises(errors.RateLimitError, match="tokens"):
        ask(suite, POOR, **({"max_output_tokens": 500} if ask is ask_responses else {"max_tokens": 500}))


@pytest.mark.parametrize("ask", ASKING)
def test_every_refusal_is_the_clients_own_exception(suite: Suite, ask: Callable[..., int]) -> None:
    errors: Any = anthropic if ask is ask_anthropic else openai
    cases: list[tuple[str, dict[str, Any], str, int]] = [
        ("sk-wrong", {}, "AuthenticationError", 401),
        (OTHER, {}, "PermissionDeniedError", 403),
        (FREE, {"model": "nope"}, "NotFoundError", 404),
        (FREE, {"extra_body": {"temperature": 99.0}}, "BadRequestError", 400),
        (FREE, {"extra_body": {"nonsense": 1}}, "BadRequestError", 400),
    ]
    for key, wrong, name, status in cases:
        with pytest.raises(getattr(errors, name)) as caught:
            ask(suite, key, **wrong)
        assert caught.value.status_code == status
        assert isinstance(caught.value, errors.APIStatusError)
        assert caught.value.message
        field = next(iter(wrong.get("extra_body", wrong)), "")
        if errors is openai and status in (400, 404):
            assert (caught.value.param, caught.value.type) == (field, "invalid_request_error")
        elif status == 400:
            assert field in caught.value.message


def test_a_request_that_is_too_large_is_not_sent_again(suite: Suite) -> None:
    large: Any = [{"role": "user", "content": "x" * (11 << 20)}]
    with pytest.raises(openai.APIStatusError) as caught:
        ask_openai(suite, FREE, retries=3, messages=large)
    assert (caught.value.status_code, caught.value.code) == (413, "request_too_large")
    with pytest.raises(anthropic.RequestTooLargeError):
        ask_anthropic(suite, FREE, retries=3, messages=large)


def test_embeddings_and_tokens_are_paid_for(suite: Suite) -> None:
    with of_openai(suite, POOR) as client:
        raw = client.embeddings.with_raw_response.create(model="tekken", input="one two three four five")
        used = raw.parse().usage.prompt_tokens
        assert used >= 5
        assert int(raw.headers["x-ratelimit-remaining-tokens"]) <= 40 - used
        with pytest.raises(openai.RateLimitError, match="tokens"):
            client.embeddings.create(model="tekken", input="one two three " * 50)
    texts = {"model": "tekken", "prompt": "one two three " * 50}
    answer = httpx.post(f"{suite.url}/tokenize", json=texts, headers={"x-api-key": POOR}, timeout=WAIT_S)
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "request_over_token_limit"


def test_a_key_sees_the_models_that_it_may_use(suite: Suite) -> None:
    with of_openai(suite, FREE) as client:
        assert [model.id for model in client.models.list()] == ["tekken"]
        assert client.models.retrieve("tekken").id == "tekken"
    with of_openai(suite, OTHER) as client:
        assert [model.id for model in client.models.list()] == []
        with pytest.raises(openai.PermissionDeniedError):
            client.models.retrieve("tekken")
    with of_anthropic(suite, OTHER) as other:
        assert [model.id for model in other.models.list()] == []
    unnamed = httpx.post(f"{suite.url}/tokenize", json={"prompt": "x"}, headers={"x-api-key": OTHER}, timeout=WAIT_S)
    assert unnamed.status_code == 403


def test_an_error_in_a_stream_is_the_clients_own_exception(suite: Suite) -> None:
    """The last test of the module: it takes the only worker away."""
    with of_openai(suite, FREE) as client:
        stream = client.chat.completions.create(
            model="tekken", messages=MESSAGES, max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        for worker in suite.processes("worker"):
            worker.kill()
        with pytest.raises(openai.APIError) as caught:
            for _ in stream:
                pass
    assert caught.value.message
    assert caught.value.type in ("server_error", "service_unavailable_error")
