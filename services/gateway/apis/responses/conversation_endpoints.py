"""The endpoints of the Conversations API."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from services.common.apis.responses.items import read_items
from services.gateway.apis.openai.validation import check
from services.gateway.apis.pagination import page
from services.gateway.apis.responses.conversations import Conversations, Items, found
from services.gateway.apis.responses.history import StoredItems
from services.gateway.apis.responses.schemas import ConversationItems, ConversationRequest, ConversationUpdate
from services.gateway.apis.responses.store import ResponseStore
from services.gateway.core import context
from services.gateway.core.request import left_out
from services.gateway.http.json_transport import BodyReader, json_response
from services.gateway.operations.operation import Fallback
from services.gateway.settings import GatewaySettings


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
        body = await self._bodies.read(request)
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
        body = await self._bodies.read(request)
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
        body = await self._bodies.read(request)
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


def _owner() -> str:
    return context.current().permit.owner


def _marked(kinds: list[str]) -> list[Fallback]:
    return [Fallback({left_out(kind) for kind in kinds})] if kinds else []
