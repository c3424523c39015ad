"""Reads routing hints from the headers of several schedulers."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.base.errors import SluiceError, invalid
from services.common.observability.receipts import ASKED, is_asked
from services.gateway.core import context
from services.gateway.core.routing_hints import MAX_RANKS, NO_HINTS, RoutingHints
from services.gateway.http.errors import error_response

# The first header present counts: Sluice, Dynamo, its older form, llm-d or vLLM, Gateway API.
WORKER = ("x-sluice-worker", "x-dynamo-worker-instance-id", "x-worker-instance-id", "x-data-parallel-host-port")
ENDPOINT = "x-gateway-destination-endpoint"
PREFILL = (
    "x-sluice-prefill-worker",
    "x-dynamo-prefill-instance-id",
    "x-prefill-instance-id",
    "x-prefiller-host-port",
)
RANK = ("x-sluice-dp-rank", "x-dynamo-dp-rank", "x-dp-rank", "x-data-parallel-rank")
PREFILL_RANK = ("x-sluice-prefill-dp-rank", "x-dynamo-prefill-dp-rank", "x-prefill-dp-rank")
SUBSET = "x-gateway-destination-endpoint-subset"
_FIELDS = {"workers": WORKER, "endpoints": (ENDPOINT,), "prefill": PREFILL, "rank": RANK, "prefill_rank": PREFILL_RANK}
HEADERS = {name.encode(): name for name in (*WORKER, ENDPOINT, *PREFILL, *RANK, *PREFILL_RANK, SUBSET, ASKED)}
"""All of these headers, by their ASGI names."""


def of_headers(headers: Mapping[str, str]) -> RoutingHints:
    """Returns the hints in headers; raises SluiceError(INVALID_ARGUMENT) for an invalid rank."""
    sources = {}
    for field, names in _FIELDS.items():
        if (source := next((name for name in names if headers.get(name)), None)) is not None:
            sources[field] = source

    def items(field: str) -> tuple[str, ...]:
        return _split(headers[sources[field]]) if field in sources else ()

    subset = headers.get(SUBSET)
    return RoutingHints(
        workers=items("workers"),
        endpoints=items("endpoints"),
        prefill=items("prefill"),
        rank=_rank(headers, sources.get("rank")),
        prefill_rank=_rank(headers, sources.get("prefill_rank")),
        subset=None if subset is None else _split(subset),
        receipt=is_asked(headers.get(ASKED, "")),
        sources=sources,
    )


class RoutingHintHeaders:
    """Sets the routing hints of each request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http":
            present = {HEADERS[name]: value for name, value in scope["headers"] if name in HEADERS}
            routing_hints = NO_HINTS
            if present:
                try:
                    routing_hints = of_headers(
                        {name: value.decode("latin-1").strip() for name, value in present.items()}
                    )
                except SluiceError as error:
                    return error_response(error)(scope, receive, send)
            context.enter(context.current()._replace(hints=routing_hints))
        return self._app(scope, receive, send)


def _split(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


def _rank(headers: Mapping[str, str], name: str | None) -> int | None:
    if name is None:
        return None
    text = headers[name]
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and int(text) < MAX_RANKS):
        raise invalid(
            f"The header {name} must be a data-parallel rank, a whole number from 0.", param=name, code="invalid_value"
        )
    return int(text)
