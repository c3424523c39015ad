"""A steady load of streamed chats, each of which must be whole."""

from __future__ import annotations

import asyncio
import json
import secrets
from types import TracebackType
from typing import Self

import httpx

PAUSE_S = 0.1
"""Between two chats of a client: a load that is steady, and leaves the machine room to start containers."""


class ChatLoad:
    """Chats until the block ends; then those under way are finished. Nothing is tried twice.

    Args:
        url: of the gateway or what stands before it.
        clients: chats under way at once.

    Attributes:
        finished: whole answers so far.
        failures: what went wrong with the others.
    """

    def __init__(self, url: str, clients: int = 8) -> None:
        self.finished = 0
        self.failures: list[str] = []
        self._url = url
        self._clients = clients
        self._stop = asyncio.Event()
        self._ended = asyncio.Condition()

    async def __aenter__(self) -> Self:
        self._http = httpx.AsyncClient(base_url=self._url, timeout=60)
        models = await self._http.get("/v1/models")
        self._model = models.json()["data"][0]["id"]
        self._tasks = [asyncio.create_task(self._keep_chatting()) for _ in range(self._clients)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)
        await self._http.aclose()

    async def more(self, chats: int, timeout_s: float = 120) -> None:
        """Waits until so many more chats have ended."""
        wanted = self.finished + len(self.failures) + chats
        async with asyncio.timeout(timeout_s), self._ended:
            await self._ended.wait_for(lambda: self.finished + len(self.failures) >= wanted)

    async def _keep_chatting(self) -> None:
        while not self._stop.is_set():
            try:
                await self._chat()
                self.finished += 1
            except (httpx.HTTPError, AssertionError, KeyError, ValueError) as error:
                self.failures.append(repr(error))
            async with self._ended:
                self._ended.notify_all()
            await asyncio.sleep(PAUSE_S)

    async def _chat(self) -> None:
        # Different from the first word on, so that no two prompts share a cached prefix beyond the template.
        prompt = f"{secrets.token_hex(8)} please tell me something about the number {secrets.randbelow(10**6)}"
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 32,
            "stream": True,
        }
        text, finish, done = "", None, False
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200, (await answer.aread()).decode()
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        text += choice["delta"].get("content") or ""
                        finish = choice["finish_reason"] or finish
        assert done, f"cut off after {text!r}"
        assert text
        assert finish in ("stop", "length")
