"""Anthropic's conventions: versions, which requests use its API, and the format of its errors."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

from services.common.base.errors import SluiceError
from services.gateway.http.error_formats import ErrorFormat, HttpError

VERSIONS = ("2023-06-01", "2026-10-21")
"""Accepted API versions. `temperature`, `top_p` and `top_k`, which the second one removed, work with both."""
THREADS_UNSUPPORTED = "thread_unsupported_request"
"""Code after which Anthropic's SDKs repeat a request without `thread`."""
_PATHS = "/v1/messages"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_type(status: int) -> str:
    """Returns Anthropic's error type for an HTTP status."""
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def error_body(status: int, message: str, request_id: str, code: str | None = None) -> dict[str, Any]:
    """Returns `{"type": "error", "error": {"type", "message"}, "request_id"}`; some codes add details."""
    error: dict[str, Any] = {"type": error_type(status), "message": message}
    if code == THREADS_UNSUPPORTED:
        error["details"] = {"error_code": code, "unsupported": ["thread"]}
    return {"type": "error", "error": error, "request_id": request_id}


def error_event_body(error: SluiceError, request_id: str) -> dict[str, Any]:
    """Returns the error body for an error in the middle of a stream."""
    return error_body(error.http_status, error.message, request_id)


def speaks_anthropic(scope: Scope) -> bool:
    """Returns whether a request uses Anthropic's API, by its path or by the header that all Anthropic clients send."""
    path: str = scope["path"]
    if path == _PATHS or path.startswith(_PATHS + "/"):
        return True
    return path.startswith("/v1/models") and any(name == b"anthropic-version" for name, _ in scope["headers"])


def _body(error: HttpError) -> dict[str, Any]:
    return error_body(error.status, error.message, error.request_id, error.code)


ERROR_FORMAT = ErrorFormat(speaks_anthropic, _body, b"request-id")
