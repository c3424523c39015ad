"""The OpenAPI document: what each endpoint takes, answers, and how it can fail."""

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
    400: "The request cannot be served as it is; `param` names the field at fault.",
    401: "No API key, or one that is not valid.",
    403: "The API key may not use this model.",
    404: "There is no such model.",
    408: "The request body did not arrive in time.",
    413: "The request body is too large.",
    415: "The request body is compressed.",
    429: "Too much is under way; try again after `Retry-After` seconds.",
    499: "The client went away.",
    500: "A defect of the server.",
    502: "A worker was lost, and nobody else could take over.",
    503: "Nobody can serve this now; try again after `Retry-After` seconds.",
    504: "A service did not answer in time.",
}
GENERATING = (400, 401, 403, 404, 408, 413, 415, 429, 499, 500, 502, 503, 504)
"""How requests that workers or preprocess serve can fail."""

_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
"""One server-sent event; source: the OpenAPI Specification, "Special Considerations for text/event-stream Content"."""


def responses(answer: type[BaseModel], failures: Sequence[int], streams: bool = False) -> dict[int | str, Any]:
    """An endpoint's answers by status.

    Args:
        answer: of 200.
        failures: statuses of `ErrorAnswer`.
        streams: 200 may be a stream of server-sent events instead.
    """
    good: dict[str, Any] = {"model": answer, "description": "The answer."}
    if streams:
        events = {"schema": _EVENT, "example": 'data: {"id": "…", "choices": […]}\n\ndata: [DONE]\n\n'}
        good["content"] = {"text/event-stream": events}
    return {200: good, **{status: {"model": ErrorAnswer, "description": _FAILURES[status]} for status in failures}}


def body_of(kind: type[BaseModel]) -> dict[str, Any]:
    """A request body of this kind; endpoints read and check theirs themselves, within their limits."""
    schema = {"$ref": _COMPONENT.format(model=kind.__name__)}
    return {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}


def document(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> None:
    """Makes the application's OpenAPI document show the bodies that its endpoints check themselves."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
                tags=app.openapi_tags,
            )
            _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template=_COMPONENT)
            made.setdefault("components", {}).setdefault("schemas", {}).update(definitions.get("$defs", {}))
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
