"""Answers of chats as their clients hear them, whole or streamed, to be compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx


class Answer:
    """What a client can tell apart, whether it streamed or not."""

    def __init__(self) -> None:
        self.text = ""
        self.reasoning = ""
        self.calls: dict[int, list[str]] = {}
        self.finish_reason = ""
        self.tokens = 0
        self.logprobs: list[Any] = []
        self.choice: dict[str, Any] = {}

    def take_choice(self, choice: dict[str, Any]) -> None:
        """A choice of a whole answer, or of one event."""
        self.take(choice.get("delta") or choice.get("message") or {})
        self.logprobs += (choice.get("logprobs") or {}).get("content") or ()
        if choice["finish_reason"]:
            self.choice, self.finish_reason = choice, choice["finish_reason"]

    def take(self, delta: dict[str, Any]) -> None:
        self.text += delta.get("content") or ""
        self.reasoning += delta.get("reasoning_content") or ""
        for index, call in enumerate(delta.get("tool_calls") or ()):
            kept = self.calls.setdefault(call.get("index", index), ["", ""])
            kept[0] += call["function"].get("name") or ""
            kept[1] += call["function"].get("arguments") or ""

    @property
    def same(self) -> tuple[object, ...]:
        return self.text, self.reasoning, self.calls, self.finish_reason, self.tokens, self.logprobs


class ObservedStream:
    """What the chunks of a stream come to, as the OpenAI client returns them."""

    def __init__(self, chunks: Any) -> None:
        self.content = self.reasoning = ""
        self.calls: dict[int, dict[str, str]] = {}
        self.argument_chunks = 0
        self.finish_reason = ""
        self.usage: Any = None
        for chunk in chunks:
            self.usage = chunk.usage or self.usage
            for choice in chunk.choices:
                self.finish_reason = choice.finish_reason or self.finish_reason
                self.take(choice.delta)

    def take(self, delta: Any) -> None:
        self.content += delta.content or ""
        thought = getattr(delta, "reasoning_content", None) or ""
        assert thought == (getattr(delta, "reasoning", None) or "")
        self.reasoning += thought
        for call in delta.tool_calls or ():
            known = self.calls.setdefault(call.index, {"id": "", "name": "", "arguments": ""})
            known["id"] += call.id or ""
            known["name"] += call.function.name or ""
            known["arguments"] += call.function.arguments or ""
            self.argument_chunks += bool(call.function.arguments)


def text_of(answer: dict[str, Any]) -> str:
    """The text of a chat's whole answer."""
    return str(answer["choices"][0]["message"]["content"])


def cached_tokens(answer: dict[str, Any]) -> int:
    """The prompt tokens that the engine found in its cache, by the answer's usage."""
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def whole(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    """The answer to a chat in one piece."""
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer, said = Answer(), response.json()
    answer.take_choice(said["choices"][0])
    answer.tokens = said["usage"]["completion_tokens"]
    return answer


async def streamed(client: httpx.AsyncClient, body: dict[str, Any], on_event: Callable[[], None]) -> Answer:
    """The same in events; `on_event` is called after each that says something."""
    answer = Answer()
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/chat/completions", json=asked) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                answer.take_choice(choice)
            if event.get("usage"):
                answer.tokens = event["usage"]["completion_tokens"]
            if answer.text or answer.reasoning:
                on_event()
    return answer
