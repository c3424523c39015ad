"""Loads of chats: streamed, whole, with reasoning and tool calls, with images, and Anthropic's messages."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.support.clients.chat_answers import Answer as Chat
from tests.support.clients.chat_answers import streamed
from tests.support.clients.image_parts import image_url, user_message
from tests.support.faults.entrances import RequestFailedError, events
from tests.support.faults.load import MODEL, Exchange, Load
from tests.support.faults.outcome import Answer

CHATS = "/v1/chat/completions"
CALLS = (
    "<think>It wants the weather in München 🌦, today and tomorrow.</think>Let me look."
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "München", "days": [1, 2, 3]}}\n</tool_call>'
)
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]


def chat(said: Any, number: int, **more: Any) -> dict[str, Any]:
    """Returns the body of a chat."""
    return {"model": MODEL, "messages": [{"role": "user", "content": said}], "seed": number, **more}


def answer_of(heard: Chat) -> Answer:
    """Returns what a client heard, without what says that something happened on the way."""
    calls = json.dumps(sorted(heard.calls.items()), ensure_ascii=False)
    return Answer((heard.text, heard.reasoning, calls, heard.finish_reason), heard.tokens)


class StreamedChats(Load):
    """Chats in events."""

    name = "chat"
    about = "streamed chats"
    at_once = 4
    distinct = 8

    def body(self, number: int) -> dict[str, Any]:
        """Returns one of the distinct requests."""
        return chat(f"Tell me of number {number}.", number, max_tokens=60 + 20 * number, ignore_eos=True)

    async def ask(self, number: int, exchange: Exchange) -> Answer:
        async def call(client: httpx.AsyncClient) -> Chat:
            return await streamed(client, self.body(number), exchange.heard)

        return answer_of(await self.entrances.at_one("gateways", call, exchange))


class WholeChats(Load):
    """Chats in one piece."""

    name = "whole"
    about = "whole chats"

    async def ask(self, number: int, exchange: Exchange) -> Answer:
        asked = chat(f"What is {number}?", number, max_tokens=40 + 15 * number, ignore_eos=True)
        said = (await self.entrances.http(exchange, "POST", CHATS, json=asked)).json()
        heard = Chat()
        heard.take_choice(said["choices"][0])
        heard.tokens = said["usage"]["completion_tokens"]
        return answer_of(heard)


class ToolCalls(StreamedChats):
    """Chats whose answers think, speak and call a tool."""

    name = "tools"
    about = "streamed tool calls with reasoning"
    at_once = 2
    distinct = 4

    def body(self, number: int) -> dict[str, Any]:
        return chat(f"Number {number}: <<<script: {CALLS}>>>", number, tools=TOOLS)


class Images(StreamedChats):
    """Chats with a picture."""

    name = "images"
    about = "streamed chats with an image"
    at_once = 1
    distinct = 3

    def body(self, number: int) -> dict[str, Any]:
        message = user_message(image_url((number, 90, 200)), {"type": "text", "text": "Describe it."})
        return {**chat("", number, max_tokens=64, ignore_eos=True), "messages": [message]}


class Pairs(StreamedChats):
    """Chats with prompts long enough to be split between a prefill and a decode worker."""

    name = "pairs"
    about = "streamed chats on pairs of prefill and decode workers"

    def body(self, number: int) -> dict[str, Any]:
        said = " ".join(f"Item {number}.{item} is on the list." for item in range(40))
        return chat(said, number, max_tokens=40 + 10 * number, ignore_eos=True)


class Messages(Load):
    """Anthropic's messages in events."""

    name = "messages"
    about = "streamed messages of Anthropic's API"

    async def ask(self, number: int, exchange: Exchange) -> Answer:
        said = [{"role": "user", "content": f"Write of {number}."}]
        asked = {"model": MODEL, "max_tokens": 50 + 10 * number, "messages": said, "stream": True}

        async def call(client: httpx.AsyncClient) -> Answer:
            text, reason, tokens = "", "", -1
            async with events(client, "/v1/messages", asked) as lines:
                async for line in lines:
                    exchange.heard()
                    event = json.loads(line)
                    if event["type"] == "error":
                        raise RequestFailedError(line)
                    text += event.get("delta", {}).get("text", "") if event["type"] == "content_block_delta" else ""
                    if event["type"] == "message_delta":
                        reason, tokens = event["delta"]["stop_reason"], event["usage"]["output_tokens"]
            if not reason:
                raise RequestFailedError("the stream ended before its message")
            return Answer((text, reason), tokens)

        return await self.entrances.at_one("gateways", call, exchange)
