"""The HTTP application: routes, error handlers, and the order of the middleware."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

import orjson
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, RootModel, create_model
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from services.common.base.errors import SluiceError, internal, invalid, not_found, shortened
from services.common.observability.audit import AuditLog
from services.gateway.admission.gate import Gate
from services.gateway.apis.openai.embedding_schemas import (
    EmbeddingRequest,
)
from services.gateway.apis.openai.embeddings import EmbeddingOperations
from services.gateway.apis.openai.openapi import GENERATING, document, responses
from services.gateway.apis.openai.operations import OpenAIOperations
from services.gateway.apis.openai.response_schemas import (
    ChatCompletion,
    Completion,
    Detokenized,
    EmbeddingList,
    Model,
    ModelList,
    Rendered,
    Tokens,
)
from services.gateway.apis.openai.schemas import ChatCompletionRequest, CompletionRequest
from services.gateway.apis.openai.token_schemas import DetokenizeRequest, TokenizeRequest
from services.gateway.apis.openai.tokens import TokenOperations
from services.gateway.apis.routes import ApiRoutes, ModelListFormat
from services.gateway.app.api_page import HEADERS, api_page
from services.gateway.app.readiness import Readiness
from services.gateway.core import context
from services.gateway.http.entrance import Entrance
from services.gateway.http.error_formats import ErrorFormats
from services.gateway.http.errors import error_response, plain_error_response
from services.gateway.http.fast_path import FastPathRouter, posts
from services.gateway.http.json_transport import json_response
from services.gateway.http.middleware.admission import AdmissionMiddleware
from services.gateway.http.middleware.audit import AuditMiddleware
from services.gateway.http.middleware.deadlines import DeadlineMiddleware
from services.gateway.http.middleware.hosts import HostMiddleware, host_policy
from services.gateway.http.middleware.response_counter import ResponseCounter
from services.gateway.http.middleware.routing_hints import RoutingHintHeaders
from services.gateway.http.middleware.scopes import without_effect
from services.gateway.metrics import GatewayMetrics
from services.gateway.settings import GatewaySettings
from sluice import __version__


def create_app(
    routes: ApiRoutes,
    openai: OpenAIOperations,
    tokens: TokenOperations,
    embeddings: EmbeddingOperations,
    readiness: Readiness,
    on_error: Callable[[SluiceError], None] | None = None,
) -> None:
    """Adds the kernel's routes to the application, and the document of all; the routes of APIs are there already.

    Args:
        on_error: called with each error that becomes a response.
    """
    _add_openai(routes, openai, tokens, embeddings)
    _add_models(routes, openai)
    _add_operations(routes.app, readiness)
    _add_api_page(routes.app)
    _add_error_handlers(routes.app, on_error)
    document(routes.app, routes.bodies)


def bare_app() -> FastAPI:
    """Returns the HTTP application without routes and middleware."""
    return FastAPI(
        title="Sluice",
        version=__version__,
        description="An OpenAI-compatible gateway to large language models.",
        docs_url=None,  # FastAPI's own pages run scripts of other hosts
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # services.common.observability does this
    )


def entrance(
    routes: ApiRoutes, settings: GatewaySettings, gate: Gate, metrics: GatewayMetrics, audit_log: AuditLog | None
) -> Entrance:
    """Returns the application inside of its middleware, which is added from the innermost to the outermost.

    All routes must have been added. The middleware is outside of FastAPI's, which takes four coroutines a request.
    """
    app = routes.app
    handlers: dict[type[Exception], Any] = {kind: app.exception_handlers[kind] for kind in (SluiceError, HTTPException)}
    # Innermost: calls endpoints directly, in place of FastAPI's routing.
    served: ASGIApp = FastPathRouter(app, posts(app.routes), handlers)
    # Inside of admission, which counts the requests that it rejects itself.
    served = ResponseCounter(served, metrics, frozenset(app.openapi()["paths"]))
    # Before bodies are read: queued requests take no memory.
    served = AdmissionMiddleware(served, gate, without_effect(settings.pipeline))
    # Before admission: requests with invalid hints do not count against limits.
    served = RoutingHintHeaders(served)
    # Before admission: the deadline includes the time in the queue.
    served = DeadlineMiddleware(served, settings.request_timeout_s)
    # Before anything else of a request is used: requests from other sites' web pages have no effect at all.
    policy = host_policy(settings.listen, settings.allowed_hosts, settings.allowed_origins)
    served = HostMiddleware(served, policy, gate.count_refused)
    # Outside of everything that rejects requests: convert all errors to an API's format.
    if routes.error_formats:
        served = ErrorFormats(served, routes.error_formats)
    # Records every response, refusals included.
    if audit_log is not None:
        served = AuditMiddleware(served, audit_log)
    return Entrance(served)


def _add_openai(
    routes: ApiRoutes, openai: OpenAIOperations, tokens: TokenOperations, embeddings: EmbeddingOperations
) -> None:
    add = routes.add
    chats, texts = (responses(answer, GENERATING, streams=True) for answer in (ChatCompletion, Completion))
    add("/v1/chat/completions", openai.chat_completions, chats, body=ChatCompletionRequest)
    add("/v1/completions", openai.completions, texts, body=CompletionRequest)
    add("/v1/embeddings", embeddings.embeddings, responses(EmbeddingList, GENERATING), body=EmbeddingRequest)
    add("/v1/chat/completions/render", tokens.render, responses(Rendered, GENERATING), body=ChatCompletionRequest)
    add("/tokenize", tokens.tokenize, responses(Tokens, GENERATING), body=TokenizeRequest)
    add("/detokenize", tokens.detokenize, responses(Detokenized, GENERATING), body=DetokenizeRequest)


def _add_models(routes: ApiRoutes, openai: OpenAIOperations) -> None:
    def view_of(request: Request) -> ModelListFormat | None:
        return next((view for view in routes.model_formats if view.asked_by(request.scope)), None)

    async def models(request: Request) -> Response:
        """List the models currently served; in the format of the client's API."""
        listed, view = await openai.models(), view_of(request)
        return json_response(view.page(listed["data"], request.query_params) if view else listed)

    async def model(request: Request) -> Response:
        """Retrieve one model; in the format of the client's API."""
        shown, view = await openai.model(request.path_params["model"]), view_of(request)
        return json_response(view.one(shown) if view else shown)

    parameter = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    listed = responses(
        _either("ModelList", ModelList, [view.schemas[0] for view in routes.model_formats]), (400, 401, 500)
    )
    routes.add_http("/v1/models", models, listed, method="GET")
    shown = responses(
        _either("Model", Model, [view.schemas[1] for view in routes.model_formats]), (401, 403, 404, 500, 503)
    )
    routes.add_http("/v1/models/{model:path}", model, shown, method="GET", parameters=[parameter])


def _either(name: str, own: type[BaseModel], others: Sequence[type[BaseModel]]) -> type[BaseModel]:
    """Returns the schema of an answer in OpenAI's format, or in that of another API for its clients."""
    if not others:
        return own
    union: Any = Union[(own, *others)]
    return create_model(f"Either{name}", __base__=RootModel[union], __doc__="In the format of the client's API.")


OBSERVER_PATH = "/ui"
"""Where an observer of the gateway, such as the live view, has its page."""

ROOT: Mapping[str, str] = {
    "service": "sluice-gateway",
    "version": __version__,
    "api": "/v1",
    "docs": "/docs",
    "openapi": "/openapi.json",
    "live_view": OBSERVER_PATH,
    "ready": "/ready",
}
"""Response of `GET /`, which needs no key; contains nothing about models."""

MAX_WORKERS_DIGITS = 6
"""Digits of the parameter `workers` of `/ready`; more are refused with INVALID_ARGUMENT."""


def _add_operations(app: FastAPI, readiness: Readiness) -> None:
    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)  # agents probe with HEAD
    async def root() -> dict[str, str]:
        return dict(ROOT)

    @app.get("/health", tags=["Operations"])
    async def health() -> dict[str, str]:
        """Liveness of the process."""
        return {"status": "ok"}

    @app.get(
        "/ready",
        tags=["Operations"],
        response_model=None,
        responses={
            404: {"description": "Not a model of this key."},
            503: {"description": "Not ready; the body states what is missing."},
        },
        openapi_extra={
            "parameters": [
                {"name": "model", "in": "query", "schema": {"type": "string"}},
                {"name": "workers", "in": "query", "schema": {"type": "integer", "minimum": 0, "default": 1}},
            ]
        },
    )
    async def ready(request: Request) -> Response:
        """Readiness of the services behind the gateway and of `workers` workers; with `model`, of that model."""
        permit, model = context.current().permit, request.query_params.get("model")
        workers = _min_workers(request.query_params.get("workers", "1"))
        state = readiness.report(permit, workers) if model is None else readiness.report_model(model, permit)
        return Response(orjson.dumps(state), 200 if state["ready"] else 503, media_type="application/json")

    text: dict[int | str, Any] = {
        200: {"description": "Prometheus text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    }

    @app.get("/metrics", tags=["Operations"], response_class=Response, responses=text)
    async def metrics() -> Response:
        """Prometheus metrics of this process."""
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)


def add_no_observer(app: FastAPI, is_enabled: bool) -> None:
    """Adds the error of a gateway without an observer."""

    async def off(request: Request) -> Response:
        if is_enabled:
            raise not_found("The live view is not installed in this gateway.", code="ui_off")
        raise not_found("The live view is disabled; start the gateway with --ui.", code="ui_off")

    for path in (OBSERVER_PATH, OBSERVER_PATH + "/{rest:path}"):
        app.add_api_route(path, off, include_in_schema=False)


def _min_workers(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > MAX_WORKERS_DIGITS:
        raise invalid("workers must be a whole number of at least 0.", param="workers")
    return int(text)


def _add_api_page(app: FastAPI) -> None:
    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        if (page := getattr(app.state, "api_page", None)) is None:
            page = app.state.api_page = api_page(app.openapi())
        return Response(page, headers=HEADERS)


def _add_error_handlers(app: FastAPI, on_error: Callable[[SluiceError], None] | None) -> None:

    async def typed(request: Request, error: Exception) -> Response:
        assert isinstance(error, SluiceError)
        if on_error is not None:
            on_error(error)
        return error_response(error)

    async def of_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = shortened(request.url.path)
        hints = {
            404: f"The path {path} does not exist; see /docs for the available paths.",
            405: f"The path {path} does not support {request.method}.",
        }
        response = plain_error_response(hints.get(error.status_code, str(error.detail)), error.status_code)
        response.headers.update(error.headers or {})
        return response

    async def unexpected(request: Request, error: Exception) -> Response:
        return error_response(internal("Unexpected failure in the gateway; see its log for details."))

    app.add_exception_handler(SluiceError, typed)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(Exception, unexpected)
