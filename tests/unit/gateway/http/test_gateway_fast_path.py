"""Requests that generate skip FastAPI's router and see no difference: the same paths, answers and errors."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.base.errors import SluiceError, invalid
from services.gateway.http.errors import error_response, plain_error_response
from services.gateway.http.fast_path import FastPathRouter, posts


class Passed:
    """Notes what goes the usual way."""

    def __init__(self, app: ASGIApp, paths: list[str]) -> None:
        self._app = app
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._paths.append(scope["path"])
        await self._app(scope, receive, send)


def application(passed: list[str]) -> FastAPI:
    app = FastAPI()

    async def echo(request: Request) -> Response:
        return Response(await request.body(), headers={"x-path": request.url.path})

    async def typed(request: Request) -> Response:
        raise invalid("That is wrong.", param="field")

    async def of_http(request: Request) -> Response:
        raise HTTPException(415, "Not this type.")

    async def broken(request: Request) -> Response:
        raise KeyError("secret")

    for path, endpoint in {"/echo": echo, "/typed": typed, "/http": of_http, "/broken": broken}.items():
        app.add_api_route(path, endpoint, methods=["POST"], response_model=None)
    app.add_api_route("/kept/{name}", echo, methods=["POST"], response_model=None)
    app.add_api_route("/both", echo, methods=["GET", "POST"], response_model=None)

    async def on_typed(request: Request, error: Exception) -> Response:
        assert isinstance(error, SluiceError)
        return error_response(error)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return plain_error_response(error.detail, error.status_code)

    async def unexpected(request: Request, error: Exception) -> Response:
        return plain_error_response("Unexpected.", 500)

    app.add_exception_handler(Exception, unexpected)
    app.add_middleware(Passed, paths=passed)
    app.add_middleware(
        FastPathRouter, endpoints=posts(app.routes), errors={SluiceError: on_typed, HTTPException: on_http}
    )
    return app


async def ask(method: str, path: str, passed: list[str]) -> Any:
    transport = httpx.ASGITransport(application(passed), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.request(method, path, content=b"hello")


async def test_a_post_goes_straight_to_its_endpoint() -> None:
    passed: list[str] = []
    answer = await ask("POST", "/echo", passed)
    assert (answer.status_code, answer.content, answer.headers["x-path"]) == (200, b"hello", "/echo")
    assert passed == []


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [("/typed", 400, "That is wrong."), ("/http", 415, "Not this type."), ("/broken", 500, "Unexpected.")],
)
async def test_what_endpoints_raise_is_answered(path: str, status: int, message: str) -> None:
    passed: list[str] = []
    answer = await ask("POST", path, passed)
    assert (answer.status_code, answer.json()["error"]["message"]) == (status, message)
    assert passed == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/echo", 405), ("POST", "/kept/x", 200), ("POST", "/both", 200), ("POST", "/nowhere", 404)],
)
async def test_everything_else_goes_the_usual_way(method: str, path: str, status: int) -> None:
    passed: list[str] = []
    assert (await ask(method, path, passed)).status_code == status
    assert passed == [path]
