"""The HTTP request that Envoy asks about: its headers and the endpoints it may go to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from services.router.scheduling.queries import MAX_MS
from services.router.scheduling.request_bodies import Api, api_of

MAX_HEADER = 512
"""Characters of a header from which the endpoint picker takes a name; the rest is ignored."""

REQUEST_ID = "x-request-id"
SESSION = "x-session-id"
# Each with its older name.
OBJECTIVE = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
REWRITE = ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite")
FIRST_TOKEN_MS = ("x-llm-d-slo-ttft-ms", "x-gateway-slo-ttft-ms")
QUERY_HEADERS = {"fairness_id": ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")}
"""Fields of the query that a header gives as they are."""

_SCHEDULING = frozenset(chain(OBJECTIVE, REWRITE, FIRST_TOKEN_MS, *QUERY_HEADERS.values()))

SUBSET_NAMESPACE, SUBSET_KEY = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
SERVED_NAMESPACE, SERVED_KEY = "envoy.lb", "x-gateway-destination-endpoint-served"


@dataclass(slots=True)
class HttpRequest:
    """Head of a request.

    Attributes:
        model: that the request is rewritten to; empty: the one in its body.
        objective: name of the InferenceObjective, which sets the priority.
        first_token_ms: when the first token is due, milliseconds after the request; 0: no deadline.
        subset: the only endpoints that may be chosen, as ``ip`` or ``ip:port``; None: all.
        fields: of the query, as headers name them.
    """

    method: str = "POST"
    path: str = ""
    request_id: str = ""
    model: str = ""
    objective: str = ""
    session_id: str = ""
    first_token_ms: int = 0
    subset: tuple[str, ...] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def api(self) -> Api | None:
        """The API that its path belongs to."""
        return api_of(self.path)

    def allows(self, endpoint: str) -> bool:
        """Returns whether an endpoint, ``ip:port``, is in the subset."""
        if self.subset is None:
            return True
        return endpoint in self.subset or endpoint.rpartition(":")[0].strip("[]") in self.subset


def read_head(headers: Mapping[str, str]) -> HttpRequest:
    """Returns the head of a request from its headers, with lower-case names; ignores malformed objectives."""
    request = HttpRequest(
        headers.get(":method", "POST"),
        headers.get(":path", ""),
        headers.get(REQUEST_ID, "")[:MAX_HEADER],
        session_id=headers.get(SESSION, "")[:MAX_HEADER],
        headers=headers,
    )
    if not _SCHEDULING.isdisjoint(headers):
        request.model, request.objective = _first(headers, REWRITE), _first(headers, OBJECTIVE)
        request.first_token_ms = _milliseconds(_first(headers, FIRST_TOKEN_MS))
        request.fields = {name: _first(headers, names) for name, names in QUERY_HEADERS.items()}
    return request


def _first(headers: Mapping[str, str], names: Sequence[str]) -> str:
    return next((value[:MAX_HEADER] for name in names if (value := headers.get(name))), "")


def endpoints_of(value: Any) -> tuple[str, ...] | None:
    """Returns the endpoints in a string with commas, or in a list of such strings; None for None."""
    if value is None:
        return None
    texts = [value] if isinstance(value, str) else value
    parts = (part.strip() for text in texts for part in str(text).split(","))
    return tuple(part for part in parts if part)


def _milliseconds(text: str) -> int:
    try:
        number = float(text)
    except ValueError:
        return 0
    return int(number) if 0 < number <= MAX_MS else 0
