"""The HTTP application: routes and error handlers."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import orjson
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import SluiceError, internal, shortened
from services.gateway import context
from services.gateway.apis.anthropic import models as anthropic_models
from services.gateway.apis.anthropic.dialect import speaks_anthropic
from services.gateway.apis.anthropic.response_schemas import EitherModel, EitherModelList
from services.gateway.apis.openai.embedding_schemas import EmbeddingRequest
from services.gateway.apis.openai.embeddings import EmbeddingEndpoints
from services.gateway.apis.openai.endpoints import OpenAIEndpoints
from services.gateway.apis.openai.openapi import GENERATING, add_route, document, responses
from services.gateway.apis.openai.response_schemas import (
    ChatCompletion,
    Completion,
    Detokenized,
    EmbeddingList,
    Rendered,
    Tokens,
)
from services.gateway.apis.openai.schemas import ChatCompletionRequest, CompletionRequest
from services.gateway.apis.openai.token_schemas import DetokenizeRequest, TokenizeRequest
from services.gateway.apis.openai.tokens import TokenEndpoints
from services.gateway.http.errors import error_response, plain_error_response
from services.gateway.http.fast_path import Answer, FastPathRouter, posts
from services.gateway.metrics import GatewayMetrics
from services.gateway.readiness import Readiness
from sluice import __version__

AddRoutes = Callable[[FastAPI], list[type[BaseModel]]]
"""Adds an API's routes and returns the Pydantic models of its request bodies."""

_PATHS_WITH_NAMES = (
    (re.compile(r"^/v1/models/.+$"), "/v1/models/{model}"),
    (re.compile(r"^/v1/responses/(?!input_tokens$)[^/]+"), "/v1/responses/{response_id}"),
)


class ResponseCounter:
    """Counts HTTP responses by path and status."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, paths: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = self._label(scope["path"])
        counted = False

        def counting_send(message: Message) -> Awaitable[None]:
            nonlocal counted
            if not counted:
                counted = True
                self._metrics.answered(path, message["status"])
            return send(message)

        await self._app(scope, receive, counting_send)

    def _label(self, path: str) -> str:
        if path not in self._paths:
            for pattern, label in _PATHS_WITH_NAMES:
                path = pattern.sub(label, path, count=1)
        return path if path in self._paths else "other"


def create_app(
    openai: OpenAIEndpoints,
    tokens: TokenEndpoints,
    embeddings: EmbeddingEndpoints,
    readiness: Readiness,
    metrics: GatewayMetrics,
    apis: Sequence[AddRoutes] = (),
) -> FastAPI:
    """Returns the HTTP application; `apis` adds APIs other than chat completions, completions and embeddings."""
    app = FastAPI(
        title="Sluice",
        version=__version__,
        description="An OpenAI-compatible gateway to large language models.",
        telemetry={"tracing": False, "metrics": False, "logs": False},  # services.common.observability does this
    )
    bodies = _add_openai(app, openai, tokens, embeddings)
    for add in apis:
        bodies += add(app)
    _add_operations(app, readiness)
    errors = _add_errors(app)
    document(app, bodies)
    app.add_middleware(FastPathRouter, endpoints=posts(app.routes), errors=errors)
    app.add_middleware(ResponseCounter, metrics=metrics, paths=frozenset(app.openapi()["paths"]))
    return app


def _add_openai(
    app: FastAPI, openai: OpenAIEndpoints, tokens: TokenEndpoints, embeddings: EmbeddingEndpoints
) -> list[type[BaseModel]]:
    """Adds the OpenAI routes and returns the Pydantic models of their request bodies."""
    chats, texts = (responses(answer, GENERATING, streams=True) for answer in (ChatCompletion, Completion))
    add = partial(add_route, app)
    add("/v1/chat/completions", openai.chat_completions, chats, body=ChatCompletionRequest)
    add("/v1/completions", openai.completions, texts, body=CompletionRequest)
    add("/v1/embeddings", embeddings.embeddings, responses(EmbeddingList, GENERATING), body=EmbeddingRequest)
    add("/v1/chat/completions/render", tokens.render, responses(Rendered, GENERATING), body=ChatCompletionRequest)
    add("/tokenize", tokens.tokenize, responses(Tokens, GENERATING), body=TokenizeRequest)
    add("/detokenize", tokens.detokenize, responses(Detokenized, GENERATING), body=DetokenizeRequest)

    @app.get("/v1/models", tags=["OpenAI"], response_model=None, responses=responses(EitherModelList, (400, 401, 500)))
    async def models(request: Request) -> dict[str, Any]:
        """List the models currently served; in Anthropic's format for Anthropic clients."""
        listed = await openai.models()
        if speaks_anthropic(request.scope):
            return anthropic_models.page(listed["data"], request.query_params)
        return listed

    parameter = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}

    @app.get(
        "/v1/models/{model:path}",
        tags=["OpenAI"],
        response_model=None,
        responses=responses(EitherModel, (401, 403, 404, 500, 503)),
        openapi_extra={"parameters": [parameter]},
    )
    async def model(request: Request) -> dict[str, Any]:
        """Retrieve one model; in Anthropic's format for Anthropic clients."""
        shown = await openai.model(request.path_params["model"])
        return anthropic_models.as_anthropic(shown) if speaks_anthropic(request.scope) else shown

    return [ChatCompletionRequest, CompletionRequest, EmbeddingRequest, TokenizeRequest, DetokenizeRequest]


ROOT: Mapping[str, str] = {
    "service": "sluice-gateway",
    "version": __version__,
    "api": "/v1",
    "docs": "/docs",
    "openapi": "/openapi.json",
    "live_view": "/ui",
    "ready": "/ready",
}
"""Response of `GET /`, which needs no key; contains nothing about models."""


def _add_operations(app: FastAPI, readiness: Readiness) -> None:
    @app.get("/", include_in_schema=False)
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
        openapi_extra={"parameters": [{"name": "model", "in": "query", "schema": {"type": "string"}}]},
    )
    async def ready(request: Request) -> Response:
        """Readiness of the services behind the gateway, independent of workers; with `model`, of that model."""
        permit, model = context.current().permit, request.query_params.get("model")
        state = readiness.report(permit) if model is None else readiness.report_model(model, permit)
        return Response(orjson.dumps(state), 200 if state["ready"] else 503, media_type="application/json")

    text: dict[int | str, Any] = {
        200: {"description": "Prometheus text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    }

    @app.get("/metrics", tags=["Operations"], response_class=Response, responses=text)
    async def metrics() -> Response:
        """Prometheus metrics of this process."""
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)


def _add_errors(app: FastAPI) -> dict[type[Exception], Answer]:
    """Adds the exception handlers and returns those for errors that endpoints raise deliberately."""

    async def typed(request: Request, error: Exception) -> Response:
        assert isinstance(error, SluiceError)
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

    expected: dict[type[Exception], Answer] = {SluiceError: typed, HTTPException: of_http}
    for kind, answer in expected.items():
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(Exception, unexpected)
    return expected
