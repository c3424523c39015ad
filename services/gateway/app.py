"""The HTTP application: which path does what, and what an error looks like."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import SluiceError, internal
from services.gateway.http.errors import error_response, plain_error_response
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai.endpoints import OpenAIEndpoints
from services.gateway.openai.schemas import ChatCompletionRequest, CompletionRequest
from services.gateway.openai.token_schemas import DetokenizeRequest, TokenizeRequest
from services.gateway.openai.tokens import TokenEndpoints
from services.gateway.readiness import Readiness
from sluice import __version__


class CountAnswers:
    """Counts answers by path and status; one metric per request."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, paths: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"
        counted = False

        def counting_send(message: Message) -> Awaitable[None]:
            nonlocal counted
            if not counted:
                counted = True
                self._metrics.answered(path, message["status"])
            return send(message)

        await self._app(scope, receive, counting_send)


def create_app(
    openai: OpenAIEndpoints, tokens: TokenEndpoints, readiness: Readiness, metrics: GatewayMetrics
) -> FastAPI:
    """The application over a pipeline that runs."""
    app = FastAPI(
        title="Sluice",
        version=__version__,
        description="An OpenAI-compatible gateway to large language models.",
    )
    _add_openai(app, openai, tokens)
    _add_operations(app, readiness)
    _add_errors(app)
    app.add_middleware(CountAnswers, metrics=metrics, paths=frozenset(app.openapi()["paths"]))
    return app


def _add_openai(app: FastAPI, openai: OpenAIEndpoints, tokens: TokenEndpoints) -> None:
    def post(
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        body: type[BaseModel],
    ) -> None:
        async def handle(request: Request) -> Response:
            return await endpoint(request)

        handle.__doc__ = endpoint.__doc__
        # Bodies are read and checked by the endpoint, within its limits; the document still shows their schema.
        schema = {"content": {"application/json": {"schema": body.model_json_schema()}}, "required": True}
        app.add_api_route(
            path,
            handle,
            methods=["POST"],
            response_class=Response,
            response_model=None,
            name=endpoint.__name__,
            tags=["OpenAI"],
            openapi_extra={"requestBody": schema},
        )

    post("/v1/chat/completions", openai.chat_completions, ChatCompletionRequest)
    post("/v1/completions", openai.completions, CompletionRequest)
    post("/v1/chat/completions/render", tokens.render, ChatCompletionRequest)
    post("/tokenize", tokens.tokenize, TokenizeRequest)
    post("/detokenize", tokens.detokenize, DetokenizeRequest)

    @app.get("/v1/models", tags=["OpenAI"])
    async def models() -> dict[str, Any]:
        """The models that workers serve now."""
        return await openai.models()


def _add_operations(app: FastAPI, readiness: Readiness) -> None:
    @app.get("/health", tags=["Operations"])
    async def health() -> dict[str, str]:
        """The process lives."""
        return {"status": "ok"}

    @app.get("/ready", tags=["Operations"])
    async def ready() -> Response:
        """The services behind the gateway answer; 503 with what is missing otherwise."""
        state = readiness.state()
        return Response(orjson.dumps(state), 200 if state["ready"] else 503, media_type="application/json")

    @app.get("/metrics", tags=["Operations"])
    async def metrics() -> Response:
        """Prometheus metrics of this process."""
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)


def _add_errors(app: FastAPI) -> None:
    async def typed(request: Request, error: Exception) -> Response:
        assert isinstance(error, SluiceError)
        return error_response(error)

    async def of_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        hints = {
            404: f"There is no {request.url.path} here.",
            405: f"{request.url.path} does not take {request.method}.",
        }
        return plain_error_response(hints.get(error.status_code, str(error.detail)), error.status_code)

    async def unexpected(request: Request, error: Exception) -> Response:
        return error_response(internal("Unexpected failure in the gateway; its log has the details."))

    app.add_exception_handler(SluiceError, typed)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(Exception, unexpected)
