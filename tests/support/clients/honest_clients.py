"""Clients that ask the same questions again and again, and compare every answer with the one they got undisturbed."""

from __future__ import annotations

import asyncio
import json
from types import TracebackType
from typing import NamedTuple, Self

import httpx

WAIT_S = 240


class Answer(NamedTuple):
    """What a client can tell apart; cached tokens change from answer to answer."""

    status: int
    text: str
    finish: str
    completion_tokens: int


class HonestClients:
    """Streams chats until the block ends.

    Args:
        url: of the gateway.
        number: of clients, each with a question of its own.
        tokens: of an answer.
        worker: id of the only worker that may answer; empty: any.

    Attributes:
        answers: finished so far.
        different: answers that were not the undisturbed one, with it.
    """

    def __init__(self, url: str, number: int, tokens: int = 200, model: str = "tekken", worker: str = "") -> None:
        self.answers = 0
        self.different: list[tuple[Answer, Answer]] = []
        self._number = number
        self._tokens = tokens
        self._model = model
        self._stop = False
        self._undisturbed: list[Answer] = []
        self._tasks: list[asyncio.Task[None]] = []
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(
            base_url=url, timeout=WAIT_S, limits=limits, headers={"x-sluice-worker": worker} if worker else {}
        )

    async def __aenter__(self) -> Self:
        self._undisturbed = await asyncio.gather(*(self._ask(client) for client in range(self._number)))
        assert {answer.status for answer in self._undisturbed} == {200}
        self._tasks = [asyncio.create_task(self._keep_asking(client)) for client in range(self._number)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)
        await self._http.aclose()

    def check(self) -> None:
        """Fails when an answer differed from the undisturbed one."""
        assert not self.different, self.different[:3]

    async def _keep_asking(self, client: int) -> None:
        while not self._stop:
            answer = await self._ask(client)
            self.answers += 1
            if answer != self._undisturbed[client]:
                self.different.append((self._undisturbed[client], answer))

    async def _ask(self, client: int) -> Answer:
        body = {
            "model": self._model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": self._tokens,
            "ignore_eos": True,
            "seed": client,
            "messages": [{"role": "user", "content": f"Question {client} of an honest client."}],
        }
        text, finish, tokens = "", "", 0
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                return Answer(response.status_code, (await response.aread()).decode(), "", 0)
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return Answer(200, text + str(event["error"]), "error", tokens)
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    finish = choice["finish_reason"] or finish
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
        return Answer(200, text, finish, tokens)
