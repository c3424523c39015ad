"""Ollama's `POST /api/chat` on a Sluice gateway: text, thinking and tools, streamed as lines of JSON or whole.

Source: https://github.com/ollama/ollama/blob/main/docs/api.md
"""

from __future__ import annotations

import secrets
from typing import Any

from sluice.apis import (
    GENERATING,
    Answer,
    AnswerRunner,
    ApiParts,
    ApiRoutes,
    Caller,
    ErrorFormat,
    FieldNameMap,
    Whole,
    check,
    responses,
    translate_chat,
)
from sluice_ollama.answers import LINES, ChatLines, whole_answer
from sluice_ollama.schemas import ChatAnswer, ChatRequest, as_openai

PATH = "/api/chat"
_NAMES = FieldNameMap(
    {
        "max_completion_tokens": "options.num_predict",
        **{name: f"options.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop")},
    }
)


class ChatOperation:
    """Answers a chat."""

    def __init__(self, runner: AnswerRunner, parts: ApiParts) -> None:
        self._runner = runner
        self._parts = parts

    async def chat(self, body: dict[str, Any], caller: Caller) -> Answer | None:
        """Generate the next message of a chat."""
        budgets = self._parts.settings.budgets
        fields = check(ChatRequest, body, budgets)
        request_id = f"ollama-{secrets.token_hex(12)}"
        forces_calls = self._parts.registry.has_capability(fields.model, "guided_json")
        translated = translate_chat(as_openai(fields), _NAMES, request_id, budgets, forces_calls)
        if fields.stream:
            return await self._runner.stream(translated, ChatLines(fields.model), caller, media_type=LINES)
        collected = await self._runner.collect(translated, caller)
        if collected is None:
            return None
        turn, generation = collected
        answer = whole_answer(fields.model, turn.transcript.blocks, turn.result(), turn.usage.counts())
        return Whole(answer, [generation])


def add_api(parts: ApiParts, routes: ApiRoutes) -> None:
    """Adds the route; the entry point of the group `sluice.apis`."""
    operation = ChatOperation(parts.runner, parts)
    answers = responses(ChatAnswer, GENERATING)
    routes.add(PATH, operation.chat, answers, body=ChatRequest, name="ollama_", tag="Ollama")
    routes.error_formats.append(
        ErrorFormat(lambda scope: scope["path"] == PATH, lambda error: {"error": error.message})
    )
