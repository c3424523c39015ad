"""The gRPC health service (`grpc.health.v1`), with watches that end when the server stops.

With the grpc package's servicer, a watch ends only with its caller, so one watcher makes every drain last its full time
limit; and it writes under a lock, so one stalled watcher blocks updates to all others.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.base.budgets import BudgetPool
from services.common.base.errors import MAX_NAME_LENGTH, ErrorKind, quoted
from services.common.rpc.errors import abort
from sluice import __version__

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


LIVE = "live"
"""A service name whose status is SERVING as long as the process responds, even while it loads or drains."""
_ALIVE = (LIVE, "liveness")
READINESS = "readiness"
"""The entire server, under the name that endpoint pickers have for it; theirs for LIVE is ``liveness``."""
VERSION_KEY, CLOCK_KEY = "sluice-version", "sluice-unix-ms"
"""Trailing metadata of every Check: the server's version and clock."""


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the package has no types
    """The health of one server; the empty name stands for the entire server.

    Args:
        watches: limits the number of open Watch streams; further callers must use Check.
    """

    def __init__(self, watches: BudgetPool) -> None:
        self._watches = watches
        self._statuses: dict[str, int] = dict.fromkeys(_ALIVE, SERVING)
        self._changed = asyncio.Event()
        self._closed = False

    def set(self, service: str, serving: bool) -> None:
        """Sets whether a service accepts requests; has no effect after `close`."""
        self._statuses[service] = SERVING if serving and not self._closed else NOT_SERVING
        self._notify()

    def close(self) -> None:
        """Reports NOT_SERVING to all watchers and ends their calls."""
        self._closed = True
        self._statuses = {name: SERVING if name in _ALIVE else NOT_SERVING for name in self._statuses}
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        context.set_trailing_metadata(((VERSION_KEY, __version__), (CLOCK_KEY, str(int(time.time() * 1000)))))
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"Unknown service {quoted(request.service)}.")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        if len(request.service) > MAX_NAME_LENGTH:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"The service name exceeds {MAX_NAME_LENGTH} characters; shorten it."
            )
        if not self._watches.try_take(1):
            reason = f"{self._watches.limit} health streams are open; use Check instead"
            await abort(context, self._watches.refuse(reason, kind=ErrorKind.OVERLOADED, retry_after_ms=1000))
        try:
            await self._follow(request, context)
        finally:
            self._watches.give_back(1)

    async def _follow(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        reported = None
        while True:
            changed = self._changed  # read before the status, so that no change is missed
            status = self._statuses.get(request.service, SERVICE_UNKNOWN)
            if status != reported:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                reported = status
            elif self._closed:
                return
            else:
                await changed.wait()
