"""The HTTP transport of operations: JSON bodies in, JSON or server-sent events out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.base.budgets import Budget
from services.gateway.http.body import read_bytes, read_json
from services.gateway.http.body_memory import BodyMemory
from services.gateway.http.connection import CONNECTION_KEY
from services.gateway.http.degradation import mark
from services.gateway.http.fast_path import Endpoint
from services.gateway.http.sse import CLIENT_CLOSED_REQUEST, EventStream, wait_for_disconnect
from services.gateway.http.write_scheduler import WriteScheduler
from services.gateway.operations.operation import Answer, Caller, Detached, Marked, Operation, Streamed, Whole

DEFAULT_PAGE = 20


class BodyReader:
    """Reads request bodies within bounds.

    Args:
        max_bytes: of a JSON body.
        timeout_s: longest wait for memory, and then for the whole body.
        values: maximum number of values of a JSON body.
        memory: the budget shared by all request bodies; None: each body has its own.
    """

    def __init__(self, max_bytes: int, timeout_s: float, values: Budget, memory: BodyMemory | None = None) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._values = values
        self._memory = memory

    async def read_form(self, request: Request, limit: int) -> bytes:
        """Returns the body of a form of at most `limit` bytes, unparsed; raises as `read_json`."""
        return await read_bytes(request, limit, self._timeout_s, self._memory)

    async def read(self, request: Request) -> dict[str, Any]:
        """Returns the body as a JSON object; raises as `read_json`."""
        return await read_json(request, self._max_bytes, self._timeout_s, self._values, self._memory)


class HttpTransport:
    """Serves operations over HTTP.

    Args:
        max_unsent: maximum number of characters that wait for a slow client.
    """

    def __init__(self, bodies: BodyReader, write_scheduler: WriteScheduler, max_unsent: int) -> None:
        self.bodies = bodies
        self._write_scheduler = write_scheduler
        self._max_unsent = max_unsent

    def endpoint(self, operation: Operation) -> Endpoint:
        """Returns an endpoint that reads the body, runs the operation and responds with its answer."""

        async def serve(request: Request) -> Response:
            body = await self.bodies.read(request)
            return self.response(await operation(body, caller_of(request)))

        return serve

    def response(self, answer: Answer | None) -> Response:
        """Returns the response with an answer; None: the caller is gone."""
        if isinstance(answer, Streamed):
            return EventStream(answer.source, self._write_scheduler, self._max_unsent, answer.marked, answer.media_type)
        if isinstance(answer, Whole):
            return json_response(answer.content, answer.marked)
        if isinstance(answer, Detached):
            return _DetachedResponse(self.response(answer.answer), answer.work)
        return Response(status_code=CLIENT_CLOSED_REQUEST)  # for logs and metrics


class _DetachedResponse(Response):
    """Responds to a request, and ends when its work has ended, too."""

    def __init__(self, response: Response, work: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self._response = response
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        working = asyncio.ensure_future(self._work())
        try:
            await self._response(scope, receive, send)
        finally:
            await working


def caller_of(request: Request) -> Caller:
    """Returns the sender of a request."""
    scope = request.scope
    return Caller(
        request.headers,
        partial(wait_for_disconnect, request.receive),
        scope["state"].get("request_id", "") if "state" in scope else "",
        scope.get(CONNECTION_KEY),
    )


def read_limit(query: Mapping[str, str], most: int) -> int | None:
    """Returns the `limit` of a page, or None if it is not a number from 1 to `most`."""
    limit = query.get("limit", str(DEFAULT_PAGE))
    fits = limit.isascii() and limit.isdigit() and len(limit) <= len(str(most)) and 1 <= int(limit) <= most
    return int(limit) if fits else None


def json_response(content: dict[str, Any], marked: Iterable[Marked] = ()) -> Response:
    """Returns a JSON response; headers report the fallbacks and migrations of `marked`."""
    response = Response(orjson.dumps(content), media_type="application/json")
    mark(response, marked)
    return response
