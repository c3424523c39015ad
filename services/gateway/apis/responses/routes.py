"""Routes of the Responses API and their OpenAPI documentation."""

from __future__ import annotations

from functools import partial
from typing import Any

from services.gateway.apis.openai.openapi import GENERATING, responses
from services.gateway.apis.parts import ApiParts
from services.gateway.apis.responses.background import BackgroundResponses
from services.gateway.apis.responses.builder import build_store, last_responses
from services.gateway.apis.responses.connection import LastResponse
from services.gateway.apis.responses.conversation_endpoints import ConversationEndpoints
from services.gateway.apis.responses.conversations import Conversations
from services.gateway.apis.responses.operations import ResponseOperations
from services.gateway.apis.responses.response_schemas import (
    CompactedAnswer,
    ConversationAnswer,
    ConversationDeleted,
    InputTokens,
    ResponseAnswer,
    ResponseDeleted,
    ResponseItem,
    ResponseItemList,
)
from services.gateway.apis.responses.schemas import (
    CompactRequest,
    ConversationItems,
    ConversationRequest,
    ConversationUpdate,
    InputTokensRequest,
    ResponsesRequest,
)
from services.gateway.apis.responses.stored_endpoints import StoredResponseEndpoints
from services.gateway.apis.routes import ApiRoutes
from services.gateway.http.socket_turns import MAX_IDLE_S, MAX_LIFETIME_S, SocketLimits, SocketTurns, open_sockets
from services.gateway.settings import GatewaySettings

STORED = "/v1/responses/{response_id}"


def _query(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema}


_ID = {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
_PAGE = [
    _query("limit", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
    _query("order", {"enum": ["asc", "desc"], "default": "desc"}),
    _query("after", {"type": "string"}),
]
_FAILURES = (400, 401, 404, 500, 503)
_CONVERSATION_ID = {
    "name": "conversation_id",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "minLength": 1},
}
_ITEM_ID = {"name": "item_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
_CONVERSATION_FAILURES = (400, 401, 403, 404, 408, 413, 415, 429, 499, 500, 503)
_STREAM = [
    _query("stream", {"type": "boolean", "default": False}),
    _query("starting_after", {"type": "integer", "minimum": 0}),
]


def add_api(parts: ApiParts, routes: ApiRoutes) -> None:
    """Adds the Responses API over HTTP and WebSocket, and the Conversations API."""
    settings = parts.settings
    store = build_store(settings, parts.tasks, parts.pace)
    parts.closers.append(store.close)
    background, conversations = BackgroundResponses(store, settings), Conversations(store)
    operations = ResponseOperations(parts.runner, settings, store, background, conversations)
    _add_operations(routes, operations)
    _add_stored(routes, StoredResponseEndpoints(store, background, routes.transport))
    _add_conversations(routes, ConversationEndpoints(settings, store, conversations, routes.transport.bodies))
    routes.add_socket("/v1/responses", _sockets(settings))


def _sockets(settings: GatewaySettings) -> SocketTurns:
    limits = SocketLimits(MAX_IDLE_S, MAX_LIFETIME_S, settings.body_timeout_s, settings.write_timeout_s)
    store = last_responses(settings)
    return SocketTurns(
        lambda: LastResponse(store), limits, open_sockets(settings.max_connections, settings.api_keys_file is not None)
    )


def _add_operations(routes: ApiRoutes, operations: ResponseOperations) -> None:
    add = partial(routes.add, name="responses_")
    created = responses(ResponseAnswer, GENERATING, streams=True)
    add("/v1/responses", operations.create, created, body=ResponsesRequest)
    counted = responses(InputTokens, GENERATING)
    add("/v1/responses/input_tokens", operations.input_tokens, counted, body=InputTokensRequest)
    compacted = responses(CompactedAnswer, GENERATING)
    # Open Responses requires the model to be named here.
    add("/v1/responses/compact", operations.compact, compacted, body=CompactRequest, adds_model=False)


def _add_stored(routes: ApiRoutes, endpoints: StoredResponseEndpoints) -> None:
    add = partial(routes.add_http, name="responses_")
    retrieved = responses(ResponseAnswer, _FAILURES, streams=True)
    add(STORED, endpoints.retrieve, retrieved, method="GET", parameters=[_ID, *_STREAM])
    add(STORED, endpoints.delete, responses(ResponseDeleted, _FAILURES), method="DELETE", parameters=[_ID])
    listed = responses(ResponseItemList, _FAILURES)
    add(f"{STORED}/input_items", endpoints.input_items, listed, method="GET", parameters=[_ID, *_PAGE])
    cancelled = responses(ResponseAnswer, (*_FAILURES, 429))
    add(f"{STORED}/cancel", endpoints.cancel, cancelled, parameters=[_ID])


def _add_conversations(routes: ApiRoutes, endpoints: ConversationEndpoints) -> None:
    add = partial(routes.add_http, name="conversations_")
    one, path = responses(ConversationAnswer, _CONVERSATION_FAILURES), "/v1/conversations"
    add(path, endpoints.create, one, body=ConversationRequest)
    path += "/{conversation_id}"
    add(path, endpoints.retrieve, one, method="GET", parameters=[_CONVERSATION_ID])
    add(path, endpoints.update, one, body=ConversationUpdate, parameters=[_CONVERSATION_ID])
    add(
        path,
        endpoints.delete,
        responses(ConversationDeleted, _CONVERSATION_FAILURES),
        method="DELETE",
        parameters=[_CONVERSATION_ID],
    )
    path += "/items"
    listed = responses(ResponseItemList, _CONVERSATION_FAILURES)
    add(path, endpoints.list_items, listed, method="GET", parameters=[_CONVERSATION_ID, *_PAGE])
    add(path, endpoints.create_items, listed, body=ConversationItems, parameters=[_CONVERSATION_ID])
    path += "/{item_id}"
    item = responses(ResponseItem, _CONVERSATION_FAILURES)
    add(path, endpoints.retrieve_item, item, method="GET", parameters=[_CONVERSATION_ID, _ITEM_ID])
    add(path, endpoints.delete_item, one, method="DELETE", parameters=[_CONVERSATION_ID, _ITEM_ID])
