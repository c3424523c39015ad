"""A gRPC server with the features common to all services: health, reflection, keepalive, TLS, limits, draining."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import grpc
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.common.base.budgets import BudgetPool
from services.common.base.errors import ErrorKind, SluiceError
from services.common.net.addresses import host_port, join, listens_on_loopback
from services.common.observability import scrape_server as scraping
from services.common.rpc.auth_interceptor import access_interceptors
from services.common.rpc.channels import KEEPALIVE_MS, KEEPALIVE_OPTIONS, MIN_PING_INTERVAL_MS
from services.common.rpc.guarded_server import GuardedServer
from services.common.rpc.health import READINESS, Health
from services.common.security.tls import server_credentials
from services.common.settings.service import GrpcServiceSettings

log = logging.getLogger(__name__)

MAX_PENDING_CALLS = 20_000
"""Calls that wait to be started, where gRPC's own default is 1,000; further ones are cancelled."""


MAX_HEALTH_WATCHES = 1_024
"""Open health streams; further callers are refused, budget `health_watches`, and must poll."""
STREAM_WINDOW = 128 << 10
"""Bytes that a client may send on a stream before they are read; a message of which a part is read may be sent whole.

gRPC's own choice grows with the throughput of the connection to several MiB of each stream.
"""
WINDOW_OPTIONS = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", STREAM_WINDOW))


class GrpcServer:
    """One listening gRPC server.

    Register servicers on `server`, then call `start`. Health reports NOT_SERVING until `set_serving(True)` and once
    `stop` begins; for the name "live" it always reports SERVING.

    Args:
        health_names: further names that health reports for, such as services that another server has.
        keepalive_ms: how long a connection may be silent before its client is pinged.
    """

    def __init__(
        self,
        settings: GrpcServiceSettings,
        descriptor: FileDescriptor,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        health_names: Sequence[str] = (),
        keepalive_ms: int = KEEPALIVE_MS,
    ) -> None:
        self._settings = settings
        self._services = [service.full_name for service in descriptor.services_by_name.values()]
        self._health_names = ("", READINESS, *self._services, *health_names)
        limit = settings.max_message_mb << 20
        options: list[tuple[str, int]] = [
            ("grpc.max_receive_message_length", limit),
            ("grpc.max_send_message_length", limit),
            ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.keepalive_time_ms", keepalive_ms),
            *KEEPALIVE_OPTIONS,
            *WINDOW_OPTIONS,
            ("grpc.so_reuseport", 0),  # fail on a port in use instead of sharing it silently
            ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
            ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        ]
        if settings.max_connection_age_s:
            options.append(("grpc.max_connection_age_ms", int(settings.max_connection_age_s * 1000)))
        self.server: grpc.aio.Server = GuardedServer(
            grpc.aio.server(interceptors=(*access_interceptors(settings), *interceptors), options=options)
        )
        self._health = Health(BudgetPool("health_watches", MAX_HEALTH_WATCHES, ""))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        if listens_on_loopback(settings.listen) if settings.reflection is None else settings.reflection:
            names = (
                *self._services,
                health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
                reflection.SERVICE_NAME,
            )
            reflection.enable_server_reflection(names, self.server)
        self.port = 0

    async def start(self) -> None:
        """Starts listening; raises SluiceError when the address cannot be bound or TLS files are invalid."""
        await self.set_serving(False)
        credentials = server_credentials(self._settings)
        listen = self._settings.listen
        if (parsed := host_port(listen)) is None:  # gRPC would wrap ports above 65535
            raise SluiceError(ErrorKind.INVALID_ARGUMENT, f"--listen {listen!r} is not host:port.")
        try:
            self.port = (
                self.server.add_insecure_port(listen)
                if credentials is None
                else self.server.add_secure_port(listen, credentials)
            )
        except RuntimeError as error:
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                f"Cannot listen on {listen}: the port is taken or the address is not one of this machine.",
            ) from error
        await self.server.start()
        log.info("gRPC server listens", extra={"address": join(parsed[0], self.port), "tls": credentials is not None})

    async def set_serving(self, serving: bool) -> None:
        """Sets whether the health service reports that requests are accepted."""
        scraping.serving = serving
        for name in self._health_names:
            self._health.set(name, serving)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, lets running ones finish for `grace_s` seconds, then cancels them."""
        self._health.close()
        await self.server.stop(grace_s)
