"""Calls the endpoints of generation requests directly, without FastAPI's routing.

FastAPI documents all routes and serves the infrequent ones. Its router, dependencies and exit stacks take a fifth of
the gateway's time per request, and endpoints that take a plain `Request` use none of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.http.body import release_body

Endpoint = Callable[[Request], Awaitable[Response]]
Answer = Callable[[Request, Exception], Awaitable[Response]]


def posts(routes: Iterable[BaseRoute]) -> dict[str, Endpoint]:
    """Returns the endpoints of all POST-only routes without path parameters, by path."""
    plain = [route for route in routes if isinstance(route, Route) and not route.param_convertors]
    return {route.path: route.endpoint for route in plain if route.methods == {"POST"}}


class FastPathRouter:
    """Calls the endpoints of POST requests directly and passes all other requests on to the application.

    Args:
        endpoints: endpoints by path; each takes the request and returns the response.
        errors: exception types that endpoints may raise, and their handlers.
    """

    def __init__(
        self, app: ASGIApp, endpoints: Mapping[str, Endpoint], errors: Mapping[type[Exception], Answer]
    ) -> None:
        self._app = app
        self._endpoints = endpoints
        self._errors = errors
        self._handled = tuple(errors)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" else None
        if endpoint is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await endpoint(request)
        except self._handled as error:
            response = await self._error_response(request, error)
        finally:
            release_body(scope)
        await response(scope, receive, send)

    async def _error_response(self, request: Request, error: Exception) -> Response:
        kind = next(kind for kind in type(error).__mro__ if kind in self._errors)
        return await self._errors[kind](request, error)
