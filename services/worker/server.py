"""Runs one worker in this process, with ordered start-up and shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging

from services.common.base.budgets import Budget
from services.common.base.tasks import Stop, TaskOwner
from services.common.observability import scrape_server as scraping
from services.common.rpc.replicas import ReplicaSet
from services.common.rpc.server import GrpcServer
from services.common.security.tls import channel_credentials
from services.worker.engines import find_engine
from services.worker.registration.address import advertised_address, default_worker_id
from services.worker.registration.registration import Registration
from services.worker.serving.canary import Canary
from services.worker.serving.control import Controls
from services.worker.serving.engine_metrics import EngineMetrics
from services.worker.serving.service import WorkerService
from services.worker.serving.session import wait_flushed
from services.worker.serving.worker import Worker
from services.worker.settings import WorkerSettings
from sluice.v1 import router_pb2_grpc, worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

REGISTERING = "registering with a router"
FLUSH_S = 2.0
STOP_SERVER_S = 0.2
MAX_GRAMMAR = 2 << 20
"""Characters of a constraint: a schema, regular expression, grammar or all texts of a choice; more are refused."""
MAX_MEDIA_MB = 64
"""MiB of one media file, which must also fit into the cache; a larger one is refused with TOO_LARGE."""


class WorkerServer:
    """Owns the engine, the worker, its gRPC server and its registration.

    The server listens from the beginning so that probes can observe a starting worker. Requests are accepted once the
    engine is ready; registration follows. Health waits for the first registration, so that a rolling update does not go
    on to the next worker before this one gets requests. Later outages of the routers do not change it.
    """

    def __init__(self, settings: WorkerSettings, stop: Stop, strict: bool = False) -> None:
        self._settings = settings
        self._tasks = TaskOwner(stop.fail)
        self.server = GrpcServer(settings, worker_pb2.DESCRIPTOR)
        self.engine = find_engine(settings.engine).from_args(settings)
        self.worker = Worker(
            self.engine,
            settings.worker_id,
            stop.fail,
            max_live=settings.max_live,
            strict=strict,
            processing=settings.processing_options,
            grammar=Budget("grammar_characters", MAX_GRAMMAR, ""),
            media_bytes=settings.media_cache_mb << 20,
            max_media_bytes=min(MAX_MEDIA_MB, settings.media_cache_mb) << 20,
        )
        scraping.health = self.health
        self.worker.gate.on_serving = self._serving_changed
        self.worker.on_card = self._card_changed
        self.service = WorkerService(self.worker, Controls(self.worker, self._resync), settings.session_pause_s)
        self.registration: Registration | None = None
        self._was_registered = not settings.routers
        self._suspended = ""
        self._engine_metrics = EngineMetrics(self.engine.metrics_text)
        self._routers: ReplicaSet[router_pb2_grpc.RouterAsyncStub] | None = None
        worker_pb2_grpc.add_WorkerServicer_to_server(self.service, self.server.server)

    async def start(self) -> None:
        """Returns when requests are accepted; raises SluiceError when the engine or the server cannot start."""
        settings = self._settings
        await self.server.start()
        self.worker.worker_id = settings.worker_id or default_worker_id(self.server.port)
        template = settings.chat_template
        await self.worker.start(
            chat_template="" if template is None else await asyncio.to_thread(template.read_text, "utf-8"),
            tool_parser=settings.tool_parser,
            reasoning_parser=settings.reasoning_parser,
        )
        self._engine_metrics.register()
        # A vocabulary lives as long as the process; exclude it from every later garbage collection.
        gc.collect()
        gc.freeze()
        if settings.routers:
            await self._register()
        else:
            await self._update_health()
        if settings.canary_s:
            canary = Canary(self.worker, settings.canary_s)
            self._tasks.spawn(canary.run(), "canary")

    def health(self) -> dict[str, object]:
        """Returns the body of `/health` on the metrics port: the status and, while not serving, the current phase."""
        worker, phases = self.worker, self.worker.phases
        phase = phases.name or ("" if self._was_registered else REGISTERING)
        return {
            "status": "draining" if worker.draining else "ok" if not phase else "waiting",
            "worker_id": worker.worker_id,
            "phase": phase,
            "phase_share": phases.share,
            "phase_seconds": round(phases.seconds, 1),
            "registration": "" if self.registration is None else self.registration.trouble,
        }

    async def _register(self) -> None:
        settings = self._settings
        address = settings.advertise or await asyncio.to_thread(
            advertised_address, settings.listen, self.server.port, settings.routers
        )
        self._routers = ReplicaSet(
            "router", settings.routers, router_pb2_grpc.RouterStub, channel_credentials(settings)
        )
        http_address = settings.http_address or self.worker.config.http_address
        self.registration = Registration(self.worker, address, self._routers, http_address, settings.label_values)
        await self._routers.start()
        self._tasks.spawn(self.registration.run(), "registration")
        self._tasks.spawn(self._await_registered(self.registration), "first-registration")

    async def _await_registered(self, registration: Registration) -> None:
        await registration.attached.wait()
        self._was_registered = True
        await self._update_health()

    async def _update_health(self) -> None:
        await self.server.set_serving(self._was_registered and not self._suspended and not self.worker.draining)

    def _serving_changed(self, why: str) -> None:
        """Updates health and registration when the worker is suspended, or resumed with an empty `why`."""
        if self.worker.draining:
            return
        self._suspended = why
        self._tasks.spawn(self._update_health(), "health")
        if self.registration is not None:
            if why:
                self.registration.pause(why)
            else:
                self.registration.resume()

    def _card_changed(self) -> None:
        if self.registration is not None:
            self._tasks.spawn(self.registration.refresh(), "refresh-card")

    def _resync(self) -> bool:
        return self.registration is not None and self.registration.resync()

    async def shut_down(self) -> None:
        """Leaves discovery, waits the grace period, drains, cleans up, stops the server; each step has a deadline."""
        self.worker.draining = True
        await self.server.set_serving(False)
        if self.registration is not None:
            await self.registration.leave("shutdown")
        if self.worker.live_requests or self.service.sessions:
            # Requests routed here before gateways learned of the departure still arrive.
            await asyncio.sleep(self._settings.grace_s)
        await self.worker.drain(self._settings.drain_s)
        await wait_flushed(tuple(self.service.sessions), FLUSH_S)
        await self.service.end_sessions()
        await self.worker.cleanup()
        await self._tasks.close()
        if self._routers is not None:
            await self._routers.close()
        await self.server.stop(STOP_SERVER_S)
        self._engine_metrics.close()
