"""Builds the components of a gateway process, starts them, and stops them in order."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.types import ASGIApp

from services.common.base.errors import MAX_MESSAGE_LENGTH, sentence
from services.common.base.tasks import Stop, TaskOwner
from services.common.net.http.bounds import Bounds
from services.common.net.intake.pace import BodyPace
from services.common.observability.audit import AuditLog
from services.common.packages.extensions import APIS, OBSERVERS, ExtensionGroup, load_group
from services.common.rpc.replicas import ReplicaSet
from services.common.security.tls import channel_credentials, https_context
from services.gateway.admission.builder import build_gate
from services.gateway.admission.gate import Gate
from services.gateway.apis.openai.embeddings import EmbeddingOperations
from services.gateway.apis.openai.operations import OpenAIOperations
from services.gateway.apis.openai.tokens import TokenOperations
from services.gateway.apis.parts import ApiParts
from services.gateway.apis.routes import ApiRoutes
from services.gateway.app.application import add_no_observer, bare_app, create_app, entrance
from services.gateway.app.readiness import Readiness
from services.gateway.backends.placement.routers import ServiceRouter
from services.gateway.backends.rpc.link import MAX_CONNECT_S
from services.gateway.backends.rpc.preprocess import PreprocessClient
from services.gateway.backends.rpc.router import RouterClient
from services.gateway.backends.rpc.token_bytes import TokenPieces
from services.gateway.backends.workers.connections import ConnectionManager
from services.gateway.backends.workers.embeddings import MAX_EMBED_S, EmbedClient
from services.gateway.backends.workers.fleet_control import FleetControl
from services.gateway.backends.workers.fleet_store import FleetStore, MemoryFleetStore
from services.gateway.backends.workers.model_waits import ModelWaits
from services.gateway.backends.workers.registry import WorkerRegistry
from services.gateway.backends.workers.tokenizer_parity import TokenizerParity
from services.gateway.http.body_memory import BodyMemory
from services.gateway.http.json_transport import BodyReader, HttpTransport
from services.gateway.http.keepalive import KeepaliveMonitor
from services.gateway.http.middleware.audit import open_audit_log
from services.gateway.http.server import GIVE_UP_S, HttpServer
from services.gateway.http.write_scheduler import WriteScheduler
from services.gateway.metrics import SILENT, GatewayMetrics
from services.gateway.operations.registry import Operations
from services.gateway.operations.runner import AnswerRunner
from services.gateway.pipeline.models import Pipelines
from services.gateway.pipeline.observation import GatewayObserver
from services.gateway.pipeline.stages import Components
from services.gateway.settings import GatewaySettings
from services.gateway.streams.audit import AuditObserver
from services.gateway.streams.interfaces import StreamObserver
from services.gateway.streams.manager import StreamManager
from services.gateway.streams.running import MAX_STREAMS, POST_WAIT_S, shutting_down
from services.gateway.streams.watchdog import WorkerWatchdog

log = logging.getLogger(__name__)

FLUSH_REPORTS_S = 1.0
STARTUP_WAIT_S = 2.0
MAX_STALL_S = 120.0
"""Seconds without new tokens or text of a generation; then it fails."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway process, apart from its HTTP server.

    Attributes:
        pieces: the bytes of single tokens, for log-probabilities.
        parity: compares the tokenizers of preprocess and of the workers.
        gate: admits requests.
        apis: those that are installed beside the kernel's.
        observer: None if it is disabled or not installed.
        fleet: runs control actions on workers.
        fleet_store: what gateways share about the workers that they operate.
        pace: schedules large bodies.
    """

    components: Components
    router: RouterClient
    pipelines: Pipelines
    pieces: TokenPieces
    parity: TokenizerParity
    readiness: Readiness
    gate: Gate
    apis: ExtensionGroup
    observer: GatewayObserver | None
    fleet: FleetControl
    fleet_store: FleetStore
    pace: BodyPace

    @property
    def replica_sets(self) -> tuple[ReplicaSet[Any], ...]:
        """The replicas of the services that the gateway calls."""
        components = self.components
        return components.preprocess.replicas, self.router.replicas, components.connections.postprocess


@dataclass(frozen=True, slots=True)
class App:
    """The HTTP application, and what its APIs are built from."""

    http: ASGIApp
    parts: ApiParts


async def serve(settings: GatewaySettings, stop: Stop) -> None:
    """Runs the gateway until it is stopped."""
    tasks = TaskOwner(on_death=stop.fail)
    gateway = build_gateway(settings, tasks)
    audit_log = open_audit_log(settings, tasks)
    app = build_app(settings, gateway, tasks, audit_log)
    server = _http_server(settings, app.http)

    await _start(gateway, settings, tasks)
    for name, run in app.parts.background:
        tasks.spawn(run(), name)
    http_task = tasks.spawn(server.serve(), "http")
    log.info("HTTP server listening", extra={"address": server.address})

    await stop.wait()
    gateway.readiness.drain()
    if gateway.observer is not None:
        gateway.observer.close()
    server.stop()
    await _drain(gateway.components, gateway.router, http_task, settings.drain_s)
    await tasks.close()
    for close in app.parts.closers:
        await close()
    await gateway.fleet_store.close()
    if audit_log is not None:
        audit_log.close()
    await gateway.gate.close()
    for replicas in gateway.replica_sets:
        await replicas.close()


def build_gateway(settings: GatewaySettings, tasks: TaskOwner) -> Gateway:
    """Returns the components of a gateway; nothing is connected yet."""
    observers = load_group(OBSERVERS, partial(log.warning, "%s")) if settings.ui else ExtensionGroup()
    apis = load_group(APIS, partial(log.warning, "%s"))
    observer: GatewayObserver | None = next((make() for make in observers.usable.values()), None)
    metrics = GatewayMetrics()
    preprocess, router = _build_clients(settings, metrics, observer)
    components = _build_components(settings, tasks, metrics, preprocess, router, observer)
    registry, connections = components.registry, components.connections
    pieces = TokenPieces(connections.postprocess)
    if observer is not None:
        observer.connect(components, router)
    fleet_store = _build_fleet_store(settings)
    return Gateway(
        components,
        router,
        Pipelines(settings.pipeline, components, on_removed=(pieces.forget,)),
        pieces,
        TokenizerParity(
            preprocess.tokenizers, registry.of_model, lambda: list(registry.models), registry.compare_media
        ),
        Readiness(
            preprocess, router, registry, connections, settings.pipeline.services, {**apis.missing, **observers.missing}
        ),
        build_gate(settings, settings.listen, tasks),
        apis,
        observer,
        FleetControl(registry, channel_credentials(settings), fleet_store),
        fleet_store,
        BodyPace(),
    )


def _build_fleet_store(settings: GatewaySettings) -> FleetStore:
    url = settings.responses_redis_url.get_secret_value()
    if not url:
        return MemoryFleetStore()
    from services.gateway.backends.workers.redis_fleet_store import (
        RedisFleetStore,  # optional: only needed with a Redis URL
    )

    return RedisFleetStore(url, settings.redis_credentials)


def _build_clients(
    settings: GatewaySettings, metrics: GatewayMetrics, observer: GatewayObserver | None
) -> tuple[PreprocessClient, RouterClient]:
    make_preprocess: Callable[..., PreprocessClient] = PreprocessClient
    make_router: Callable[..., RouterClient] = RouterClient
    if observer is not None:
        make_preprocess, make_router = observer.preprocess_client(), observer.router_client()
    credentials = channel_credentials(settings)
    preprocess = make_preprocess(
        settings.preprocess,
        credentials,
        settings.tokenize_timeout_s,
        partial(metrics.trouble, "preprocess"),
        settings.session_pause_s,
    )
    owner = f"gateway-{uuid.uuid4().hex}"
    router = make_router(
        settings.router,
        credentials,
        settings.route_timeout_s,
        owner,
        partial(metrics.trouble, "router"),
        settings.session_pause_s,
    )
    return preprocess, router


def _build_components(
    settings: GatewaySettings,
    tasks: TaskOwner,
    metrics: GatewayMetrics,
    preprocess: PreprocessClient,
    router: RouterClient,
    observer: GatewayObserver | None,
) -> Components:
    observers: list[StreamObserver] = [AuditObserver()] if settings.audit_log else []
    if observer is not None:
        observers.append(observer.streams)
    stream_manager = StreamManager(MAX_STREAMS, router, metrics, observers=observers)
    metrics.watch(lambda: stream_manager.live)
    connections = ConnectionManager(
        settings.postprocess,
        channel_credentials(settings),
        MAX_CONNECT_S,
        stream_manager,
        tasks,
        makes_text=settings.pipeline.any_replicas_make_text,
        on_event=partial(metrics.trouble, "postprocess"),
        max_pause_s=settings.session_pause_s,
        on_media=metrics.media_sent,
    )
    return Components(
        preprocess=preprocess,
        router=ServiceRouter(router, settings.route_timeout_s),
        reservations=router,
        registry=WorkerRegistry(router.replicas, connections.worker_up, connections.worker_down, router.owner),
        connections=connections,
        stream_manager=stream_manager,
        metrics=metrics,
        tasks=tasks,
        migration=settings.migration_policy,
        post_wait_s=POST_WAIT_S,
        set_up_s=settings.tokenize_timeout_s,
    )


def build_app(settings: GatewaySettings, gateway: Gateway, tasks: TaskOwner, audit_log: AuditLog | None) -> App:
    """Returns the HTTP application with all APIs and middleware."""
    components, pipelines = gateway.components, gateway.pipelines
    write_scheduler = WriteScheduler(KeepaliveMonitor(settings.comment_every_s, settings.write_timeout_s))
    memory = BodyMemory(settings.body_memory_bytes, gateway.pace)
    max_bytes = int(settings.max_body_mb * (1 << 20))
    bodies = BodyReader(max_bytes, settings.body_timeout_s, settings.budgets.values, memory)
    waits = ModelWaits(components.registry, gateway.router, settings.wait_for_workers_ms)
    routes = ApiRoutes(
        bare_app(), HttpTransport(bodies, write_scheduler, settings.max_unsent_kb << 10), Operations(waits)
    )
    runner = AnswerRunner(pipelines, gateway.pieces)
    parts = ApiParts(
        settings,
        components.registry,
        gateway.gate,
        runner,
        OpenAIOperations(runner, settings, gateway.parity),
        EmbeddingOperations(pipelines, EmbedClient(components.registry, components.connections, MAX_EMBED_S), settings),
        gateway.fleet,
        gateway.pace,
        tasks,
    )
    for name, add_api in gateway.apis.usable.items():
        try:
            add_api(parts, routes)
        except Exception as error:  # of a package: the others serve without it
            reason = sentence(str(error), MAX_MESSAGE_LENGTH)
            log.warning("API %s is left out: adding it raised %s: %s", name, type(error).__name__, reason)
            gateway.readiness.miss(name)
    create_app(
        routes,
        parts.openai,
        TokenOperations(pipelines, settings),
        parts.embeddings,
        gateway.readiness,
        components.metrics.rejected,
    )
    if gateway.observer is None:
        add_no_observer(routes.app, settings.ui)
    else:
        gateway.observer.add_routes(routes.app)
    return App(entrance(routes, settings, gateway.gate, components.metrics, audit_log), parts)


async def _start(gateway: Gateway, settings: GatewaySettings, tasks: TaskOwner) -> None:
    """Starts the background tasks, and waits a moment until the gateway is ready."""
    components, connections = gateway.components, gateway.components.connections
    for replicas in gateway.replica_sets:
        await replicas.start()
    on_silent = partial(components.metrics.trouble, "worker", SILENT)
    watchdog = WorkerWatchdog(lambda: connections.workers, settings.token_timeout_s, on_silent, tasks)
    tasks.spawn(components.registry.run(), "registry")
    tasks.spawn(gateway.pipelines.run(), "models")
    tasks.spawn(gateway.parity.run(), "parity")
    tasks.spawn(gateway.router.run_reports(), "reports")
    tasks.spawn(gateway.fleet.keep_adapters(), "adapters")
    tasks.spawn(connections.run_sweeps(), "sweeps")
    tasks.spawn(watchdog.run(), "worker-watchdog")
    tasks.spawn(_sweep_stalled(components.stream_manager), "stalled")
    if gateway.observer is not None:
        tasks.spawn(gateway.observer.run(), "observer")
    await gateway.readiness.first(STARTUP_WAIT_S)


async def _sweep_stalled(stream_manager: StreamManager) -> None:
    while True:
        await asyncio.sleep(MAX_STALL_S)
        stream_manager.sweep_stalled()


async def _drain(components: Components, router: RouterClient, http_task: asyncio.Task[None], drain_s: float) -> None:
    """Waits for the requests in progress, and ends those that take longer than `drain_s` seconds."""
    give_up = components.stream_manager.give_up_all
    drain_timer = asyncio.get_running_loop().call_later(drain_s, give_up, shutting_down())
    await asyncio.gather(http_task, return_exceptions=True)
    drain_timer.cancel()
    await router.flush_reports(FLUSH_REPORTS_S)


def _http_server(settings: GatewaySettings, app: ASGIApp) -> HttpServer:
    """Creates the server; raises SluiceError if it cannot listen on its address."""
    return HttpServer(
        app,
        settings.listen,
        settings.keep_alive_s,
        settings.drain_s + GIVE_UP_S,
        https_context(settings),
        Bounds(settings.max_connections, body_timeout_s=settings.body_timeout_s),
        settings.reuse_port,
        (settings.comment_every_s, settings.write_timeout_s),
    )
