"""What a failure of Redis means: the one place that reads errors, for every user of Redis and every topology."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from redis.exceptions import (
    AskError,
    BusyLoadingError,
    ClusterDownError,
    MaxConnectionsError,
    MovedError,
    NoScriptError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import TimeoutError as RedisTimeout

FAILURES = (RedisError, RedisClusterException, OSError)
"""Every failure of Redis, inside `closed_is_lost`; TimeoutError is an OSError."""

_CLOSED = "the handler is closed"
_NO_CONNECTION = "No connection available."  # redis-py's text for a pool whose connections are all in use


class Failure(Enum):
    """What happened to a call.

    Only after LOST and TIMEOUT may the server have executed it; every other failure is a refusal.
    """

    LOST = "lost"  # the connection broke, or could not be opened; logins that fail too
    TIMEOUT = "timeout"  # no reply in time: the server is overloaded or frozen, or its host is gone
    DEMOTED = "demoted"  # READONLY, UNBLOCKED: the server is a replica, so there is another master
    MOVED = "moved"  # MOVED: another server of the cluster serves the slot, and the reply names it
    MIGRATING = "migrating"  # ASK: some keys of the slot are at another server already
    UNSETTLED = "unsettled"  # TRYAGAIN: the keys of the call are at two servers
    DOWN = "down"  # CLUSTERDOWN, MASTERDOWN, NOREPLICAS: no master serves the slot at present
    LOADING = "loading"  # the server has started and reads its data
    UNKNOWN_SCRIPT = "unknown_script"  # NOSCRIPT
    POOL = "pool"  # all connections of the client are in use
    REFUSED = "refused"  # anything else that the server answers: out of memory, an error in a script

    @property
    def searches(self) -> bool:
        """Whether the masters must be found anew."""
        return self in _SEARCHED

    @property
    def distrusts(self) -> bool:
        """Whether the other connections to the server are suspect, and must not be used again."""
        return self in (Failure.LOST, Failure.TIMEOUT, Failure.DEMOTED)


_SEARCHED = (
    Failure.LOST,
    Failure.TIMEOUT,
    Failure.DEMOTED,
    Failure.MOVED,
    Failure.MIGRATING,
    Failure.UNSETTLED,
    Failure.DOWN,
    Failure.LOADING,
)

_BY_TYPE: tuple[tuple[type[BaseException], Failure], ...] = (
    # The order matters: MovedError is an AskError, BusyLoadingError and MaxConnectionsError are ConnectionErrors.
    (MovedError, Failure.MOVED),
    (AskError, Failure.MIGRATING),
    (TryAgainError, Failure.UNSETTLED),
    (ClusterDownError, Failure.DOWN),  # and MasterDownError
    (BusyLoadingError, Failure.LOADING),
    (NoScriptError, Failure.UNKNOWN_SCRIPT),
    (ReadOnlyError, Failure.DEMOTED),
    (MaxConnectionsError, Failure.POOL),
    (ConnectionLost, Failure.LOST),
    (RedisTimeout, Failure.TIMEOUT),
    (TimeoutError, Failure.TIMEOUT),
    (RedisClusterException, Failure.DOWN),
    (OSError, Failure.LOST),
)

_BY_TEXT = (
    # Codes that redis-py has no type for.
    ("UNBLOCKED", Failure.DEMOTED),
    ("NOREPLICAS", Failure.DOWN),
    ("ERR Script attempted to access a non local key", Failure.MIGRATING),
    ("Script attempted to access a non local key", Failure.MIGRATING),
)


def classify(error: BaseException) -> Failure:
    """Returns what an exception of redis-py, asyncio or the operating system means for the call that raised it."""
    if isinstance(error, ConnectionLost) and str(error) == _NO_CONNECTION:
        return Failure.POOL
    for kind, failure in _BY_TYPE:
        if isinstance(error, kind):
            return failure
    text = str(error)
    return next((failure for start, failure in _BY_TEXT if text.startswith(start)), Failure.REFUSED)


def is_closed(error: RuntimeError) -> bool:
    """Returns whether a write failed because its connection is closed.

    uvloop raises a bare RuntimeError on writes to a connection that was reset while idle, and redis-py does not always
    check first. Other RuntimeErrors are programming errors.
    """
    return _CLOSED in str(error)


@contextmanager
def closed_is_lost() -> Iterator[None]:
    """Raises ConnectionError, which FAILURES includes, for a connection that is found closed."""
    try:
        yield
    except RuntimeError as error:
        if not is_closed(error):
            raise
        raise ConnectionLost(f"closed while idle: {error}") from error
