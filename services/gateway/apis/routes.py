"""The routes that APIs add to the gateway."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Response
from pydantic import BaseModel
from starlette.routing import WebSocketRoute
from starlette.types import ASGIApp, Scope

from services.gateway.apis.openai.openapi import body_of
from services.gateway.http.error_formats import ErrorFormat
from services.gateway.http.fast_path import Endpoint
from services.gateway.http.json_transport import HttpTransport
from services.gateway.operations.operation import Operation
from services.gateway.operations.registry import Operations


@dataclass(frozen=True, slots=True)
class ModelListFormat:
    """How one API's clients see the list of models, in place of OpenAI's format.

    Attributes:
        schemas: of the page and of one model.
        asked_by: returns whether a request is of such a client.
        page: returns the list from the models in OpenAI's format and the query.
        one: returns one model from its object in OpenAI's format.
    """

    schemas: tuple[type[BaseModel], type[BaseModel]]
    asked_by: Callable[[Scope], bool]
    page: Callable[[Sequence[Mapping[str, Any]], Mapping[str, str]], dict[str, Any]]
    one: Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ApiRoutes:
    """Adds routes to the application, and operations to all transports.

    Attributes:
        bodies: the schemas of request bodies.
        error_formats: of APIs whose errors are not in OpenAI's format.
        model_formats: formats of the list of models besides OpenAI's.
    """

    app: FastAPI
    transport: HttpTransport
    operations: Operations
    bodies: list[type[BaseModel]] = field(default_factory=list)
    error_formats: list[ErrorFormat] = field(default_factory=list)
    model_formats: list[ModelListFormat] = field(default_factory=list)

    def add(
        self,
        path: str,
        operation: Operation,
        answers: dict[int | str, Any],
        *,
        body: type[BaseModel] | None = None,
        adds_model: bool = True,
        name: str = "",
        tag: str = "OpenAI",
        parameters: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Adds an operation at POST of a path.

        Args:
            answers: the documented responses, by status.
            body: the documented schema of the request body.
            adds_model: a body without a model gets the only one that is served.
            name: prefix of the operation's name in the document.
            parameters: documented parameters.
        """
        endpoint = self.transport.endpoint(self.operations.add(path, operation, adds_model=adds_model))
        endpoint.__name__ = getattr(operation, "__name__", "answer")
        endpoint.__doc__ = operation.__doc__
        self.add_http(path, endpoint, answers, body=body, name=name, tag=tag, parameters=parameters)

    def add_http(
        self,
        path: str,
        endpoint: Endpoint,
        answers: dict[int | str, Any],
        *,
        method: str = "POST",
        body: type[BaseModel] | None = None,
        name: str = "",
        tag: str = "OpenAI",
        parameters: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Adds an endpoint of HTTP alone, which takes the plain request; see `add`."""

        extra: dict[str, Any] = {} if body is None else body_of(body)
        if body is not None:
            self.bodies.append(body)
        if parameters:
            extra["parameters"] = list(parameters)
        self.app.add_api_route(
            path,
            endpoint,
            methods=[method],
            response_class=Response,
            response_model=None,
            name=f"{name}{endpoint.__name__}",
            tags=[tag],
            responses=answers,
            openapi_extra=extra,
        )

    def add_socket(self, path: str, sockets: ASGIApp) -> None:
        """Serves a path over WebSocket."""
        self.app.router.routes.append(WebSocketRoute(path, sockets))
