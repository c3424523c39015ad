"""The endpoints of the Responses API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from services.common import logs
from services.common.errors import SluiceError, invalid, not_found
from services.common.observability import telemetry
from services.gateway.admission import permit as permits
from services.gateway.apis.common.block_runner import BlockAnswerRunner
from services.gateway.apis.openai.validation import check
from services.gateway.apis.responses.conversation import Conversation, conversation
from services.gateway.apis.responses.event_encoder import ResponseEventEncoder
from services.gateway.apis.responses.items import Item, new_id, read_items
from services.gateway.apis.responses.pagination import page
from services.gateway.apis.responses.resource import Resource, Shown, output_of
from services.gateway.apis.responses.schemas import ContextFields, InputTokensRequest, ResponsesRequest
from services.gateway.apis.responses.store import ResponseStore, StoredResponse
from services.gateway.apis.responses.tools import Tools, read_tools
from services.gateway.apis.responses.translate import Translated, translate
from services.gateway.apis.responses.truncation import fitted
from services.gateway.http.body import read_json
from services.gateway.http.body_memory import BodyMemory
from services.gateway.http.degradation import mark
from services.gateway.pipeline import session_affinity as sessions
from services.gateway.pipeline.pipeline import Generation
from services.gateway.settings import GatewaySettings

CLIENT_CLOSED_REQUEST = 499


@dataclass(frozen=True, slots=True)
class Context:
    """What a response is made from.

    Attributes:
        items: of earlier responses, then the request's own.
    """

    items: list[Item]
    tools: Tools
    chat: Conversation


class ResponsesEndpoints:
    """Create, read, continue and forget responses.

    Args:
        bodies: memory of all request bodies.
    """

    def __init__(
        self,
        block_runner: BlockAnswerRunner,
        settings: GatewaySettings,
        store: ResponseStore,
        bodies: BodyMemory | None = None,
    ) -> None:
        self._block_runner = block_runner
        self._settings = settings
        self._budgets = settings.budgets
        self._store = store
        self._bodies = bodies

    async def create(self, request: Request) -> Response:
        """Create a response."""
        fields = check(ResponsesRequest, await self._body(request), self._budgets)
        owner = permits.current().owner
        context = await self._context(fields, owner)
        response_id = new_id("resp")
        logs.request_id.set(response_id)
        with telemetry.stage(
            "gateway.request", dict(request.headers), model=fields.model, client_request_id=fields.request_id
        ):
            names = {"prompt_cache_key": fields.prompt_cache_key, "user": fields.user}
            sessions.begin(self._settings.session_sources, request.headers, names)
            translated = self._translated(fields, context, response_id)
            if fields.truncation == "auto":
                chat = await fitted(
                    self._block_runner.pipelines,
                    context.chat,
                    fields.max_output_tokens or 1,
                    lambda chat: self._translated(fields, replace(context, chat=chat), response_id).generation,
                )
                translated = self._translated(fields, replace(context, chat=chat), response_id)
            shown = Shown.by(fields, self._block_runner.naming(fields.model) if fields.logprobs is not None else None)

            def keep(response: dict[str, Any]) -> None:
                if fields.store is not False:
                    items = orjson.dumps([item.stored for item in context.items])
                    self._store.keep(owner, response_id, StoredResponse(orjson.dumps(response), items))

            answer = self._stream if fields.stream else self._collect
            return await answer(request, fields, translated, shown, keep)

    async def retrieve(self, request: Request) -> Response:
        """Read a response that was kept."""
        stream = request.query_params.get("stream", "false").lower()
        if stream not in ("true", "1", "false", "0"):
            raise invalid("stream must be true or false.", param="stream", code="invalid_value")
        if stream in ("true", "1"):
            raise invalid(
                "stream is not supported: a response that was kept is read as a whole.",
                param="stream",
                code="unsupported_parameter",
            )
        return Response((await self._kept(request)).response, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """Forget a response."""
        response_id = request.path_params["response_id"]
        if not await self._store.drop(permits.current().owner, response_id):
            raise _unknown(response_id)
        return _json({"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        """List the items that a response was made from, those of earlier responses included."""
        kept = await self._kept(request)
        return _json(page(orjson.loads(kept.items), request.query_params))

    async def cancel(self, request: Request) -> Response:
        """Cancel a response: those of today are over when they are known, so this says why not."""
        await self._kept(request)
        raise invalid("Cannot cancel a synchronous response; close its connection instead.", code="not_cancellable")

    async def input_tokens(self, request: Request) -> Response:
        """Count the tokens of a prompt without answering it."""
        fields = check(InputTokensRequest, await self._body(request), self._budgets)
        context = await self._context(fields, permits.current().owner)
        pipelines = self._block_runner.pipelines
        entry = pipelines.registry.model(fields.model)
        translated = self._translated(fields, context, new_id("resp"))
        with telemetry.stage("gateway.tokenize", parent=dict(request.headers), model=entry.model):
            try:
                prompt = await pipelines.preprocess.tokenize(entry.model, translated.generation.prompt, 0, "", "")
            except SluiceError as error:
                raise translated.field_names.of(error) from None
        return _json({"object": "response.input_tokens", "input_tokens": prompt.length})

    async def _body(self, request: Request) -> dict[str, Any]:
        limit = int(self._settings.max_body_mb * (1 << 20))
        return await read_json(request, limit, self._settings.body_timeout_s, self._budgets.values, self._bodies)

    async def _context(self, fields: ContextFields, owner: str) -> Context:
        tools = read_tools(fields.tools, fields.tool_choice, self._budgets.list_items)
        own = [] if fields.input is None else read_items(fields.input, self._budgets.list_items)
        items = [*await self._earlier(fields.previous_response_id, owner), *own]
        chat = conversation(fields.instructions, items)
        if not chat.messages:
            raise invalid("input is missing.", param="input", code="missing_required_parameter")
        return Context(items, tools, chat)

    async def _earlier(self, response_id: str | None, owner: str) -> list[Item]:
        """What a response that is gone on from was made from, and what it answered."""
        if response_id is None:
            return []
        kept = await self._store.find(owner, response_id)
        if kept is None:
            raise invalid(
                f"Previous response with id {response_id[:80]!r} not found; it may have been forgotten. "
                "Send the conversation as input.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        items = orjson.loads(kept.items) + orjson.loads(kept.response)["output"]
        return [Item(item, "previous_response_id") for item in items]

    def _translated(self, fields: ContextFields, context: Context, response_id: str) -> Translated:
        forces = self._block_runner.can(fields.model, "guided_json")
        return translate(fields, context.chat, context.tools, response_id, self._budgets, forces)

    async def _kept(self, request: Request) -> StoredResponse:
        response_id = request.path_params["response_id"]
        kept = await self._store.find(permits.current().owner, response_id)
        if kept is None:
            raise _unknown(response_id)
        return kept

    async def _stream(
        self,
        request: Request,
        fields: ResponsesRequest,
        translated: Translated,
        shown: Shown,
        keep: Callable[[dict[str, Any]], None],
    ) -> Response:
        made: list[Resource] = []

        def started(generation: Generation) -> None:
            made.append(_resource(fields, translated, generation))

        encoder = ResponseEventEncoder(lambda: made[0], shown, keep)
        return await self._block_runner.stream(translated.generation, encoder, translated.field_names.of, started)

    async def _collect(
        self,
        request: Request,
        fields: ResponsesRequest,
        translated: Translated,
        shown: Shown,
        keep: Callable[[dict[str, Any]], None],
    ) -> Response:
        collected = await self._block_runner.collect(request, translated.generation, translated.field_names.of)
        if collected is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        turn, generation = collected
        items = output_of(turn.transcript.blocks, shown)
        response = _resource(fields, translated, generation).ended(items, turn.ended(), turn.counts)
        keep(response)
        answer = _json(response)
        mark(answer, [generation])
        return answer


def _resource(fields: ResponsesRequest, translated: Translated, generation: Generation) -> Resource:
    defaults = generation.prompt.defaults
    return Resource(translated.generation.request_id, fields, defaults, fields.previous_response_id)


def _unknown(response_id: str) -> SluiceError:
    return not_found(f"Response with id {response_id[:80]!r} not found.", param="response_id")


def _json(content: dict[str, Any]) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")
