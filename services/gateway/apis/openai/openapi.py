"""The OpenAPI document: request bodies, responses and errors of the endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.gateway.apis.openai.response_schemas import ErrorAnswer

_COMPONENT = "#/components/schemas/{model}"

_FAILURES = {
    400: "The request is invalid or unsupported; `param` names the field.",
    401: "The API key is missing or invalid.",
    403: "The API key may not use this model.",
    404: "The model does not exist.",
    408: "The request body did not arrive in time.",
    413: "The request body is too large.",
    415: "The request body is compressed.",
    429: "A limit is exceeded; retry after `Retry-After` seconds.",
    499: "The client disconnected.",
    500: "Internal server error.",
    502: "A worker failed, and no other worker could take over.",
    503: "No worker is available; retry after `Retry-After` seconds.",
    504: "A service did not respond in time.",
}
GENERATING = (400, 401, 403, 404, 408, 413, 415, 429, 499, 500, 502, 503, 504)
"""Error statuses of requests that workers or preprocess serve."""

_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
"""One server-sent event, as in the OpenAPI Specification, "Special Considerations for text/event-stream Content"."""


def responses(answer: type[BaseModel], failures: Sequence[int], streams: bool = False) -> dict[int | str, Any]:
    """Returns an endpoint's responses by status.

    Args:
        answer: the schema of status 200.
        failures: statuses with an `ErrorAnswer`.
        streams: status 200 may also be a stream of server-sent events.
    """
    success: dict[str, Any] = {"model": answer, "description": "The response."}
    if streams:
        events = {"schema": _EVENT, "example": 'data: {"id": "…", "choices": […]}\n\ndata: [DONE]\n\n'}
        success["content"] = {"text/event-stream": events}
    return {200: success, **{status: {"model": ErrorAnswer, "description": _FAILURES[status]} for status in failures}}


def body_of(kind: type[BaseModel]) -> dict[str, Any]:
    """Returns the documentation of a request body; endpoints read and validate the body themselves, within limits."""
    schema = {"$ref": _COMPONENT.format(model=kind.__name__)}
    return {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}


def document(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> None:
    """Adds the schemas of bodies that endpoints validate themselves to the OpenAPI document."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
                tags=app.openapi_tags,
            )
            _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template=_COMPONENT)
            schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions.get("$defs", {}))
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
