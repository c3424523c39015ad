"""The suite as `docker compose up` starts it: it serves, scales and heals."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import subprocess
import urllib.error
import urllib.request

import pytest
from PIL import Image

from tests.support.clients.chat_load import ChatLoad
from tests.support.clients.image_parts import described_file
from tests.support.servers.compose_suite import SERVICES, Suite

SCALE = {"preprocess": 2, "router": 2, "postprocess": 2, "worker": 4}

pytestmark = pytest.mark.compose


async def test_suite_with_one_of_each_service_serves(plain: Suite) -> None:
    async with ChatLoad(plain.url) as load:
        await load.more(32)
    assert load.failures == []


def test_image_is_checked_and_described_in_unprivileged_containers(plain: Suite) -> None:
    file = io.BytesIO()
    Image.new("RGB", (64, 48), "#ff0000").save(file, "PNG")
    answers = [_describe(plain, file.getvalue()) for _ in range(2)]
    assert [text.startswith(described_file(file.getvalue())) for text, _ in answers] == [True, True], answers
    assert answers[0][1] == 0 < answers[1][1], answers
    with pytest.raises(urllib.error.HTTPError) as refused:
        _describe(plain, file.getvalue()[:-30])
    assert refused.value.code == 400
    assert json.load(refused.value)["error"]["param"] == "messages[0].content[0]"


def _describe(suite: Suite, file: bytes) -> tuple[str, int]:
    """Text and cached prompt tokens of the answer to a chat with an image."""
    url = "data:image/png;base64," + base64.b64encode(file).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Describe it. " * 20}]
    body = {"model": "tekken", "messages": [{"role": "user", "content": content}], "max_tokens": 64}
    request = urllib.request.Request(
        f"{suite.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["message"]["content"], cached


async def test_scaling_up_and_down_under_load_fails_no_request(plain: Suite) -> None:
    async with ChatLoad(plain.url) as load:
        await load.more(16)
        await asyncio.to_thread(plain.up, SCALE)
        await load.more(64)
        await asyncio.to_thread(plain.up, dict.fromkeys(SCALE, 1))
        await load.more(16)
    assert load.failures == []
    assert [len(plain.containers(name)) for name in SCALE] == [1, 1, 1, 1]


async def test_restart_of_router_and_redis_recovers_without_intervention(plain: Suite) -> None:
    plain.compose("restart", "--timeout", "20", "redis", "router")
    plain.up()
    async with ChatLoad(plain.url) as load:
        await load.more(16)
    assert load.failures == []


def test_redis_requires_a_password_and_is_reachable_by_the_router_only(plain: Suite) -> None:
    (redis,) = plain.containers("redis")
    (router, *_), (worker, *_) = plain.containers("router"), plain.containers("worker")
    assert "NOAUTH" in plain.execute(redis, "redis-cli", "get", "x")
    assert "PONG" in plain.execute(redis, "sh", "/etc/sluice/cli.sh", "ping")
    connect = "import socket; socket.create_connection(('redis', 6379), 5)"
    plain.execute(router, "python", "-c", connect)
    with pytest.raises(AssertionError):  # not even its name is known there
        plain.execute(worker, "python", "-c", connect)


def test_containers_run_unprivileged_on_a_read_only_root(plain: Suite) -> None:
    for service in SERVICES:
        for container in plain.containers(service):
            done = subprocess.run(
                ["docker", "exec", container, "sh", "-c", "id -u; touch /app/x || touch /usr/local/x"],
                capture_output=True,
                text=True,
                timeout=30,
            )
            assert done.stdout == "10001\n"
            assert done.returncode != 0
