"""A stand-in for a server that offers only an OpenAI-compatible API: it answers with what it was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

MODEL = "server-model"
KEY = "key-of-the-server"
CONTEXT = 4_096
WEATHER = '{"city":"Rome"}'


class FakeOpenAi:
    """Streams `reasoning`, then a tool call if the request has tools, or else `words`.

    Attributes:
        status: of every generation; other than 200, with a message.
        cut_after: chunks after which the connection breaks; None: never.
        pause_s: between two chunks.
        bodies: of all generations.
        closed: generations whose connection the client closed.
        healthy: whether the server lists its models.
        runs: cleared: the server answers nothing and streams nothing, as one that was stopped.
    """

    publisher = None

    def __init__(self, name: str = "one") -> None:
        self.words = ["Hello", " from ", name]
        self.reasoning = ""
        self.status, self.pause_s = 200, 0.0
        self.cut_after: int | None = None
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.closed = 0
        self.healthy = True
        self.runs = asyncio.Event()
        self.runs.set()
        self.app = FastAPI()
        self.app.get("/v1/models")(self._models)
        self.app.post("/v1/chat/completions")(self._generate)
        self.app.post("/v1/completions")(self._generate)

    async def _models(self, request: Request) -> Response:
        await self.runs.wait()
        if not self.healthy:
            return JSONResponse({"error": {"message": "starting"}}, 503)
        card = {"id": MODEL, "object": "model", "owned_by": "fake", "max_model_len": CONTEXT}
        return JSONResponse({"object": "list", "data": [card]})

    async def _generate(self, request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"error": {"message": f"wrong key, not {KEY}", "code": 401}}, 401)
        body = await request.json()
        self.bodies.append(body)
        self.paths.append(request.url.path)
        if self.status != 200:
            return JSONResponse({"error": {"message": "temperature must be below 2"}}, self.status)
        return StreamingResponse(self._stream(body), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        chunks = list(self._chunks(body))
        try:
            for number, chunk in enumerate(chunks):
                if number == self.cut_after:
                    raise ConnectionResetError
                await self.runs.wait()
                yield f"data: {json.dumps(chunk)}\n\n"
                await asyncio.sleep(self.pause_s)
            yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.closed += 1
            raise

    def _chunks(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        if "prompt" in body:
            parts: list[dict[str, Any]] = [{"text": word} for word in self.words]
        else:
            deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
            if self.reasoning:
                deltas.append({"reasoning_content": self.reasoning})
            if body.get("tools"):
                call = {"index": 0, "id": "call_1", "type": "function"}
                deltas.append({"tool_calls": [{**call, "function": {"name": "weather", "arguments": ""}}]})
                deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in WEATHER]
            else:
                deltas += [{"content": word} for word in self.words]
            parts = [{"delta": delta} for delta in deltas]
        parts.append({"delta": {}, "text": "", "finish_reason": "tool_calls" if body.get("tools") else "stop"})
        usage = {"prompt_tokens": 11, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
        chunks: list[dict[str, Any]] = [{"id": "x", "choices": [{"index": 0, **part}]} for part in parts]
        return [*chunks, {"id": "x", "choices": [], "usage": usage}]
