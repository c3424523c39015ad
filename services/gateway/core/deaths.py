"""Which errors of a worker may be its end by the request that it was running.

A worker that dies does not say which of its requests ended it, so a request gets one more worker after a death and no
third one: it ends two at most.
"""

from __future__ import annotations

from services.common.base.errors import (
    ENGINE_UNHEALTHY,
    NOT_STARTED,
    SESSION_CLOSED,
    SHUTTING_DOWN,
    STEP_FAILED,
    ErrorKind,
    SluiceError,
)

MAX_DEATHS = 2
"""Workers that may die while they run a request without output, its first one and one more; then it fails."""
_KNOWN_CAUSES = frozenset({SESSION_CLOSED, SHUTTING_DOWN, NOT_STARTED})
_WORKER_CODES = frozenset({ENGINE_UNHEALTHY, STEP_FAILED})


def is_death(error: SluiceError, sent: bool = True) -> bool:
    """Returns whether a worker, or a step of its engine, ended for no known cause while it may have run a request.

    Args:
        sent: whether the request may have reached the worker.
    """
    if error.code in _KNOWN_CAUSES:
        return False
    if error.kind is ErrorKind.DISCONNECTED:
        return sent
    return error.kind is ErrorKind.ENGINE_SHUTDOWN or error.code in _WORKER_CODES
