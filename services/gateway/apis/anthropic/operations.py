"""The endpoints of the Messages API."""

from __future__ import annotations

from dataclasses import dataclass, replace
from os import urandom
from typing import Any

from services.common.base import logs
from services.common.base.errors import SluiceError, invalid
from services.common.observability import telemetry
from services.gateway.apis.anthropic.dialect import VERSIONS, error_event_body
from services.gateway.apis.anthropic.event_encoder import MessageEventEncoder
from services.gateway.apis.anthropic.message import full_message
from services.gateway.apis.anthropic.schemas import CountTokensRequest, MessagesRequest, PromptFields, explain
from services.gateway.apis.anthropic.translate import SWITCH, EngineCapabilities, thinks, translate
from services.gateway.apis.openai.validation import check
from services.gateway.operations.media import with_media
from services.gateway.operations.operation import Answer, Caller, Fallback, Whole
from services.gateway.operations.runner import AnswerRunner, TranslatedRequest
from services.gateway.pipeline.session_affinity import enter_session
from services.gateway.settings import GatewaySettings

BUDGET_NOT_ENFORCED = "thinking_budget_not_enforced"
REMEMBERED_MODELS = 1024


@dataclass(frozen=True, slots=True)
class MessageAttempt:
    """A message request and the options it is run with.

    Attributes:
        clipped: `max_tokens` was reduced to fit into the context.
        fallbacks: fallbacks that are known before the generation starts.
    """

    fields: MessagesRequest
    message_id: str
    request_id: str
    translated: TranslatedRequest
    clipped: bool
    fallbacks: list[Fallback]

    @property
    def output_options(self) -> dict[str, bool]:
        """Keyword arguments of the event encoder and of `full_message`."""
        thinking = self.fields.thinking
        omitted = thinking is not None and thinking.display == "omitted"
        return {"clipped": self.clipped, "thinking": thinks(self.fields), "omitted": omitted}


class MessageOperations:
    """Creates messages and counts the tokens of prompts."""

    def __init__(self, runner: AnswerRunner, settings: GatewaySettings) -> None:
        self._runner = runner
        self._settings = settings
        self._budgets = settings.budgets
        self._without_switch: dict[str, None] = {}  # models whose templates have no switch for thinking

    async def messages(self, body: dict[str, Any], caller: Caller) -> Answer | None:
        """Create a message."""
        _check_version(caller)
        fields = check(MessagesRequest, body, self._budgets, explain)
        message_id = f"msg_{urandom(12).hex()}"
        logs.request_id.set(message_id)
        with telemetry.stage(
            "gateway.request",
            telemetry.carrier_of_headers(caller.headers),
            model=fields.model,
            client_request_id=fields.request_id,
        ):
            user = fields.metadata.user_id if fields.metadata is not None else None
            enter_session(self._settings.session_sources, caller.headers, {"user": user})
            attempt = MessageAttempt(
                fields,
                message_id,
                caller.request_id,
                await self._translated(fields, message_id),
                False,
                self._fallbacks(fields),
            )
            while True:
                try:
                    return await self._answer(caller, attempt)
                except SluiceError as error:
                    adjusted = await self._adjusted(attempt, error)
                    if adjusted is None:
                        raise
                    attempt = adjusted

    async def count_tokens(self, body: dict[str, Any], caller: Caller) -> Whole:
        """Count the tokens of a prompt without generating."""
        _check_version(caller)
        fields = check(CountTokensRequest, body, self._budgets, explain)
        with telemetry.stage(
            "gateway.tokenize", parent=telemetry.carrier_of_headers(caller.headers), model=fields.model
        ):
            translated = await self._translated(fields, "count")
            try:
                length = await self._runner.prompt_length(translated)
            except SluiceError as error:
                if not self._forget_switch(fields.model, error):
                    raise
                length = await self._runner.prompt_length(await self._translated(fields, "count"))
        return Whole({"input_tokens": length})

    async def _translated(self, fields: PromptFields, message_id: str) -> TranslatedRequest:
        capabilities = EngineCapabilities(
            self._runner.pipelines.registry.has_capability(fields.model, "guided_json"),
            self._bounds_thinking(fields.model),
        )
        switched = fields.model not in self._without_switch
        return await with_media(fields.messages, translate, fields, message_id, capabilities, self._budgets, switched)

    def _bounds_thinking(self, model: str) -> bool:
        entries = self._runner.pipelines.registry.of_model(model)
        return bool(entries) and all("thinking_token_budget" in entry.capabilities for entry in entries)

    def _fallbacks(self, fields: MessagesRequest) -> list[Fallback]:
        budget = fields.thinking.budget_tokens if fields.thinking is not None else None
        if budget is None or self._bounds_thinking(fields.model):
            return []
        return [Fallback({BUDGET_NOT_ENFORCED})]

    async def _adjusted(self, attempt: MessageAttempt, error: SluiceError) -> MessageAttempt | None:
        """Returns the attempt to retry with, or None if the client has to handle the error.

        Raises:
            SluiceError: preprocess rejects the prompt itself.
        """
        fields = attempt.fields
        if self._forget_switch(fields.model, error):
            return replace(attempt, translated=await self._translated(fields, attempt.message_id))
        if error.code != "context_length_exceeded" or error.param != "max_tokens" or attempt.clipped:
            return None
        generation = attempt.translated.generation
        entry = self._runner.pipelines.registry.model(fields.model)
        try:
            prompt = await self._runner.pipelines.preprocess.tokenize(entry.model, generation.prompt)
        except SluiceError as failure:  # with engine preprocessing, preprocess reads the prompt here for the first time
            rename_fields = attempt.translated.field_names.rename
            if self._forget_switch(fields.model, rename_fields(failure)):
                return replace(attempt, translated=await self._translated(fields, attempt.message_id))
            raise rename_fields(failure) from None
        room = prompt.context_limit(entry.context_length) - prompt.length
        if room < max(1, generation.stop.min_tokens):
            return None
        clipped = replace(generation, stop=replace(generation.stop, max_tokens=room))
        return replace(attempt, translated=replace(attempt.translated, generation=clipped), clipped=True)

    def _forget_switch(self, model: str, error: SluiceError) -> bool:
        """Returns whether the error shows, for the first time, that the model's template has no switch for thinking."""
        if error.param != SWITCH or model in self._without_switch:
            return False
        while len(self._without_switch) >= REMEMBERED_MODELS:
            del self._without_switch[next(iter(self._without_switch))]
        self._without_switch[model] = None
        return True

    async def _answer(self, caller: Caller, attempt: MessageAttempt) -> Answer | None:
        if attempt.fields.stream:
            encoder = MessageEventEncoder(
                attempt.message_id,
                attempt.fields.model,
                lambda error: error_event_body(error, attempt.request_id),
                **attempt.output_options,
            )
            return await self._runner.stream(attempt.translated, encoder, caller, fallbacks=attempt.fallbacks)
        collected = await self._runner.collect(attempt.translated, caller)
        if collected is None:
            return None
        turn, completed = collected
        blocks = turn.transcript.blocks
        message = full_message(
            attempt.message_id,
            attempt.fields.model,
            blocks,
            turn.result(),
            turn.usage.counts(),
            **attempt.output_options,
        )
        return Whole(message, [completed, *attempt.fallbacks])


def _check_version(caller: Caller) -> None:
    version = caller.headers.get("anthropic-version", VERSIONS[-1])
    if version not in VERSIONS:
        raise invalid(f"anthropic-version: {version[:40]!r} is not a supported version; send {VERSIONS[-1]}.")
