"""The HTTP server of the API, with bounds on connections and headers."""

from __future__ import annotations

import asyncio
import logging
import ssl

from starlette.types import ASGIApp

from services.common.base.budgets import BudgetPool
from services.common.base.tasks import TaskOwner
from services.common.net.http.bounds import Bounds
from services.common.net.http.server import BoundedServer, bind
from services.common.net.http_policy import http_policy
from services.common.rpc.auth_interceptor import caller_check
from services.common.security.tls import server_context
from services.router.http_api.app import HttpApi
from services.router.http_api.bodies import BodyLimits
from services.router.scheduling.body_intake import BodyIntake
from services.router.servers import RunningRouter

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 60
MAX_HEAD_BYTES = 64 << 10
"""Bytes of the headers of a request to the HTTP twin; more are refused with status 431."""
MAX_CONNECTIONS = 1_024
"""Open connections of the HTTP API; further ones are closed at once."""
MAX_ARRIVAL_S = 10.0
"""Seconds in which the headers, and then the body, of a request arrive; then status 408."""
MAX_BODY_BYTES = 4 << 20
"""Bytes of a body; a larger one is refused with TOO_LARGE."""
MAX_BODIES_BYTES = 64 << 20
"""Bytes of all bodies together, including parsed ones; more are OVERLOADED, budget `body_bytes`."""


class HttpApiServer:
    """The HTTP API of a router process.

    Raises:
        SluiceError: it cannot listen on its address, or a file of its tokens or certificates cannot be used.
    """

    def __init__(self, running: RunningRouter) -> None:
        settings = running.settings
        memory = BudgetPool("body_bytes", MAX_BODIES_BYTES, "")
        limits = BodyLimits(MAX_BODY_BYTES, memory, MAX_ARRIVAL_S, BodyIntake(memory, running.pace))
        api = HttpApi(
            running.service, caller_check(settings), limits, running.router.ready.is_set, settings.open_health
        )
        policy = http_policy(settings.http_listen, settings.http_allowed_hosts, hosts_setting="--http-allowed-hosts")
        tls = server_context(settings)
        self._server = bounded_server(api.app(policy), settings.http_listen, tls, settings.drain_s)
        self._tasks = TaskOwner(running.on_death)
        log.info("HTTP API listens", extra={"address": self._server.address, "tls": tls is not None})

    async def start(self) -> None:
        """Starts serving."""
        self._serving = self._tasks.spawn(self._server.serve(), "http-api")

    async def set_serving(self, serving: bool) -> None:
        """Does nothing: `/health` shows whether the router is ready."""

    async def stop(self, grace_s: float) -> None:
        """Stops accepting connections, and waits for running requests."""
        self._server.stop()
        await asyncio.wait([self._serving])
        await self._tasks.close()


def bounded_server(app: ASGIApp, listen: str, tls: ssl.SSLContext | None, drain_s: float) -> BoundedServer:
    """Returns a server of an application, which listens; raises SluiceError if it cannot.

    Args:
        drain_s: longest time for running requests to end.
    """
    bounds = Bounds(MAX_CONNECTIONS, MAX_HEAD_BYTES, MAX_ARRIVAL_S, MAX_ARRIVAL_S, opening_timeout_s=MAX_ARRIVAL_S)
    listening = bind(listen, param="http-listen")
    return BoundedServer(app, listening, keep_alive_s=KEEP_ALIVE_S, drain_s=drain_s, tls=tls, bounds=bounds)
