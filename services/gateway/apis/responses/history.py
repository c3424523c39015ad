"""The stored items that a request continues or refers to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from services.common.apis.responses.items import Item, response_of
from services.common.base.errors import SluiceError, invalid, not_found
from services.gateway.apis.responses.background import is_response, is_running
from services.gateway.apis.responses.connection import LastResponse
from services.gateway.apis.responses.store import ResponseStore, StoredResponse

MAX_REFERENCED = 32
"""Stored responses that the items of one request may refer to; more are refused with INVALID_ARGUMENT."""


class StoredItems:
    """Reads what one request continues.

    Args:
        owner: the tenant, who can only read its own responses.
        last: the last unstored response of the request's connection; None over HTTP.
    """

    def __init__(self, store: ResponseStore, owner: str, last: LastResponse | None = None) -> None:
        self._store = store
        self._owner = owner
        self._last = last

    async def of_response(self, response_id: str) -> list[Item]:
        """Returns the input and output items of a response; raises SluiceError if it is not stored."""
        stored = await self._last.take(self._owner, response_id) if self._last is not None else None
        if stored is None and is_response(response_id):
            stored = await self._store.find(self._owner, response_id)
        if stored is None:
            raise previous_response_not_found(response_id)
        if is_running(stored):
            raise invalid(
                f"Response {response_id[:80]!r} is in progress; continue it after its end.",
                param="previous_response_id",
                code="response_in_progress",
            )
        return [Item(item, "previous_response_id") for item in await self._all_items(stored)]

    async def resolved(self, earlier: Sequence[Item], new: Sequence[Item]) -> list[Item]:
        """Returns all items, with those that references name in place of the references.

        Raises:
            SluiceError: NOT_FOUND for an item that is neither earlier in the conversation nor stored.
        """
        if not any(map(_is_reference, new)):
            return [*earlier, *new]
        known = {item.stored["id"]: item.stored for item in (*earlier, *new) if not _is_reference(item)}
        await self._read_referenced([item for item in new if _is_reference(item)], known)
        return [*earlier, *(replace(item, stored=_found(item, known)) for item in new)]

    async def _read_referenced(self, references: Sequence[Item], known: dict[str, dict[str, Any]]) -> None:
        """Adds the items of the responses that references name to the known ones."""
        read: set[str] = set()
        for item in references:
            response_id = response_of(item.stored["id"])
            if item.stored["id"] in known or not response_id or response_id in read:
                continue
            if len(read) == MAX_REFERENCED:
                message = (
                    f"The input refers to items of more than {MAX_REFERENCED} responses; use previous_response_id."
                )
                raise invalid(message, param=item.path, code="too_many_references")
            read.add(response_id)
            if (stored := await self._store.find(self._owner, response_id)) is not None:
                known.update((found["id"], found) for found in await self._all_items(stored))

    async def _all_items(self, stored: StoredResponse) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = await self._store.parsed(stored.items)
        items += (await self._store.parsed(stored.response))["output"]
        return items


def previous_response_not_found(response_id: str) -> SluiceError:
    """Returns the error for a response that a request cannot continue."""
    return invalid(
        f"Previous response with id {response_id[:80]!r} not found; it may have expired. "
        "Send the conversation as input.",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def _is_reference(item: Item) -> bool:
    return bool(item.stored["type"] == "item_reference")


def _found(item: Item, known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the item that a reference names, or the item itself."""
    if not _is_reference(item):
        return item.stored
    name = item.stored["id"]
    if name not in known:
        raise not_found(f"{item.path} refers to an item that is not stored: {name[:80]!r}.", param=item.path)
    return known[name]
