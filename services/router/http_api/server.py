"""The HTTP server of the API, with bounds on connections and headers."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable

from starlette.types import ASGIApp

from services.common.budgets import BudgetPool
from services.common.http.bounds import Bounds
from services.common.http.server import BoundedServer, bind
from services.common.intake.pace import BodyPace
from services.common.net.http_policy import http_policy
from services.common.rpc.auth_interceptor import caller_check
from services.common.security.tls import server_context
from services.common.tasks import TaskOwner
from services.router.http_api.app import HttpApi
from services.router.http_api.bodies import BodyLimits
from services.router.router import Router
from services.router.scheduling.body_intake import BodyIntake
from services.router.service import RouterService
from services.router.settings import RouterSettings

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
    """Listens and serves an application; raises SluiceError if it cannot listen.

    Args:
        tls: None for plain HTTP.
        max_connections: maximum number of open connections.
        timeout_s: longest time for the headers of a request, and for the rest of a body after its response.
        drain_s: longest time for running requests to end.
        on_death: called if the server fails.
    """

    def __init__(
        self,
        app: ASGIApp,
        listen: str,
        tls: ssl.SSLContext | None,
        max_connections: int,
        timeout_s: float,
        drain_s: float,
        on_death: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self._tasks = TaskOwner(on_death)
        bounds = Bounds(max_connections, MAX_HEAD_BYTES, timeout_s, timeout_s, opening_timeout_s=timeout_s)
        self._server = BoundedServer(
            app,
            bind(listen, param="http-listen"),
            keep_alive_s=KEEP_ALIVE_S,
            drain_s=drain_s,
            tls=tls,
            bounds=bounds,
        )
        log.info("HTTP API listens", extra={"address": self._server.address, "tls": tls is not None})

    def start(self) -> None:
        """Starts serving."""
        self._serving = self._tasks.spawn(self._server.serve(), "http-api")

    async def stop(self) -> None:
        """Stops accepting connections, and waits for running requests."""
        self._server.stop()
        await asyncio.wait([self._serving])
        await self._tasks.close()


def http_server(
    settings: RouterSettings,
    router: Router,
    service: RouterService,
    pace: BodyPace,
    on_death: Callable[[str, BaseException], None] | None = None,
) -> HttpApiServer | None:
    """Returns the server of the HTTP API; None if it is off.

    Args:
        pace: turns of large bodies, for all entrances of the process.

    Raises:
        SluiceError: it cannot listen on its address, or a file of its tokens or certificates cannot be used.
    """
    if not settings.http_listen:
        return None
    memory = BudgetPool("body_bytes", MAX_BODIES_BYTES, "")
    intake = BodyIntake(memory, pace)
    limits = BodyLimits(MAX_BODY_BYTES, memory, MAX_ARRIVAL_S, intake)
    api = HttpApi(service, caller_check(settings), limits, router.ready.is_set, settings.open_health)
    tls = server_context(settings)
    bounds = (MAX_CONNECTIONS, MAX_ARRIVAL_S, settings.drain_s)
    policy = http_policy(settings.http_listen, settings.http_allowed_hosts, hosts_setting="--http-allowed-hosts")
    return HttpApiServer(api.app(policy), settings.http_listen, tls, *bounds, on_death)
