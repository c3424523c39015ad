"""The operations of the Responses API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import orjson

from services.common.apis.responses.conversation import Conversation, conversation, with_instruction
from services.common.apis.responses.items import Input, Item, new_id, read_items
from services.common.apis.responses.tools import NO_TOOLS, ChatTools, read_tools
from services.common.base import logs
from services.common.base.errors import SluiceError, invalid, with_field
from services.common.observability import telemetry
from services.gateway.apis.openai.validation import check
from services.gateway.apis.responses.background import BackgroundResponses
from services.gateway.apis.responses.connection import LastResponse, read_event
from services.gateway.apis.responses.conversations import Conversations
from services.gateway.apis.responses.detached import DetachedGeneration
from services.gateway.apis.responses.event_encoder import ResponseEventEncoder
from services.gateway.apis.responses.history import StoredItems
from services.gateway.apis.responses.resource import OutputOptions, Resource, compacted, output_of
from services.gateway.apis.responses.schemas import (
    CompactRequest,
    ContextFields,
    InputTokensRequest,
    ResponsesRequest,
    WarmUpRequest,
)
from services.gateway.apis.responses.store import ResponseStore, StoredResponse
from services.gateway.apis.responses.translate import translate
from services.gateway.apis.responses.truncation import truncated_to_fit
from services.gateway.core import context
from services.gateway.core.generation import Generation
from services.gateway.core.request import SamplingParams
from services.gateway.operations.media import with_media
from services.gateway.operations.operation import Answer, Caller, Streamed, Whole
from services.gateway.operations.output import ReadyEvents
from services.gateway.operations.runner import AnswerRunner, TranslatedRequest
from services.gateway.pipeline.session_affinity import enter_session
from services.gateway.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class ResponseInput:
    """The conversation and the tools of a response.

    Attributes:
        items: those of earlier responses, then those of the request.
        left_out: kinds of the items that the model does not get.
    """

    items: list[Item]
    tools: ChatTools
    chat: Conversation
    left_out: list[str]


class ResponseOperations:
    """Creates, continues and compacts responses."""

    def __init__(
        self,
        runner: AnswerRunner,
        settings: GatewaySettings,
        store: ResponseStore,
        background: BackgroundResponses,
        conversations: Conversations,
    ) -> None:
        self._conversations = conversations
        self._runner = runner
        self._settings = settings
        self._budgets = settings.budgets
        self._store = store
        self._background = background

    async def create(self, body: dict[str, Any], caller: Caller) -> Answer | None:
        """Create a response."""
        last: LastResponse | None = caller.connection
        generates = last is None or read_event(body)
        fields = check(ResponsesRequest if generates else WarmUpRequest, body, self._budgets)
        try:
            return await self._create(caller, fields, last, generates)
        except SluiceError as error:
            if last is not None:
                last.failed(error)
            raise

    async def _create(
        self, caller: Caller, fields: ResponsesRequest, last: LastResponse | None, generates: bool
    ) -> Answer | None:
        owner = context.current().permit.owner
        response_input = await self._response_input(fields, StoredItems(self._store, owner, last), empty=not generates)
        response_id = new_id("resp")
        logs.request_id.set(response_id)
        with telemetry.stage(
            "gateway.request",
            telemetry.carrier_of_headers(caller.headers),
            model=fields.model,
            client_request_id=fields.request_id,
        ):
            names = {"prompt_cache_key": fields.prompt_cache_key, "user": fields.user}
            enter_session(self._settings.session_sources, caller.headers, names)
            options = OutputOptions.of_request(
                fields,
                response_input.tools.client,
                self._runner.naming(fields.model) if fields.logprobs is not None else None,
            )

            def store(response: dict[str, Any]) -> None:
                self._extend(fields, owner, response_input.items, response)
                items = orjson.dumps([item.stored for item in response_input.items])
                if fields.store is not False:
                    self._store.put(owner, response_id, StoredResponse(orjson.dumps(response), items))
                elif last is not None and response["status"] != "failed":
                    last.put(owner, response_id, StoredResponse(orjson.dumps(response), items))

            if not generates:
                return self._warm_up(fields, response_id, options, store)
            translated = await self._fitting(fields, response_input, response_id)
            if fields.background:
                self._runner.pipelines.registry.model(fields.model)  # an unknown model is not found at once
                items = orjson.dumps([item.stored for item in response_input.items])
                run = self._background.begin(owner, response_id, items)
                ended = partial(self._extend, fields, owner, response_input.items)
                detached = DetachedGeneration(self._background, run, fields, translated, options, ended)
                return detached.answer(self._runner)
            respond = self._stream if fields.stream else self._collect
            return await respond(caller, fields, translated, options, store)

    def _extend(self, fields: ResponsesRequest, owner: str, items: list[Item], response: dict[str, Any]) -> None:
        """Adds the input and the output of a response that succeeded to its conversation, unless `store` is false."""
        if fields.conversation_id and fields.store is not False and response["status"] in ("completed", "incomplete"):
            new = [item.stored for item in items if item.path != "conversation"]
            self._conversations.append(owner, fields.conversation_id, [*new, *response["output"]])

    async def _fitting(
        self, fields: ResponsesRequest, response_input: ResponseInput, response_id: str
    ) -> TranslatedRequest:
        """Returns the chat request, without the oldest turns if the request allows and needs that."""

        async def translated_without(chat: Conversation) -> TranslatedRequest:
            return await self._translated(fields, replace(response_input, chat=chat), response_id)

        translated = await self._translated(fields, response_input, response_id)
        if fields.truncation != "auto":
            return translated
        return await truncated_to_fit(
            self._runner.pipelines,
            response_input.chat,
            translated,
            fields.max_output_tokens or 1,
            translated_without,
        )

    def _warm_up(
        self,
        fields: ResponsesRequest,
        response_id: str,
        options: OutputOptions,
        store: Callable[[dict[str, Any]], None],
    ) -> Streamed:
        """Returns the events of a response without output, which later requests may continue."""
        self._runner.pipelines.registry.model(fields.model)  # raises for an unknown model
        resource = Resource(response_id, fields, SamplingParams(), fields.previous_response_id)
        events = ResponseEventEncoder(lambda: resource, options, store).without_output()
        return Streamed(ReadyEvents(events))

    async def compact(self, body: dict[str, Any], caller: Caller) -> Whole | None:
        """Compact a conversation: its user messages and a summary, which the next request sends as its input."""
        fields = check(CompactRequest, body, self._budgets)
        found = await self._response_input(fields, StoredItems(self._store, context.current().permit.owner))
        chat = conversation(fields.instructions, with_instruction(found.items))
        summarized = ResponseInput(found.items, NO_TOOLS, chat, found.left_out)
        response_id = new_id("resp")
        logs.request_id.set(response_id)
        with telemetry.stage("gateway.request", telemetry.carrier_of_headers(caller.headers), model=fields.model):
            enter_session(self._settings.session_sources, caller.headers, {"prompt_cache_key": fields.prompt_cache_key})
            plain = fields.model_copy(update={"text": None, "tools": None, "tool_choice": None})
            collected = await self._runner.collect(await self._translated(plain, summarized, response_id), caller)
        if collected is None:
            return None
        turn, generation = collected
        turn.result()
        return Whole(compacted(found.items, turn.transcript.blocks, turn.usage.counts()), [generation])

    async def input_tokens(self, body: dict[str, Any], caller: Caller) -> Whole:
        """Count the tokens of a prompt without generating."""
        fields = check(InputTokensRequest, body, self._budgets)
        response_input = await self._response_input(fields, StoredItems(self._store, context.current().permit.owner))
        self._runner.pipelines.registry.model(fields.model)  # an unknown model is the first error
        translated = await self._translated(fields, response_input, new_id("resp"))
        with telemetry.stage(
            "gateway.tokenize", parent=telemetry.carrier_of_headers(caller.headers), model=fields.model
        ):
            length = await self._runner.prompt_length(translated)
        return Whole({"object": "response.input_tokens", "input_tokens": length})

    async def _response_input(self, fields: ContextFields, history: StoredItems, empty: bool = False) -> ResponseInput:
        """Returns what a request continues and adds; raises SluiceError without any message, unless `empty`."""
        tools = read_tools(fields.tools, fields.tool_choice, self._budgets.list_items)
        new = Input([], []) if fields.input is None else read_items(fields.input, self._budgets.list_items)
        earlier = await self._earlier(fields, history)
        items = await history.resolved(earlier, new.items)
        chat = conversation(fields.instructions, items)
        if not chat.messages and not empty:
            raise invalid("input is missing.", param="input", code="missing_required_parameter")
        return ResponseInput(items, tools, chat, new.left_out)

    async def _earlier(self, fields: ContextFields, history: StoredItems) -> list[Item]:
        """Returns the items that a request continues."""
        if fields.conversation_id:
            try:
                _, items = await self._conversations.find(context.current().permit.owner, fields.conversation_id)
            except SluiceError as error:
                raise with_field(error, "conversation", error.message) if error.param else error from None
            return [Item(item, "conversation") for item in items]
        return await history.of_response(fields.previous_response_id) if fields.previous_response_id else []

    async def _translated(
        self, fields: ContextFields, response_input: ResponseInput, response_id: str
    ) -> TranslatedRequest:
        forces_calls = self._runner.pipelines.registry.has_capability(fields.model, "guided_json")
        left_out = [*response_input.tools.left_out, *response_input.left_out]
        chat, tools = response_input.chat, response_input.tools
        return await with_media(
            chat.messages, translate, fields, chat, tools, response_id, self._budgets, forces_calls, left_out
        )

    async def _stream(
        self,
        caller: Caller,
        fields: ResponsesRequest,
        translated: TranslatedRequest,
        options: OutputOptions,
        store: Callable[[dict[str, Any]], None],
    ) -> Streamed:
        resources: list[Resource] = []

        def started(generation: Generation) -> None:
            resources.append(_resource(fields, translated, generation))

        encoder = ResponseEventEncoder(lambda: resources[0], options, store)
        return await self._runner.stream(translated, encoder, caller, started)

    async def _collect(
        self,
        caller: Caller,
        fields: ResponsesRequest,
        translated: TranslatedRequest,
        options: OutputOptions,
        store: Callable[[dict[str, Any]], None],
    ) -> Whole | None:
        collected = await self._runner.collect(translated, caller)
        if collected is None:
            return None
        turn, generation = collected
        items = output_of(turn.transcript.blocks, options, translated.generation.request_id)
        response = _resource(fields, translated, generation).completed(items, turn.result(), turn.usage.counts())
        store(response)
        return Whole(response, [generation])


def _resource(fields: ResponsesRequest, translated: TranslatedRequest, generation: Generation) -> Resource:
    return Resource(translated.generation.request_id, fields, generation.defaults, fields.previous_response_id)
