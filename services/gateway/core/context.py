"""The context of one HTTP request: what applies to all work on it, wherever in the gateway that runs.

One context variable holds it, because HTTP middleware and custom stages do not pass arguments on. A stream keeps the
context of its request, because the messages of workers arrive in other tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import NamedTuple

from services.common.observability.audit import AuditEntry
from services.gateway.admission.permit import OPEN, Permit
from services.gateway.core.deadlines import NO_DEADLINE, Deadline
from services.gateway.core.routing_hints import NO_HINTS, RoutingHints


class PromptTimes(NamedTuple):
    """When tokenization of a request's prompt started and ended, seconds of `perf_counter`."""

    started_at: float
    ended_at: float


class RequestContext(NamedTuple):
    """What applies to all work on one request.

    Attributes:
        permit: what its API key allows, and what it has used.
        deadline: when it must have ended.
        hints: constraints on the workers that run it.
        session_id: the router's id of its session; empty: no session.
        audit: its entry in the audit log; None without an audit log.
        prompt_times: when its prompt was tokenized; None unless the live view is on.
    """

    permit: Permit = OPEN
    deadline: Deadline = NO_DEADLINE
    hints: RoutingHints = NO_HINTS
    session_id: str = ""
    audit: AuditEntry | None = None
    prompt_times: PromptTimes | None = None


NO_CONTEXT = RequestContext()

_current: ContextVar[RequestContext] = ContextVar("request", default=NO_CONTEXT)


current: Callable[[], RequestContext] = _current.get
"""Returns the context of the current request; one without any constraints outside of requests."""

enter: Callable[[RequestContext], object] = _current.set
"""Sets the context of the current request, for this task and those that it starts."""
