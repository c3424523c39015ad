"""The endpoints of stored responses."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from services.common.base.errors import SluiceError, invalid, not_found
from services.gateway.apis.pagination import page
from services.gateway.apis.responses.background import BackgroundResponses, is_response
from services.gateway.apis.responses.store import ResponseStore, StoredResponse
from services.gateway.core import context
from services.gateway.http.json_transport import HttpTransport, json_response


class StoredResponseEndpoints:
    """Handlers that retrieve, cancel and delete responses."""

    def __init__(self, store: ResponseStore, background: BackgroundResponses, transport: HttpTransport) -> None:
        self._store = store
        self._background = background
        self._transport = transport

    async def retrieve(self, request: Request) -> Response:
        """Retrieve a stored response."""
        stream = request.query_params.get("stream", "false").lower()
        if stream not in ("true", "1", "false", "0"):
            raise invalid("stream must be true or false.", param="stream", code="invalid_value")
        stored = await self._stored(request)
        streams = stream in ("true", "1")
        after = _starting_after(request, streams)
        if not streams:
            return Response(stored.response, media_type="application/json")
        if not (await self._store.parsed(stored.response))["background"]:
            raise invalid(
                "stream is supported only for background responses; set it to false.",
                param="stream",
                code="unsupported_parameter",
            )
        owner, response_id = context.current().permit.owner, request.path_params["response_id"]
        return self._transport.response(self._background.stream(owner, response_id, after + 1))

    async def delete(self, request: Request) -> Response:
        """Delete a stored response."""
        response_id = request.path_params["response_id"]
        owner = context.current().permit.owner
        self._background.stop(owner, response_id)
        if not is_response(response_id) or not await self._store.delete(owner, response_id):
            raise _not_found(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        """List the input items of a response, including those of earlier responses."""
        stored = await self._stored(request)
        return json_response(page(await self._store.parsed(stored.items), request.query_params))

    async def cancel(self, request: Request) -> Response:
        """Cancel a background response."""
        response_id = request.path_params["response_id"]
        stored = await self._background.cancel(context.current().permit.owner, response_id)
        if stored is None:
            raise _not_found(response_id)
        return Response(stored.response, media_type="application/json")

    async def _stored(self, request: Request) -> StoredResponse:
        response_id = request.path_params["response_id"]
        stored = await self._background.find(context.current().permit.owner, response_id)
        if stored is None:
            raise _not_found(response_id)
        return stored


def _starting_after(request: Request, streams: bool) -> int:
    """Returns the sequence number after which a stored response is streamed; -1: from its beginning."""
    text = request.query_params.get("starting_after")
    if text is None:
        return -1
    if not streams or not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise invalid(
            "starting_after must be the number of an event, and needs stream to be true.",
            param="starting_after",
            code="invalid_value",
        )
    return int(text)


def _not_found(response_id: str) -> SluiceError:
    return not_found(f"Response with id {response_id[:80]!r} not found.", param="response_id")
