"""The OpenAI endpoints: parse, start the generations, answer whole or as a stream."""

from __future__ import annotations

import secrets
import time
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from services.common import logs, telemetry
from services.gateway.generation import GenerationRequest
from services.gateway.http.body import read_json
from services.gateway.http.event_stream import EventStream, run_unless_gone
from services.gateway.http.pacing import Pacer
from services.gateway.openai.answers import ChatFormat, CompletionFormat, Format
from services.gateway.openai.choices import CollectedChoices, StreamedChoices, Usage
from services.gateway.openai.schemas import ChatCompletionRequest, CompletionRequest, GenerationFields, check
from services.gateway.openai.translate import chat_request, completion_requests
from services.gateway.parity import Parity
from services.gateway.pipeline import Pipeline
from services.gateway.settings import GatewaySettings

CLIENT_CLOSED_REQUEST = 499


class OpenAIEndpoints:
    """Chat completions, completions and models."""

    def __init__(self, pipeline: Pipeline, settings: GatewaySettings, pacer: Pacer, parity: Parity) -> None:
        self._pipeline = pipeline
        self._settings = settings
        self._pacer = pacer
        self._parity = parity

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = await self._body(request)
        fields = check(ChatCompletionRequest, body)
        answer_id = ChatFormat.id_prefix + secrets.token_hex(12)
        generation = chat_request(body, fields, answer_id, self._settings.max_choices)
        form = ChatFormat(answer_id, int(time.time()), fields.model, fields.include_usage)
        return await self._answer(request, [generation], form, fields, echo=False)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = await self._body(request)
        fields = check(CompletionRequest, body)
        answer_id = CompletionFormat.id_prefix + secrets.token_hex(12)
        generations = completion_requests(fields, answer_id, self._settings.max_choices)
        form = CompletionFormat(answer_id, int(time.time()), fields.model, fields.include_usage)
        return await self._answer(request, generations, form, fields, echo=bool(fields.echo))

    async def models(self) -> dict[str, Any]:
        """GET /v1/models."""
        await self._parity.freshen()
        return {
            "object": "list",
            "data": [
                {
                    "id": name,
                    "object": "model",
                    "created": entry.created_unix_s,
                    "owned_by": "sluice",
                    "max_model_len": entry.context_length,
                    "tokenizer": self._parity.of_model(name),
                }
                for name, entry in self._pipeline.catalogue.models.items()
            ],
        }

    async def _body(self, request: Request) -> dict[str, Any]:
        limit = int(self._settings.max_body_mb * (1 << 20))
        return await read_json(request, limit, self._settings.body_timeout_s)

    async def _answer(
        self, request: Request, generations: list[GenerationRequest], form: Format, fields: GenerationFields, echo: bool
    ) -> Response:
        logs.request_id.set(generations[0].request_id)
        answer = self._stream if fields.stream else self._collect
        with telemetry.stage("gateway.request", parent=dict(request.headers), model=fields.model):
            return await answer(request, generations, form, fields, echo)

    async def _stream(
        self, request: Request, generations: list[GenerationRequest], form: Format, fields: GenerationFields, echo: bool
    ) -> Response:
        choices = StreamedChoices(form, sum(one.choices for one in generations), fields.include_usage)
        stream = choices.stream = EventStream(choices, self._pacer, self._settings.max_unsent_kb << 10, {})
        await self._start(generations, choices.sinks, choices.usage, echo)
        _mark_degraded(stream, choices.usage)
        return stream

    async def _collect(
        self, request: Request, generations: list[GenerationRequest], form: Format, fields: GenerationFields, echo: bool
    ) -> Response:
        choices = CollectedChoices(sum(one.choices for one in generations))
        await self._start(generations, choices.sinks, choices.usage, echo)
        try:
            if not await run_unless_gone(request.receive, choices.done, choices.usage.cancel):
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            answer = form.whole(choices.answers(), choices.usage.counts())
        finally:
            choices.cancel()
        response = Response(orjson.dumps(answer), media_type="application/json")
        _mark_degraded(response, choices.usage)
        return response

    async def _start(self, generations: list[GenerationRequest], sinks: Any, usage: Usage, echo: bool) -> None:
        first = 0
        try:
            for one in generations:
                mine = sinks[first : first + one.choices]
                first += one.choices
                if echo:
                    text = await self._pipeline.prompt_text(one)
                    for sink in mine:
                        sink.text(text)
                usage.generations.append(await self._pipeline.start(one, mine))
        except BaseException:
            usage.cancel()
            raise


def _mark_degraded(response: Response, usage: Usage) -> None:
    reasons = {reason for generation in usage.generations for reason in generation.degraded}
    reasons |= {
        reason for generation in usage.generations for stream in generation.streams for reason in stream.degraded
    }
    if reasons:
        response.headers["x-sluice-degraded"] = ",".join(sorted(reasons))
