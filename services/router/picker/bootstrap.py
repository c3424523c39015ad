"""Starts and stops the endpoint picker within a router process."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import AsyncExitStack

from grpc_health.v1 import health_pb2

from services.common.base.budgets import BudgetPool
from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.tasks import TaskOwner
from services.common.rpc.server import GrpcServer
from services.router.picker.gateways import Gateways
from services.router.picker.picker import Picker, PickerConfig
from services.router.picker.server import SERVICE, PickerLimits, PickerService
from services.router.scheduling.body_intake import BodyIntake
from services.router.servers import RunningRouter
from services.router.settings import RouterSettings

FLUSH_S = 2.0
MIN_BODIES_MB = 64
"""MiB of all request bodies in the picker together, including parsed ones, while picker-body-mb is small."""


def read_objectives(texts: list[str]) -> dict[str, int]:
    """Returns priorities by the names of objectives; raises SluiceError (INVALID_ARGUMENT) for an invalid text."""
    found = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            found[name.strip()] = int(number)
        except ValueError:
            raise SluiceError(
                ErrorKind.INVALID_ARGUMENT,
                f"--picker-objectives: {text!r} is not a name and a priority, such as chat=10.",
            ) from None
    return found


def with_own_certificate(settings: RouterSettings) -> RouterSettings:
    """Returns the settings of the picker's servers: with the picker's certificate, if it has one, for all callers.

    Raises:
        SluiceError: INVALID_ARGUMENT if the certificate or its key is missing.
    """
    certificate, key = settings.picker_tls_cert, settings.picker_tls_key
    if (certificate is None) != (key is None):
        message = "picker-tls-cert and picker-tls-key must be set together; one is missing."
        raise SluiceError(ErrorKind.INVALID_ARGUMENT, message)
    if certificate is None:
        return settings
    own = {"tls_cert": certificate, "tls_key": key, "tls_ca": None, "tls_require_client_cert": False}
    return settings.model_copy(update=own)


class PickerServers:
    """The picker of a router process: its gRPC servers, its tasks and the lease of its bookings."""

    def __init__(self, running: RunningRouter) -> None:
        settings, router = running.settings, running.router
        self._settings = with_own_certificate(settings)
        self._owners = router.owners
        self._tasks = TaskOwner(running.on_death)
        self._gateways = Gateways(settings.picker_gateways) if settings.picker_gateways else None
        config = PickerConfig(
            fallbacks=settings.picker_fallbacks,
            objectives=read_objectives(settings.picker_objectives),
            receipts=settings.picker_receipts,
            store_timeout_s=settings.redis_timeout_s,
        )
        self._owner = f"picker/{uuid.uuid4().hex}"
        bodies_mb = max(MIN_BODIES_MB, 4 * settings.picker_body_mb)
        bodies = BudgetPool("picker_bodies", bodies_mb << 20, "--picker-body-mb")
        intake = BodyIntake(bodies, running.pace)
        self._picker = Picker(router, config, running.cost, intake, self._owner, self._gateways)
        limits = PickerLimits(settings.picker_body_mb << 20, close_after_choice=settings.picker_close_after_choice)
        self._service = PickerService(self._picker, limits, bodies, router.metrics)
        self._servers: list[GrpcServer] = []
        self._lease = AsyncExitStack()

    async def start(self) -> None:
        """Starts listening; raises SluiceError if an address cannot be bound."""
        settings = self._settings
        server = GrpcServer(
            settings.model_copy(update={"listen": settings.picker_listen}),
            health_pb2.DESCRIPTOR,
            health_names=(SERVICE,),
        )
        self._service.add_to(server.server)
        self._servers.append(server)
        if settings.picker_health_listen:
            changed = {"listen": settings.picker_health_listen}
            health = GrpcServer(settings.model_copy(update=changed), health_pb2.DESCRIPTOR, health_names=(SERVICE,))
            self._servers.append(health)
        if self._gateways is not None:
            await self._gateways.resolve()
            self._tasks.spawn(self._gateways.resolve_forever(), "picker-gateways")
        self._tasks.spawn(self._picker.releases.run(), "picker-releases")
        for each in self._servers:
            await each.start()

    async def set_serving(self, serving: bool) -> None:
        """Reports readiness; of a stopping router, returns when Envoy's health checks have seen it."""
        if serving:
            await self._lease.enter_async_context(self._owners.stream(self._owner))
        for each in self._servers:
            await each.set_serving(serving)
        if not serving:
            await asyncio.sleep(self._settings.picker_notice_s)

    async def stop(self, grace_s: float) -> None:
        """Lets requests finish for `grace_s` seconds and releases the others' bookings."""
        await self._servers[0].stop(grace_s)
        await self._picker.releases.flush(FLUSH_S)
        await self._lease.aclose()
        for each in self._servers[1:]:
            await each.stop(0)
        await self._tasks.close()
