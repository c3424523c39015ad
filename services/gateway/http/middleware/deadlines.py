"""Sets the deadline of each HTTP request from its headers and the settings."""

from __future__ import annotations

from collections.abc import Awaitable
from math import inf

from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.base.errors import SluiceError
from services.gateway.core import context, deadlines
from services.gateway.core.deadlines import Deadline
from services.gateway.http.errors import error_response

_MS = deadlines.TIMEOUT_MS_HEADER.encode()
_GRPC = deadlines.GRPC_TIMEOUT_HEADER.encode()


class DeadlineMiddleware:
    """Sets the deadline of each request.

    Args:
        longest_s: longest timeout, and that of requests without one; 0 for no limit.
    """

    def __init__(self, app: ASGIApp, longest_s: float) -> None:
        self._app = app
        self._longest_s = longest_s or inf

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http":
            try:
                deadline = Deadline.after(min(self._timeout_s(scope), self._longest_s))
            except SluiceError as error:
                return error_response(error)(scope, receive, send)
            context.enter(context.current()._replace(deadline=deadline))
        return self._app(scope, receive, send)

    def _timeout_s(self, scope: Scope) -> float:
        """Returns the shorter timeout of both headers."""
        timeout_s = inf
        for name, value in scope["headers"]:
            if name == _MS:
                timeout_s = min(timeout_s, deadlines.parse_timeout_ms(value.decode("latin-1").strip()))
            elif name == _GRPC:
                timeout_s = min(timeout_s, deadlines.parse_grpc_timeout(value.decode("latin-1").strip()))
        return timeout_s
