"""The endpoints of the Messages API."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from services.common import logs
from services.common.errors import SluiceError, invalid
from services.common.observability import telemetry
from services.gateway.apis.anthropic.dialect import VERSIONS, error_event_body
from services.gateway.apis.anthropic.event_encoder import MessageEventEncoder
from services.gateway.apis.anthropic.message import whole
from services.gateway.apis.anthropic.schemas import CountTokensRequest, MessagesRequest, PromptFields
from services.gateway.apis.anthropic.translate import Able, Translated, thinks, translate
from services.gateway.apis.anthropic.validation import check
from services.gateway.apis.common.block_runner import BlockAnswerRunner, Fallback
from services.gateway.http.body import read_json
from services.gateway.http.body_memory import BodyMemory
from services.gateway.http.degradation import mark
from services.gateway.pipeline import session_affinity as sessions
from services.gateway.pipeline.pipeline import Generation
from services.gateway.settings import GatewaySettings

CLIENT_CLOSED_REQUEST = 499
BUDGET_NOT_ENFORCED = "thinking_budget_not_enforced"
REMEMBERED_MODELS = 1024


@dataclass(frozen=True, slots=True)
class Attempt:
    """A message that is about to be made.

    Attributes:
        clipped: less fits into the context than `max_tokens`.
        remarks: fallbacks that are known before anything runs.
    """

    fields: MessagesRequest
    message_id: str
    request_id: str
    translated: Translated
    clipped: bool
    remarks: list[Fallback]

    @property
    def shown(self) -> dict[str, bool]:
        """How it is written."""
        thinking = self.fields.thinking
        omitted = thinking is not None and thinking.display == "omitted"
        return {"clipped": self.clipped, "thinking": thinks(self.fields), "omitted": omitted}


class MessagesEndpoints:
    """Create messages, and count tokens of what would make one.

    Args:
        bodies: memory of all request bodies.
    """

    def __init__(
        self, block_runner: BlockAnswerRunner, settings: GatewaySettings, bodies: BodyMemory | None = None
    ) -> None:
        self._block_runner = block_runner
        self._settings = settings
        self._bodies = bodies
        self._budgets = settings.budgets
        self._switchless: dict[str, None] = {}  # models whose templates know no switch for thinking

    async def messages(self, request: Request) -> Response:
        """Create a message."""
        _check_version(request)
        fields = check(MessagesRequest, await self._body(request), self._budgets)
        message_id = f"msg_{secrets.token_hex(12)}"
        logs.request_id.set(message_id)
        with telemetry.stage(
            "gateway.request", dict(request.headers), model=fields.model, client_request_id=fields.request_id
        ):
            user = fields.metadata.user_id if fields.metadata is not None else None
            sessions.begin(self._settings.session_sources, request.headers, {"user": user})
            attempt = Attempt(
                fields,
                message_id,
                getattr(request.state, "request_id", ""),
                self._translated(fields, message_id),
                False,
                self._remarks(fields),
            )
            while True:
                try:
                    return await self._answer(request, attempt)
                except SluiceError as error:
                    adjusted = await self._adjusted(attempt, error)
                    if adjusted is None:
                        raise
                    attempt = adjusted

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a prompt without answering it."""
        _check_version(request)
        fields = check(CountTokensRequest, await self._body(request), self._budgets)
        with telemetry.stage("gateway.tokenize", parent=dict(request.headers), model=fields.model):
            translated = self._translated(fields, "count")
            try:
                length = await self._length(translated)
            except SluiceError as error:
                if not self._forget_switch(fields.model, error):
                    raise
                length = await self._length(self._translated(fields, "count"))
        return _json({"input_tokens": length})

    async def _body(self, request: Request) -> dict[str, Any]:
        limit = int(self._settings.max_body_mb * (1 << 20))
        return await read_json(request, limit, self._settings.body_timeout_s, self._budgets.values, self._bodies)

    def _translated(self, fields: PromptFields, message_id: str) -> Translated:
        able = Able(self._block_runner.can(fields.model, "guided_json"), self._bounds_thinking(fields.model))
        return translate(fields, message_id, able, self._budgets, fields.model not in self._switchless)

    def _bounds_thinking(self, model: str) -> bool:
        entries = self._block_runner.pipelines.registry.of_model(model)
        return bool(entries) and all("thinking_token_budget" in entry.capabilities for entry in entries)

    def _remarks(self, fields: MessagesRequest) -> list[Fallback]:
        budget = fields.thinking.budget_tokens if fields.thinking is not None else None
        if budget is None or self._bounds_thinking(fields.model):
            return []
        return [Fallback({BUDGET_NOT_ENFORCED})]

    async def _adjusted(self, attempt: Attempt, error: SluiceError) -> Attempt | None:
        """The attempt to make instead, where what went wrong is nothing that the client has to know.

        Raises:
            SluiceError: preprocess says more of it.
        """
        fields = attempt.fields
        if self._forget_switch(fields.model, error):
            return replace(attempt, translated=self._translated(fields, attempt.message_id))
        if error.code != "context_length_exceeded" or error.param != "max_tokens" or attempt.clipped:
            return None
        generation = attempt.translated.generation
        entry = self._block_runner.pipelines.registry.model(fields.model)
        try:
            prompt = await self._block_runner.pipelines.preprocess.tokenize(entry.model, generation.prompt, 0, "", "")
        except SluiceError as failure:  # where the engine makes prompts, preprocess sees this one first here
            rename_fields = attempt.translated.rename_fields
            if self._forget_switch(fields.model, rename_fields(failure)):
                return replace(attempt, translated=self._translated(fields, attempt.message_id))
            raise rename_fields(failure) from None
        room = min(limit for limit in (entry.context_length, prompt.context_length) if limit) - prompt.length
        if room < max(1, generation.stop.min_tokens):
            return None
        clipped = replace(generation, stop=replace(generation.stop, max_tokens=room))
        return replace(attempt, translated=replace(attempt.translated, generation=clipped), clipped=True)

    def _forget_switch(self, model: str, error: SluiceError) -> bool:
        """Whether an error says that the model's template knows no switch for thinking, for the first time."""
        if error.param != "thinking.type" or model in self._switchless:
            return False
        while len(self._switchless) >= REMEMBERED_MODELS:
            del self._switchless[next(iter(self._switchless))]
        self._switchless[model] = None
        return True

    async def _length(self, translated: Translated) -> int:
        pipelines = self._block_runner.pipelines
        entry = pipelines.registry.model(translated.generation.model)
        try:
            return (await pipelines.preprocess.tokenize(entry.model, translated.generation.prompt, 0, "", "")).length
        except SluiceError as error:
            raise translated.rename_fields(error) from None

    async def _answer(self, request: Request, attempt: Attempt) -> Response:
        generation, rename_fields = attempt.translated.generation, attempt.translated.rename_fields
        if attempt.fields.stream:
            encoder = MessageEventEncoder(
                attempt.message_id,
                attempt.fields.model,
                lambda error: error_event_body(error, attempt.request_id),
                **attempt.shown,
            )
            return await self._block_runner.stream(generation, encoder, rename_fields, _unheard, attempt.remarks)
        collected = await self._block_runner.collect(request, generation, rename_fields)
        if collected is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        turn, made = collected
        blocks = turn.transcript.blocks
        message = whole(attempt.message_id, attempt.fields.model, blocks, turn.ended(), turn.counts, **attempt.shown)
        answer = _json(message)
        mark(answer, [made, *attempt.remarks])
        return answer


def _unheard(generation: Generation) -> None:
    pass


def _check_version(request: Request) -> None:
    version = request.headers.get("anthropic-version", VERSIONS[-1])
    if version not in VERSIONS:
        raise invalid(f"anthropic-version: {version[:40]!r} is not a valid version; send {VERSIONS[-1]}.")


def _json(content: dict[str, Any]) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")
