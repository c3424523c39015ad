"""Keys, limits and rude clients over the whole suite, with each of the HTTP servers."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway.admission.keys import create, write
from tests.support.servers.suite import Suite

WAIT_S = 90
STREAMS = 150
FREE, FREE_RECORD = create("free")
TIGHT, TIGHT_RECORD = create("tight", requests_per_minute=2, tokens_per_minute=5000, models=["tekken"])
OTHER, OTHER_RECORD = create("other", models=["something-else"])
OPERATOR, OPERATOR_RECORD = create("operator", scopes=["operate"])


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    write(file, [FREE_RECORD, TIGHT_RECORD, OTHER_RECORD, OPERATOR_RECORD])
    env = {"SLUICE_GATEWAY_API_KEYS_FILE": str(Path(file))}
    with Suite("--workers", "1", "--speedup", "20", env=env) as running:
        yield running


def ask(suite: Suite, key: str | None, path: str = "/v1/chat/completions", **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    messages = [{"role": "user", "content": "Hello."}]
    body = {"model": "tekken", "messages": messages, "max_tokens": 5, **more}
    return httpx.post(suite.url + path, json=body, headers=headers, timeout=WAIT_S)


def test_without_a_valid_key_nothing_is_served(suite: Suite) -> None:
    for key in (None, "sk-wrong", FREE + "x"):
        answer = ask(suite, key)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert httpx.get(f"{suite.url}/v1/models").status_code == 401
    assert httpx.get(f"{suite.url}/v1/models", headers={"x-api-key": FREE}).status_code == 200
    for path in ("/", "/health", "/ready"):
        assert httpx.get(suite.url + path).status_code == 200
    assert httpx.get(f"{suite.url}/metrics").status_code == 401
    anthropic = ask(suite, None, "/v1/messages")
    assert anthropic.status_code == 401
    assert anthropic.json()["error"]["type"] == "authentication_error"


def test_a_model_that_is_not_the_keys(suite: Suite) -> None:
    answer = ask(suite, OTHER)
    assert answer.status_code == 403
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == ("model_not_allowed", "model")


def test_limits_are_said_and_hold(suite: Suite) -> None:
    first = ask(suite, TIGHT)
    assert first.status_code == 200, first.text
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert int(first.headers["x-ratelimit-remaining-tokens"]) < 5000
    too_large = ask(suite, TIGHT, max_tokens=6000)
    assert too_large.status_code == 429
    assert too_large.json()["error"]["code"] == "request_over_token_limit"
    answers = [ask(suite, TIGHT) for _ in range(3)]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused, "at most one came back meanwhile"
    assert refused[0].json()["error"]["code"] == "rate_limit_exceeded"
    assert int(refused[0].headers["retry-after"]) >= 1
    assert ask(suite, FREE).status_code == 200


async def test_rude_clients_disturb_nobody_and_leave_nothing(suite: Suite) -> None:
    host, _, port = suite.url.removeprefix("http://").partition(":")
    over = asyncio.Event()
    rude = [asyncio.create_task(reads_nothing(host, int(port), over)) for _ in range(STREAMS // 10)]
    rude += [asyncio.create_task(leaves(host, int(port), 0.02 * number)) for number in range(STREAMS // 10)]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=suite.url, timeout=WAIT_S, limits=limits) as client:
        answers = await asyncio.gather(*(patient(client) for _ in range(STREAMS * 8 // 10)))
    assert set(answers) == {True}
    over.set()
    await asyncio.gather(*rude)
    async with asyncio.timeout(WAIT_S), httpx.AsyncClient(base_url=suite.url) as client:
        while live((await client.get("/metrics", headers={"x-api-key": OPERATOR})).text):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


def live(metrics: str) -> float:
    found = re.search(r"^sluice_gateway_live_streams(?:\{[^}]*\})? (\S+)$", metrics, re.MULTILINE)
    assert found
    return float(found[1])


BODY = {"model": "tekken", "messages": [{"role": "user", "content": "Go on."}], "stream": True, "ignore_eos": True}


async def patient(client: httpx.AsyncClient) -> bool:
    headers = {"authorization": f"Bearer {FREE}"}
    answer = await client.post("/v1/chat/completions", json={**BODY, "max_tokens": 100}, headers=headers)
    return answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n") and '"error"' not in answer.text


def request(tokens: int) -> bytes:
    body = json.dumps({**BODY, "max_tokens": tokens}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-api-key: {FREE}\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def connected(host: str, port: int, tokens: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await loop.sock_connect(client, (host, port))
    await loop.sock_sendall(client, request(tokens))
    return client


async def reads_nothing(host: str, port: int, until: asyncio.Event) -> None:
    with await connected(host, port, 3000):
        await until.wait()


async def leaves(host: str, port: int, after_s: float) -> None:
    with await connected(host, port, 3000):
        await asyncio.sleep(after_s)
