"""Conversations in the store of responses: an object with metadata, and the items of all its turns."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from services.common.apis.responses.items import new_id
from services.common.base.errors import ErrorKind, SluiceError, invalid, not_found
from services.common.base.tasks import TaskOwner
from services.gateway.apis.responses.store import ResponseStore, StoredResponse

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 16
"""Attempts to change a conversation that others change at the same time; then UNAVAILABLE, `conversation_busy`."""

MAX_PENDING_TURNS = 256
"""Turns that wait to be added to conversations; further ones are not added, which is logged."""
MAX_PENDING_TURNS_PER_OWNER = MAX_PENDING_TURNS // 4
"""Turns of one tenant that wait to be added; further ones are not added, which is logged."""

PREFIX = "conv_"

Items = list[dict[str, Any]]


class Conversations:
    """Conversations of all tenants; each can only use its own."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._tasks = TaskOwner()
        self._appending: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._pending: Counter[str] = Counter()  # turns that are being added, by owner

    async def create(self, owner: str, metadata: dict[str, str], items: Items) -> dict[str, Any]:
        """Stores a conversation and returns its object."""
        state = {"id": new_id("conv"), "object": "conversation", "created_at": int(time.time()), "metadata": metadata}
        _check_ids([], items)
        await self._store.swap(owner, str(state["id"]), None, _stored(state, items))
        return state

    async def find(self, owner: str, conversation_id: str) -> tuple[dict[str, Any], Items]:
        """Returns the object and the items; raises SluiceError(NOT_FOUND)."""
        stored = await self._find(owner, conversation_id)
        return await self._store.parsed(stored.response), await self._store.parsed(stored.items)

    async def update(self, owner: str, conversation_id: str, metadata: dict[str, str]) -> dict[str, Any]:
        """Replaces the metadata and returns the object."""
        return await self._change(owner, conversation_id, lambda state, items: ({**state, "metadata": metadata}, items))

    async def add(self, owner: str, conversation_id: str, new: Items) -> None:
        """Adds items; raises SluiceError(INVALID_ARGUMENT) for an id that the conversation has already."""

        def changed(state: dict[str, Any], items: Items) -> tuple[dict[str, Any], Items]:
            _check_ids(items, new)
            return state, [*items, *new]

        await self._change(owner, conversation_id, changed)

    async def remove(self, owner: str, conversation_id: str, item_id: str) -> dict[str, Any]:
        """Removes an item and returns the conversation; raises SluiceError(NOT_FOUND)."""

        def changed(state: dict[str, Any], items: Items) -> tuple[dict[str, Any], Items]:
            found(items, item_id)
            return state, [item for item in items if item["id"] != item_id]

        return await self._change(owner, conversation_id, changed)

    async def delete(self, owner: str, conversation_id: str) -> None:
        """Deletes a conversation; raises SluiceError(NOT_FOUND)."""
        await self._find(owner, conversation_id)
        if not await self._store.delete(owner, conversation_id):
            raise _not_found(conversation_id)

    def append(self, owner: str, conversation_id: str, new: Items) -> None:
        """Adds the items of a turn that ended, except those that the conversation has; does not block.

        Later calls of this gateway about the conversation wait for it.
        """
        if self._tasks.alive >= MAX_PENDING_TURNS or self._pending[owner] >= MAX_PENDING_TURNS_PER_OWNER:
            log.warning("turn not added to its conversation: too many wait", extra={"conversation": conversation_id})
            return
        self._pending[owner] += 1
        before = self._appending.get((owner, conversation_id))
        task = self._tasks.spawn(self._append(owner, conversation_id, new, before), "append-conversation")
        self._appending[owner, conversation_id] = task
        task.add_done_callback(lambda task: self._forget((owner, conversation_id), task))

    async def _append(self, owner: str, conversation_id: str, new: Items, before: asyncio.Task[None] | None) -> None:
        def changed(state: dict[str, Any], items: Items) -> tuple[dict[str, Any], Items]:
            known = {item["id"] for item in items}
            return state, [*items, *(item for item in new if item["id"] not in known)]

        if before is not None:
            await asyncio.wait((before,))
        try:
            await self._change(owner, conversation_id, changed, waits=False)
        except SluiceError as error:  # it was deleted, or exceeds the limits, or the store is unavailable
            log.warning(
                "turn not added to its conversation: %s", error.message, extra={"conversation": conversation_id}
            )

    def _forget(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        self._pending[key[0]] -= 1
        if not self._pending[key[0]]:
            del self._pending[key[0]]
        if self._appending.get(key) is task:
            del self._appending[key]

    async def _appended(self, owner: str, conversation_id: str) -> None:
        task = self._appending.get((owner, conversation_id))
        if task is not None:
            await asyncio.wait((task,))

    async def _find(self, owner: str, conversation_id: str, waits: bool = True) -> StoredResponse:
        if waits:
            await self._appended(owner, conversation_id)
        stored = await self._store.find(owner, conversation_id) if conversation_id.startswith(PREFIX) else None
        if stored is None:
            raise _not_found(conversation_id)
        return stored

    async def _change(
        self,
        owner: str,
        conversation_id: str,
        change: Callable[[dict[str, Any], Items], tuple[dict[str, Any], Items]],
        waits: bool = True,
    ) -> dict[str, Any]:
        """Replaces a conversation, again while others replace it at the same time."""
        for _ in range(MAX_ATTEMPTS):
            stored = await self._find(owner, conversation_id, waits)
            state, items = await self._store.parsed(stored.response), await self._store.parsed(stored.items)
            state, items = change(state, items)
            if await self._store.swap(owner, conversation_id, stored, _stored(state, items)):
                return state
        message = f"The conversation {conversation_id[:80]!r} changes too often; retry."
        raise SluiceError(ErrorKind.UNAVAILABLE, message, code="conversation_busy")


def found(items: Sequence[dict[str, Any]], item_id: str) -> dict[str, Any]:
    """Returns the item with an id; raises SluiceError(NOT_FOUND)."""
    for item in items:
        if item["id"] == item_id:
            return item
    raise not_found(f"Item with id {item_id[:80]!r} not found.", param="item_id")


def _check_ids(items: Items, new: Items) -> None:
    known = {item["id"] for item in items}
    for index, item in enumerate(new):
        if item["id"] in known:
            raise invalid(
                f"items[{index}].id is that of another item of the conversation; leave it out.",
                param=f"items[{index}].id",
                code="invalid_value",
            )
        known.add(item["id"])


def _stored(state: dict[str, Any], items: Items) -> StoredResponse:
    return StoredResponse(orjson.dumps(state), orjson.dumps(items))


def _not_found(conversation_id: str) -> SluiceError:
    return not_found(f"Conversation with id {conversation_id[:80]!r} not found.", param="conversation_id")
