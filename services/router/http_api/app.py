"""Routes of the HTTP/JSON API: authentication, the calls, and errors as JSON."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from google.protobuf import json_format
from google.protobuf.message import Message
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from services.common.base import logs
from services.common.base.errors import ErrorKind, SluiceError, internal, word
from services.common.base.tasks import end_all
from services.common.net.http_policy import HttpPolicy, HttpRefusal, PolicyMiddleware
from services.common.observability import telemetry
from services.common.rpc.auth_interceptor import CallerCheck
from services.common.security import identity
from services.router.http_api import route
from services.router.http_api.bodies import BodyLimits, read_object
from services.router.rpc.service import RouterService
from services.router.scheduling.body_intake import HELD_FACTOR, beside
from services.router.scheduling.request_bodies import read_body as read_openai_body
from sluice.v1 import router_pb2

log = logging.getLogger(__name__)

SERVICE = "/sluice.v1.Router/"

Handler = Callable[[Request], Awaitable[Response]]


class HttpApi:
    """The routes.

    Args:
        calls: handles the RPCs.
        check: authenticates callers; None serves everyone.
        limits: bounds on bodies.
        is_ready: whether the router has reached its store.
        open_health: whether `/health` is served to every caller.
    """

    def __init__(
        self,
        calls: RouterService,
        check: CallerCheck | None,
        limits: BodyLimits,
        is_ready: Callable[[], bool],
        open_health: bool = True,
    ) -> None:
        self._calls = calls
        self._handlers = {name: calls.unary(name) for name in ("MarkPrefillComplete", "FreeRequest", "ListWorkers")}
        self._check = check
        self._limits = limits
        self._is_ready = is_ready
        self._open_health = open_health

    def app(self, policy: HttpPolicy) -> ASGIApp:
        """Returns the ASGI application, which rejects what the policy does not accept."""
        routes = [
            Route("/route", self._served("RouteQuery", self._route), methods=["POST"]),
            Route("/prefill_complete", self._report("MarkPrefillComplete", route.marked_of), methods=["POST"]),
            Route("/free", self._report("FreeRequest", route.freed_of), methods=["POST"]),
            Route("/workers", self._served("ListWorkers", self._workers), methods=["GET"]),
            Route("/health", self._health if self._open_health else self._served("ListWorkers", self._health)),
        ]
        served = Starlette(routes=routes, exception_handlers={HTTPException: _http_error})
        return PolicyMiddleware(served, policy, _refused)

    def _served(self, rpc: str, handle: Handler) -> Handler:
        """Returns the endpoint of a handler, which may call an RPC: with its caller, its span and typed errors."""

        async def serve(request: Request) -> Response:
            try:
                if self._check is not None:
                    headers = request.headers.getlist("authorization")
                    uris = request.scope.get("state", {}).get("peer_uris", ())
                    identity.current.set(self._check.admit(SERVICE + rpc, headers, uris))
                logs.request_id.set(request.headers.get("x-request-id", "")[:200])
                parent = telemetry.carrier_of_metadata(request.headers.items())
                with telemetry.stage(f"router.http.{rpc}", parent=parent):
                    return await handle(request)
            except SluiceError as error:
                telemetry.failed(error)
                return error_response(error)
            except Exception:
                log.exception("unexpected failure in %s", request.url.path)
                return error_response(internal("Unexpected failure; see the service's log for details."))

        return serve

    async def _route(self, request: Request) -> Response:
        async with read_object(request, self._limits) as (fields, size):
            query = route.query_of(request, fields)
            body = await beside(size, read_openai_body, fields)
            del fields
        with self._limits.intake.holding(HELD_FACTOR * body.size):
            reply = await self._call(request, self._calls.route(query, body))
        assert isinstance(reply, router_pb2.RouteQueryResponse)
        return _json(route.answer_of(reply))

    def _report(self, rpc: str, message_of: Callable[[Mapping[str, Any]], Message]) -> Handler:
        """Returns the handler of a report about reservations."""

        async def report(request: Request) -> Response:
            async with read_object(request, self._limits) as (fields, _):
                message = message_of(fields)
            reply: Any = await self._call(request, self._handlers[rpc](message))
            return _json({"unknown": reply.unknown})

        return self._served(rpc, report)

    async def _workers(self, request: Request) -> Response:
        message = router_pb2.ListWorkersRequest(model=request.query_params.get("model", ""))
        return _json(json_format.MessageToDict(await self._handlers["ListWorkers"](message)))

    async def _call(self, request: Request, reply: Awaitable[Message]) -> Message:
        """Returns the reply of an RPC, which is cancelled when the client disconnects, as gRPC does.

        Args:
            request: its body has been read, so that only its end is left to receive.
        """
        work = asyncio.ensure_future(reply)
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise SluiceError(ErrorKind.CANCELLED, "The client disconnected before the response.")
        finally:
            await end_all((work, gone))

    async def _health(self, request: Request) -> Response:
        ready = self._is_ready()
        return _json({"status": "ok" if ready else "waiting"}, 200 if ready else 503)


def _refused(refusal: HttpRefusal) -> Response:
    headers = {"connection": "close"} if refusal.closes else {}
    return _error(refusal.status, refusal.code or "invalid_http", refusal.message, "", headers)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def error_response(error: SluiceError) -> Response:
    """Returns `{"error": {"code", "message", "param"}}`, with Retry-After for 429 and 503."""
    headers = {}
    if error.http_status in (429, 503):
        headers["retry-after"] = str(max(1, -(-error.retry_after_ms // 1000)))
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return _error(error.http_status, word(error), error.message, error.param, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code, message = {
        404: ("unknown_path", "This path does not exist; docs/embedding-the-router.md lists the paths."),
        405: ("method_not_allowed", "This path does not accept the method."),
    }.get(error.status_code, ("http_error", "The request is not valid."))
    return _error(error.status_code, code, message, "", dict(error.headers or {}))


def _error(status: int, code: str, message: str, param: str, headers: Mapping[str, str]) -> Response:
    return _json({"error": {"code": code, "message": message, "param": param or None}}, status, headers)


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, dict(headers or {}), media_type="application/json")
