"""Counts HTTP responses."""

from __future__ import annotations

import re
from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.metrics import GatewayMetrics

_PATHS_WITH_NAMES = (
    (re.compile(r"^/v1/models/.+$"), "/v1/models/{model}"),
    (re.compile(r"^/v1/responses/(?!(?:input_tokens|compact)$)[^/]+"), "/v1/responses/{response_id}"),
    (re.compile(r"^(/v1/conversations/[^/]+/items)/[^/]+$"), r"\1/{item_id}"),
    (re.compile(r"^/v1/conversations/[^/]+"), "/v1/conversations/{conversation_id}"),
)


class ResponseCounter:
    """Counts HTTP responses by path and status.

    Args:
        paths: paths of the OpenAPI document; all others are counted as `other`.
    """

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, paths: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http":
            return self._app(scope, receive, send)
        path = self._label(scope["path"])
        counted = False

        def counting_send(message: Message) -> Awaitable[None]:
            nonlocal counted
            if not counted:
                counted = True
                self._metrics.answered(path, message["status"])
            return send(message)

        return self._app(scope, receive, counting_send)

    def _label(self, path: str) -> str:
        if path not in self._paths:
            for pattern, label in _PATHS_WITH_NAMES:
                path = pattern.sub(label, path, count=1)
        return path if path in self._paths else "other"
