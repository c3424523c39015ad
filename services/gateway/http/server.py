"""The HTTP server of the gateway: uvicorn within bounds."""

from __future__ import annotations

import ssl
from functools import partial

from starlette.types import ASGIApp

from services.common.net.http.bounds import Bounds
from services.common.net.http.server import BoundedServer, bind
from services.gateway.http.connection import GatewayConnection
from services.gateway.http.socket_pace import SocketPace
from services.gateway.http.socket_protocol import BoundedSocketProtocol

GIVE_UP_S = 1.0
"""Time after the drain in which streams that were ended send their last events."""


class HttpServer(BoundedServer):
    """HTTP server of the gateway's application.

    Args:
        listen: host:port; port 0 selects a free port.
        keep_alive_s: time after which idle connections are closed.
        drain_s: longest time for running requests to end after `stop`.
        tls: None for plain HTTP.
        bounds: bounds on connections.
        reuse_port: whether other processes may listen on the same port.
        pings: seconds between the pings of an idle WebSocket (0: none), and longest wait for their answers.
    """

    def __init__(
        self,
        app: ASGIApp,
        listen: str,
        keep_alive_s: int,
        drain_s: float,
        tls: ssl.SSLContext | None = None,
        bounds: Bounds | None = None,
        reuse_port: bool = False,
        pings: tuple[float, float] = (15.0, 60.0),
    ) -> None:
        super().__init__(
            app,
            bind(listen, reuse_port),
            keep_alive_s=keep_alive_s,
            drain_s=drain_s,
            tls=tls,
            bounds=bounds,
            connection=GatewayConnection,
            sockets={
                "ws": partial(BoundedSocketProtocol, pace=SocketPace()),
                "ws_ping_interval": pings[0] or None,
                "ws_ping_timeout": pings[1],
                "ws_per_message_deflate": False,  # a short message must not expand to a long one
            },
        )
