"""The endpoints of the Conversations API and their routes."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from services.common.apis.responses.items import read_items
from services.gateway import context
from services.gateway.apis.common.http import BodyReader, Fallback, json_response
from services.gateway.apis.openai.openapi import add_route, responses
from services.gateway.apis.openai.validation import check
from services.gateway.apis.responses.conversations import Conversations, Items, found
from services.gateway.apis.responses.history import StoredItems
from services.gateway.apis.responses.pagination import page
from services.gateway.apis.responses.response_schemas import (
    ConversationAnswer,
    ConversationDeleted,
    ResponseItem,
    ResponseItemList,
)
from services.gateway.apis.responses.routes import PAGE
from services.gateway.apis.responses.schemas import ConversationItems, ConversationRequest, ConversationUpdate
from services.gateway.apis.responses.store import ResponseStore
from services.gateway.core.request import left_out
from services.gateway.settings import GatewaySettings

_ID = {"name": "conversation_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
_ITEM_ID = {"name": "item_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
_FAILURES = (400, 401, 403, 404, 408, 413, 415, 429, 499, 500, 503)


class ConversationEndpoints:
    """Handlers that create, change and delete conversations and their items."""

    def __init__(
        self, settings: GatewaySettings, store: ResponseStore, conversations: Conversations, bodies: BodyReader
    ) -> None:
        self._budgets = settings.budgets
        self._store = store
        self._conversations = conversations
        self._bodies = bodies

    async def create(self, request: Request) -> Response:
        """Create a conversation."""
        body = await self._bodies.read(request, add_model=False)
        fields = check(ConversationRequest, body, self._budgets)
        items, kinds = await self._items(fields.items or [])
        state = await self._conversations.create(_owner(), fields.metadata or {}, items)
        return json_response(state, _marked(kinds))

    async def retrieve(self, request: Request) -> Response:
        """Retrieve a conversation."""
        state, _ = await self._conversations.find(_owner(), request.path_params["conversation_id"])
        return json_response(state)

    async def update(self, request: Request) -> Response:
        """Replace the metadata of a conversation."""
        body = await self._bodies.read(request, add_model=False)
        fields = check(ConversationUpdate, body, self._budgets)
        conversation_id = request.path_params["conversation_id"]
        return json_response(await self._conversations.update(_owner(), conversation_id, fields.metadata or {}))

    async def delete(self, request: Request) -> Response:
        """Delete a conversation with its items."""
        conversation_id = request.path_params["conversation_id"]
        await self._conversations.delete(_owner(), conversation_id)
        return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})

    async def list_items(self, request: Request) -> Response:
        """List the items of a conversation."""
        _, items = await self._conversations.find(_owner(), request.path_params["conversation_id"])
        return json_response(page(items, request.query_params))

    async def create_items(self, request: Request) -> Response:
        """Add items to a conversation."""
        body = await self._bodies.read(request, add_model=False)
        fields = check(ConversationItems, body, self._budgets)
        items, kinds = await self._items(fields.items)
        await self._conversations.add(_owner(), request.path_params["conversation_id"], items)
        return json_response(page(items, {"order": "asc", "limit": "100"}), _marked(kinds))

    async def retrieve_item(self, request: Request) -> Response:
        """Retrieve an item of a conversation."""
        _, items = await self._conversations.find(_owner(), request.path_params["conversation_id"])
        return json_response(found(items, request.path_params["item_id"]))

    async def delete_item(self, request: Request) -> Response:
        """Remove an item from a conversation."""
        names = request.path_params
        return json_response(await self._conversations.remove(_owner(), names["conversation_id"], names["item_id"]))

    async def _items(self, value: list[Any]) -> tuple[Items, list[str]]:
        """Returns the items to store, and the kinds of those that no model here could use."""
        read = read_items(value, self._budgets.list_items, "items")
        resolved = await StoredItems(self._store, _owner()).resolved([], read.items)
        return [item.stored for item in resolved], read.left_out


def add_conversations(app: FastAPI, endpoints: ConversationEndpoints) -> list[type[BaseModel]]:
    """Adds the routes and returns the schemas of their request bodies."""
    add = partial(add_route, app, name="conversations_")
    one, path = responses(ConversationAnswer, _FAILURES), "/v1/conversations"
    add(path, endpoints.create, one, body=ConversationRequest)
    path += "/{conversation_id}"
    add(path, endpoints.retrieve, one, method="GET", parameters=[_ID])
    add(path, endpoints.update, one, body=ConversationUpdate, parameters=[_ID])
    add(path, endpoints.delete, responses(ConversationDeleted, _FAILURES), method="DELETE", parameters=[_ID])
    path += "/items"
    listed = responses(ResponseItemList, _FAILURES)
    add(path, endpoints.list_items, listed, method="GET", parameters=[_ID, *PAGE])
    add(path, endpoints.create_items, listed, body=ConversationItems, parameters=[_ID])
    path += "/{item_id}"
    item = responses(ResponseItem, _FAILURES)
    add(path, endpoints.retrieve_item, item, method="GET", parameters=[_ID, _ITEM_ID])
    add(path, endpoints.delete_item, one, method="DELETE", parameters=[_ID, _ITEM_ID])
    return [ConversationRequest, ConversationUpdate, ConversationItems]


def _owner() -> str:
    return context.current().permit.owner


def _marked(kinds: list[str]) -> list[Fallback]:
    return [Fallback({left_out(kind) for kind in kinds})] if kinds else []
