"""What clients hear when something behind the gateway is missing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from services.common.net.ports import free_port
from tests.support.servers.redis_server import RedisServer

CHAT = {"model": "tekken", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@contextlib.asynccontextmanager
async def service(name: str, *flags: str, **env: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"services.{name}", *flags, env={**os.environ, **env}
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait_for(process.wait(), 20)


class Ports:
    """Free ports for a suite put together by hand."""

    def __init__(self) -> None:
        self.gateway, self.preprocess, self.router, self.postprocess, self.worker = (free_port() for _ in range(5))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway}"

    def listen(self, name: str) -> tuple[str, str]:
        return "--listen", f"127.0.0.1:{getattr(self, name)}"

    def gateway_flags(self) -> list[str]:
        flags = list(self.listen("gateway"))
        for name in ("preprocess", "router", "postprocess"):
            flags += [f"--{name}", f"127.0.0.1:{getattr(self, name)}"]
        return flags


async def until_ready(url: str, ready: bool, within_s: float = 120) -> dict[str, object]:
    deadline = asyncio.get_running_loop().time() + within_s
    async with httpx.AsyncClient(timeout=5) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                response = await client.get(f"{url}/ready?workers=0")
                if (response.status_code == 200) == ready:
                    state: dict[str, object] = response.json()
                    return state
            assert asyncio.get_running_loop().time() < deadline, f"/ready of {url} is not {ready}"
            await asyncio.sleep(0.05)


async def test_alone_the_gateway_says_what_is_missing() -> None:
    ports = Ports()
    async with service("gateway", *ports.gateway_flags()):
        state = await until_ready(ports.url, False)
        assert state["services"] == {"preprocess": 0, "router": 0, "postprocess": 0}
        async with httpx.AsyncClient(timeout=20) as client:
            assert (await client.get(f"{ports.url}/health")).status_code == 200
            answer = await client.post(f"{ports.url}/v1/chat/completions", json=CHAT)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1


async def test_without_workers_requests_are_told_to_come_back_and_then_work() -> None:
    ports = Ports()
    async with (
        service("gateway", *ports.gateway_flags()),
        service("preprocess", *ports.listen("preprocess")),
        service("router", *ports.listen("router")),
        service("postprocess", *ports.listen("postprocess")),
        httpx.AsyncClient(timeout=30) as client,
    ):
        state = await until_ready(ports.url, True)
        assert state["workers"] == 0
        for stream in (False, True):
            answer = await client.post(f"{ports.url}/v1/chat/completions", json={**CHAT, "stream": stream})
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "no_workers"
        router = f"127.0.0.1:{ports.router}"
        async with service("worker", *ports.listen("worker"), "--routers", router, "--speedup", "50") as worker:
            await until_status(client, ports.url, 200)
            worker.kill()
            await worker.wait()
            answer = await until_status(client, ports.url, 503)
            assert answer.json()["error"]["code"] == "no_workers"
        # The model is known: it is not a 404 now that its workers are gone.


async def until_status(client: httpx.AsyncClient, url: str, status: int) -> httpx.Response:
    deadline = asyncio.get_running_loop().time() + 120
    while True:
        answer = await client.post(f"{url}/v1/chat/completions", json=CHAT)
        if answer.status_code == status:
            return answer
        assert asyncio.get_running_loop().time() < deadline, answer.text
        await asyncio.sleep(0.05)


async def test_redis_away_at_start_then_there(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    ports = Ports()
    async with (
        service("gateway", *ports.gateway_flags()),
        service("preprocess", *ports.listen("preprocess")),
        service("postprocess", *ports.listen("postprocess")),
        service("router", *ports.listen("router"), SLUICE_ROUTER_REDIS_URL=redis.url) as router,
    ):
        async with httpx.AsyncClient(timeout=5) as client:
            for _ in range(480):
                with contextlib.suppress(httpx.TransportError):
                    response = await client.get(f"{ports.url}/ready")
                    if response.json()["services"]["preprocess"] and response.json()["services"]["postprocess"]:
                        break
                await asyncio.sleep(0.25)
        await asyncio.sleep(1)
        state = await until_ready(ports.url, False)
        assert state["services"] == {"preprocess": 1, "router": 0, "postprocess": 1}
        assert router.returncode is None, "the router keeps trying"
        redis.start()
        try:
            await until_ready(ports.url, True)
        finally:
            redis.stop()
