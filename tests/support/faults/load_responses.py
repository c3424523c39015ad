"""Loads of the Responses API: streamed, in the background, and over WebSocket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from websockets.asyncio.client import connect

from tests.support.clients.response_socket import LAST
from tests.support.faults.entrances import CONNECT_S, SILENCE_S, RequestFailedError, events
from tests.support.faults.load import MODEL, Exchange, Load
from tests.support.faults.outcome import Answer

RESPONSES = "/v1/responses"
POLL_S = 0.25
ENDED = ("completed", "incomplete", "failed", "cancelled")


def body(words: str, number: int, **more: Any) -> dict[str, Any]:
    """Returns the body of a request for a response."""
    return {"model": MODEL, "input": f"{words} {number}.", "max_output_tokens": 50 + 12 * number, **more}


def answer_of(response: dict[str, Any]) -> Answer:
    """Returns what a response says.

    Raises:
        RequestFailedError: it failed.
    """
    if response["status"] not in ("completed", "incomplete"):
        raise RequestFailedError(f"response {response['status']}: {response.get('error')}")
    texts = [str(part.get("text", "")) for item in response["output"] for part in item.get("content") or () if part]
    return Answer((response["status"], *texts), response["usage"]["output_tokens"])


class StreamedResponses(Load):
    """Responses in events."""

    name = "responses"
    about = "streamed responses"

    async def ask(self, number: int, exchange: Exchange) -> Answer:
        asked = body("Say something of", number, stream=True, store=False)

        async def call(client: httpx.AsyncClient) -> Answer:
            text, last = "", None
            async with events(client, RESPONSES, asked) as lines:
                async for line in lines:
                    exchange.heard()
                    event = json.loads(line) if line.startswith("{") else {"type": ""}
                    if event["type"] == "response.output_text.delta":
                        text += event["delta"]
                    if event["type"] in LAST:
                        last = event
            return _turn(last, text)

        return await self.entrances.at_one("gateways", call, exchange)


def _turn(last: dict[str, Any] | None, text: str) -> Answer:
    """Returns the answer of a turn; its last event and its deltas have to agree."""
    if last is None or "response" not in last:
        raise RequestFailedError(f"the turn ended with {last}")
    answer = answer_of(last["response"])
    return Answer((*answer.parts, text), answer.tokens)


class SocketResponses(Load):
    """Responses over WebSocket, a connection for each."""

    name = "websocket"
    about = "responses over WebSocket"

    async def ask(self, number: int, exchange: Exchange) -> Answer:
        asked = {"type": "response.create", **body("Tell of", number, store=False)}

        async def call(client: httpx.AsyncClient) -> Answer:
            text = ""
            address = str(client.base_url).replace("http", "ws", 1).rstrip("/") + RESPONSES
            options: dict[str, Any] = {"max_size": None, "compression": None, "close_timeout": 2}
            async with connect(
                address,
                ssl=self.entrances.access.context,
                open_timeout=CONNECT_S,
                ping_interval=5,
                ping_timeout=SILENCE_S - 5,
                **options,
            ) as socket:
                await socket.send(json.dumps(asked))
                while (event := json.loads(await socket.recv()))["type"] not in LAST:
                    exchange.heard()
                    text += event["delta"] if event["type"] == "response.output_text.delta" else ""
            return _turn(event, text)

        return await self.entrances.at_one("gateways", call, exchange)


class BackgroundResponses(Load):
    """Responses in the background, asked for until they have ended."""

    name = "background"
    about = "responses in the background"
    distinct = 4

    async def ask(self, number: int, exchange: Exchange) -> Answer:
        http = self.entrances.http
        asked = body("Think of", number, background=True)
        response = (await http(exchange, "POST", RESPONSES, json=asked)).json()
        path = f"{RESPONSES}/{response['id']}"
        try:
            while response["status"] not in ENDED:
                await asyncio.sleep(POLL_S)
                response = (await http(exchange, "GET", path)).json()
            return answer_of(response)
        finally:
            await self.entrances.delete(exchange, path)
