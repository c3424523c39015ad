"""Converts errors to HTTP responses with OpenAI error bodies."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response

from services.common.base.errors import MAX_MESSAGE_LENGTH, SluiceError, shortened, word
from services.common.observability import telemetry
from services.gateway.core import context

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_denied_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


def error_body(error: SluiceError) -> dict[str, Any]:
    """Returns the body `{"error": {"message", "type", "param", "code"}}` and marks the current span as failed."""
    telemetry.failed(error)
    return _body(error.message, error.http_status, error.param, error.code)


def error_response(error: SluiceError) -> Response:
    """Returns the HTTP response for an error, with Retry-After for 429 and 503."""
    if (audit := context.current().audit) is not None:
        audit.outcome = word(error)
    headers = {}
    if error.http_status in (429, 503):
        headers["retry-after"] = str(max(1, (error.retry_after_ms + 999) // 1000))
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return _response(error_body(error), error.http_status, headers)


def plain_error_response(message: str, status: int, param: str = "", code: str = "") -> Response:
    """Returns the response for an HTTP-level failure, such as an unknown path."""
    return _response(_body(message, status, param, code), status, {})


def error_object(message: str, status: int, param: str, code: str) -> dict[str, Any]:
    """Returns `{"message", "type", "param", "code"}`."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    message = shortened(message, MAX_MESSAGE_LENGTH)
    return {"message": message, "type": kind, "param": param or None, "code": code or None}


def _body(message: str, status: int, param: str, code: str) -> dict[str, Any]:
    return {"error": error_object(message, status, param, code)}


def _response(body: dict[str, Any], status: int, headers: dict[str, str]) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")
