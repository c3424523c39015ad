"""Builds the components of a gateway process, starts them, and stops them in order."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp

from services.common.http.bounds import Bounds
from services.common.intake.pace import BodyPace
from services.common.observability.audit import AuditLog
from services.common.rpc.replicas import ReplicaSet
from services.common.security.tls import channel_credentials, https_context
from services.common.tasks import Stop, TaskOwner
from services.gateway.admission.builder import build_gate
from services.gateway.admission.gate import Gate
from services.gateway.apis.anthropic.endpoints import MessagesEndpoints
from services.gateway.apis.anthropic.routes import add_messages
from services.gateway.apis.batches.builder import build_batch_endpoints, build_batch_runner, build_batch_store
from services.gateway.apis.batches.endpoints import add_batches
from services.gateway.apis.batches.store import BatchStore
from services.gateway.apis.common.block_runner import BlockAnswerRunner
from services.gateway.apis.common.http import BodyReader
from services.gateway.apis.generate.endpoints import GenerateEndpoints, add_generate
from services.gateway.apis.openai.embeddings import EmbeddingEndpoints
from services.gateway.apis.openai.endpoints import OpenAIEndpoints
from services.gateway.apis.openai.scores import ScoreEndpoints
from services.gateway.apis.openai.tokens import TokenEndpoints
from services.gateway.apis.operations.endpoints import OperationsEndpoints, add_operations
from services.gateway.apis.responses.connection import LastResponse
from services.gateway.apis.responses.conversation_endpoints import ConversationEndpoints, add_conversations
from services.gateway.apis.responses.conversations import Conversations
from services.gateway.apis.responses.endpoints import ResponsesEndpoints
from services.gateway.apis.responses.routes import add_responses
from services.gateway.apis.responses.store import (
    BODIES_PER_VALUE,
    RESPONSES_PER_MB,
    MemoryStore,
    ResponseStore,
    StoreLimits,
    last_responses,
)
from services.gateway.app import add_middleware, create_app
from services.gateway.clients.link import MAX_CONNECT_S
from services.gateway.clients.preprocess import PreprocessClient
from services.gateway.clients.router import RouterClient
from services.gateway.clients.token_bytes import TokenPieces
from services.gateway.http.body_memory import BodyMemory
from services.gateway.http.fast_path import posts
from services.gateway.http.keepalive import KeepaliveMonitor
from services.gateway.http.middleware.audit import open_audit_log
from services.gateway.http.server import GIVE_UP_S, HttpServer
from services.gateway.http.socket_turns import MAX_IDLE_S, MAX_LIFETIME_S, SocketLimits, SocketTurns, open_sockets
from services.gateway.http.write_scheduler import WriteScheduler
from services.gateway.live_view.endpoints import add_live_view
from services.gateway.live_view.observers import ObservedPreprocess, ObservedRouter
from services.gateway.live_view.view import LiveView, LiveViewRecords
from services.gateway.metrics import SILENT, GatewayMetrics
from services.gateway.pipeline.models import Pipelines
from services.gateway.pipeline.stages import Components
from services.gateway.placement.routers import ServiceRouter
from services.gateway.readiness import Readiness
from services.gateway.settings import GatewaySettings
from services.gateway.streams.audit import AuditObserver
from services.gateway.streams.interfaces import StreamObserver
from services.gateway.streams.manager import MAX_STREAMS, POST_WAIT_S, StreamManager, shutting_down
from services.gateway.streams.removed_workers import RemovedWorkers
from services.gateway.streams.watchdog import WorkerWatchdog
from services.gateway.workers.connections import ConnectionManager
from services.gateway.workers.embeddings import MAX_EMBED_S, EmbedClient
from services.gateway.workers.fleet_control import FleetControl
from services.gateway.workers.fleet_store import FleetStore, MemoryFleetStore
from services.gateway.workers.model_waits import ModelWaits
from services.gateway.workers.registry import WorkerRegistry
from services.gateway.workers.tokenizer_parity import TokenizerParity

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
        live_view: None when it is switched off.
        fleet: runs control actions on workers.
        fleet_store: what gateways share about the workers that they operate.
        batch_store: files and batches.
        pace: schedules large bodies.
    """

    components: Components
    router: RouterClient
    pipelines: Pipelines
    pieces: TokenPieces
    parity: TokenizerParity
    readiness: Readiness
    gate: Gate
    live_view: LiveView | None
    fleet: FleetControl
    fleet_store: FleetStore
    batch_store: BatchStore
    pace: BodyPace

    @property
    def replica_sets(self) -> tuple[ReplicaSet[Any], ...]:
        """The replicas of the services that the gateway calls."""
        components = self.components
        return components.preprocess.replicas, self.router.replicas, components.connections.postprocess


async def serve(settings: GatewaySettings, stop: Stop) -> None:
    """Runs the gateway until it is stopped."""
    tasks = TaskOwner(on_death=stop.fail)
    response_store = _response_store(settings, tasks)
    gateway = build_gateway(settings, tasks)
    audit_log = open_audit_log(settings, tasks)
    app = build_app(settings, gateway, response_store, audit_log)
    server = _http_server(settings, app)

    await _start(gateway, settings, tasks)
    if settings.batch_concurrency:
        registry = gateway.components.registry
        runner = build_batch_runner(
            settings, gateway.batch_store, posts(app.routes), gateway.gate, registry, gateway.pace
        )
        tasks.spawn(runner.run(), "batches")
    http_task = tasks.spawn(server.serve(), "http")
    log.info("HTTP server listening", extra={"address": server.address})

    await stop.wait()
    gateway.readiness.drain()
    if gateway.live_view is not None:
        gateway.live_view.close()
    server.stop()
    await _drain(gateway.components, gateway.router, http_task, settings.drain_s)
    await tasks.close()
    await response_store.close()
    await gateway.fleet_store.close()
    await gateway.batch_store.close()
    if audit_log is not None:
        audit_log.close()
    await gateway.gate.close()
    for replicas in gateway.replica_sets:
        await replicas.close()


def build_gateway(settings: GatewaySettings, tasks: TaskOwner) -> Gateway:
    """Returns the components of a gateway; nothing is connected yet."""
    records = LiveViewRecords() if settings.ui else None
    metrics = GatewayMetrics()
    preprocess, router = _build_clients(settings, metrics, records)
    components = _build_components(settings, tasks, metrics, preprocess, router, records)
    registry, connections = components.registry, components.connections
    pieces = TokenPieces(connections.postprocess)
    live_view = None
    if records is not None:
        live_view = LiveView(records, preprocess, router, components.stream_manager, registry, connections)
    fleet_store, batch_store = _build_fleet_store(settings), build_batch_store(settings)
    return Gateway(
        components,
        router,
        Pipelines(settings.pipeline, components, on_removed=(pieces.forget,)),
        pieces,
        TokenizerParity(
            preprocess.tokenizers, registry.of_model, lambda: list(registry.models), registry.compare_media
        ),
        Readiness(preprocess, router, registry, connections, settings.pipeline.services),
        build_gate(settings, settings.listen, tasks),
        live_view,
        FleetControl(registry, channel_credentials(settings), fleet_store),
        fleet_store,
        batch_store,
        BodyPace(),
    )


def _build_fleet_store(settings: GatewaySettings) -> FleetStore:
    url = settings.responses_redis_url.get_secret_value()
    if not url:
        return MemoryFleetStore()
    from services.gateway.workers.redis_fleet_store import RedisFleetStore  # optional: only needed with a Redis URL

    return RedisFleetStore(url, settings.redis_credentials)


def _build_clients(
    settings: GatewaySettings, metrics: GatewayMetrics, records: LiveViewRecords | None
) -> tuple[PreprocessClient, RouterClient]:
    make_preprocess: Callable[..., PreprocessClient] = PreprocessClient
    make_router: Callable[..., RouterClient] = RouterClient
    if records is not None:
        make_preprocess = partial(ObservedPreprocess, records.request_history)
        make_router = partial(ObservedRouter, records.request_history, records.explanations)
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
    records: LiveViewRecords | None,
) -> Components:
    observers: list[StreamObserver] = [AuditObserver()] if settings.audit_log else []
    if records is not None:
        observers.append(records.request_history)
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


def build_app(
    settings: GatewaySettings, gateway: Gateway, response_store: ResponseStore, audit_log: AuditLog | None
) -> FastAPI:
    """Returns the HTTP application with all APIs and middleware."""
    components, pipelines = gateway.components, gateway.pipelines
    write_scheduler = WriteScheduler(KeepaliveMonitor(settings.comment_every_s, settings.write_timeout_s))
    memory = BodyMemory(settings.body_memory_bytes, gateway.pace)
    response_store.pace = gateway.pace
    waits = ModelWaits(components.registry, gateway.router, settings.wait_for_workers_ms)
    bodies = BodyReader(settings, memory, components.registry.only_model, waits)
    block_runner = BlockAnswerRunner(pipelines, settings, write_scheduler, gateway.pieces)
    conversations = Conversations(response_store)
    embed_client = EmbedClient(components.registry, components.connections, MAX_EMBED_S)
    embeddings = EmbeddingEndpoints(pipelines, embed_client, settings, bodies)
    openai = OpenAIEndpoints(pipelines, settings, write_scheduler, gateway.parity, gateway.pieces, bodies)
    app = create_app(
        openai,
        TokenEndpoints(pipelines, settings, bodies),
        embeddings,
        ScoreEndpoints(embeddings, settings, bodies),
        gateway.readiness,
        [
            partial(
                add_responses,
                endpoints=ResponsesEndpoints(block_runner, settings, response_store, conversations, bodies),
                sockets=_response_sockets(settings),
            ),
            partial(
                add_conversations,
                endpoints=ConversationEndpoints(settings, response_store, conversations, bodies),
            ),
            partial(add_messages, endpoints=MessagesEndpoints(block_runner, settings, bodies)),
            partial(
                add_batches,
                endpoints=build_batch_endpoints(settings, gateway.batch_store, bodies, components.registry),
            ),
            partial(add_generate, endpoints=GenerateEndpoints(openai, settings, bodies)),
            partial(
                add_operations,
                endpoints=OperationsEndpoints(gateway.fleet, components.registry, bodies, settings.budgets),
            ),
        ],
        components.metrics.rejected,
    )
    add_live_view(app, gateway.live_view)
    add_middleware(app, settings, gateway.gate, components.metrics, audit_log)
    return app


def _response_sockets(settings: GatewaySettings) -> SocketTurns:
    limits = SocketLimits(MAX_IDLE_S, MAX_LIFETIME_S, settings.body_timeout_s, settings.write_timeout_s)
    store = last_responses(settings)
    return SocketTurns(
        lambda: LastResponse(store), limits, open_sockets(settings.max_connections, settings.api_keys_file is not None)
    )


async def _start(gateway: Gateway, settings: GatewaySettings, tasks: TaskOwner) -> None:
    """Starts the background tasks, and waits a moment until the gateway is ready."""
    components, connections = gateway.components, gateway.components.connections
    for replicas in gateway.replica_sets:
        await replicas.start()
    on_silent = partial(components.metrics.trouble, "worker", SILENT)
    watchdog = WorkerWatchdog(
        lambda: connections.workers, components.stream_manager.computing, settings.token_timeout_s, on_silent
    )
    removed = RemovedWorkers(lambda: connections.workers, on_silent, tasks)
    tasks.spawn(components.registry.run(), "registry")
    tasks.spawn(gateway.pipelines.run(), "models")
    tasks.spawn(gateway.parity.run(), "parity")
    tasks.spawn(gateway.router.run_reports(), "reports")
    tasks.spawn(gateway.fleet.keep_adapters(), "adapters")
    tasks.spawn(connections.run_sweeps(), "sweeps")
    tasks.spawn(watchdog.run(), "worker-watchdog")
    tasks.spawn(removed.run(), "removed-workers")
    tasks.spawn(_sweep_stalled(components.stream_manager), "stalled")
    if gateway.live_view is not None:
        tasks.spawn(gateway.live_view.run(), "live-view")
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


def _response_store(settings: GatewaySettings, tasks: TaskOwner) -> ResponseStore:
    """Returns the configured store; raises SluiceError for an invalid Redis URL."""
    url = settings.responses_redis_url.get_secret_value()
    count, size = RESPONSES_PER_MB * settings.responses_kept_mb, settings.responses_kept_mb << 20
    owner = None if settings.api_keys_file is None else (count // 4, size // 4)
    value = int(BODIES_PER_VALUE * settings.max_body_mb * (1 << 20))
    limits = StoreLimits.of(count, size, owner, value)
    if not url:
        return MemoryStore(limits, settings.responses_kept_s)
    from services.gateway.apis.responses.redis_store import RedisStore  # optional: only needed with a Redis URL

    return RedisStore(url, limits, settings.responses_kept_s, tasks, credentials=settings.redis_credentials)


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
