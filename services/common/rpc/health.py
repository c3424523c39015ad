"""gRPC health (`grpc.health.v1`) whose watchers let go when the server ends.

With the servicer of the grpc package a watch ends only with its caller, so that one watcher makes every drain last for
its whole time limit; and it writes under a lock, so that one stalled watcher keeps all others from hearing anything.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.budgets import BudgetPool
from services.common.errors import LONGEST_NAME, ErrorKind, quoted
from services.common.rpc.errors import abort
from sluice import __version__

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


LIVE = "live"
"""A name whose status is SERVING as long as the process answers at all, also while it loads or drains."""
VERSION_KEY, CLOCK_KEY = "sluice-version", "sluice-unix-ms"
"""Trailing metadata of every Check: which version answers, and what time it is there."""


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the package has no types
    """What every service answers about itself; the empty name stands for the whole server.

    Args:
        watches: bounds the streams that are open at once; callers beyond them can ask with Check.
    """

    def __init__(self, watches: BudgetPool) -> None:
        self._watches = watches
        self._statuses: dict[str, int] = {LIVE: SERVING}
        self._changed = asyncio.Event()
        self._over = False

    def set(self, service: str, serving: bool) -> None:
        """Says whether requests are welcome; after `close` they never are."""
        self._statuses[service] = SERVING if serving and not self._over else NOT_SERVING
        self._tell()

    def close(self) -> None:
        """Nothing is served any more: watchers hear that and their calls end."""
        self._over = True
        self._statuses = {name: SERVING if name == LIVE else NOT_SERVING for name in self._statuses}
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        context.set_trailing_metadata(((VERSION_KEY, __version__), (CLOCK_KEY, str(int(time.time() * 1000)))))
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"Service {quoted(request.service)} is not served here.")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        if len(request.service) > LONGEST_NAME:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"A service's name has at most {LONGEST_NAME} characters."
            )
        if not self._watches.try_take(1):
            reason = f"{self._watches.limit} health streams are open; ask with Check"
            await abort(context, self._watches.refuse(reason, kind=ErrorKind.OVERLOADED, retry_after_ms=1000))
        try:
            await self._follow(request, context)
        finally:
            self._watches.give_back(1)

    async def _follow(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        said = None
        while True:
            changed = self._changed  # taken before the status is read: no change can be missed
            status = self._statuses.get(request.service, SERVICE_UNKNOWN)
            if status != said:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                said = status
            elif self._over:
                return
            else:
                await changed.wait()
