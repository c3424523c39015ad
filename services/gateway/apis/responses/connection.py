"""Responses over WebSocket: the client's events, and the last response of a connection, which need not be stored."""

from __future__ import annotations

from typing import Any

from services.common.base.errors import SluiceError, invalid
from services.gateway.apis.responses.store import MemoryStore, StoredResponse

CREATE = "response.create"
_RETRYABLE = (429, 503)


class LastResponse:
    """The last unstored response of a connection, which its next message may continue.

    Args:
        store: bounds the responses of all connections together, by tenant and in total.
    """

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._last = ("", "")  # owner and id
        self._taken: StoredResponse | None = None

    async def take(self, owner: str, response_id: str) -> StoredResponse | None:
        """Removes and returns the response: if its continuation fails, it is gone, as in OpenAI's API."""
        if self._last != (owner, response_id):
            return None
        self._taken = await self._store.find(owner, response_id)
        await self._store.delete(owner, response_id)
        return self._taken

    def put(self, owner: str, response_id: str, stored: StoredResponse) -> None:
        """Keeps a response in place of the last one."""
        self.close()
        self._last = (owner, response_id)
        self._store.put(owner, response_id, stored)

    def failed(self, error: SluiceError) -> None:
        """Restores the response whose continuation was not tried, so that the client can retry."""
        taken, self._taken = self._taken, None
        if taken is not None and error.http_status in _RETRYABLE:
            self._store.put(*self._last, taken)

    def close(self) -> None:
        """See SocketSession."""
        self._store.discard(*self._last)
        self._last, self._taken = ("", ""), None


def read_event(body: dict[str, Any]) -> bool:
    """Turns an event of the client into the request that it contains; returns whether it generates.

    Raises:
        SluiceError: INVALID_ARGUMENT for another event, and for fields without a meaning on a connection.
    """
    kind = body.pop("type", None)
    if kind != CREATE:
        raise invalid(f"type must be {CREATE!r}, the only event that is accepted.", param="type", code="unknown_event")
    if body.pop("stream_id", None) is not None:
        raise _unsupported("stream_id", "open a connection per conversation")
    if body.pop("background", None):
        raise _unsupported("background", "send POST /v1/responses")
    generate = body.pop("generate", None)
    if generate not in (None, True, False):
        raise invalid("generate must be true or false.", param="generate", code="invalid_value")
    if generate is False and body.get("input") == []:
        del body["input"]
    body["stream"] = True
    return generate is not False


def _unsupported(field: str, hint: str) -> SluiceError:
    message = f"{field} is not supported on a WebSocket; {hint}."
    return invalid(message, param=field, code="unsupported_parameter")
