"""Entry point of the gateway: `python -m services.gateway`."""

from __future__ import annotations

import asyncio
import logging
import uuid
from functools import partial

from services.common.budgets import Budget
from services.common.observability import scrape_server as scraping
from services.common.observability import telemetry
from services.common.runner import run
from services.common.security.tls import channel_credentials, https_context
from services.common.tasks import Stop, TaskOwner
from services.gateway.admission.builder import build_gate
from services.gateway.apis.anthropic.endpoints import MessagesEndpoints
from services.gateway.apis.anthropic.routes import add_messages
from services.gateway.apis.common.block_runner import BlockAnswerRunner
from services.gateway.apis.openai.embeddings import EmbeddingEndpoints
from services.gateway.apis.openai.endpoints import OpenAIEndpoints
from services.gateway.apis.openai.tokens import TokenEndpoints
from services.gateway.apis.responses.endpoints import ResponsesEndpoints
from services.gateway.apis.responses.routes import add_responses
from services.gateway.apis.responses.store import build_store
from services.gateway.app import add_middleware, create_app
from services.gateway.clients.token_bytes import TokenPieces
from services.gateway.http.body_memory import BodyMemory
from services.gateway.http.body_pace import BodyPace
from services.gateway.http.keepalive import KeepaliveMonitor
from services.gateway.http.middleware.audit import open_audit_log
from services.gateway.http.server import build_server
from services.gateway.http.write_scheduler import WriteScheduler
from services.gateway.live_view.endpoints import add_live_view
from services.gateway.live_view.observers import ObservedPreprocess, ObservedRouter, ObservedStreamManager
from services.gateway.live_view.view import LiveView
from services.gateway.metrics import SILENT, GatewayMetrics
from services.gateway.pipeline.models import Pipelines
from services.gateway.pipeline.stages import Components
from services.gateway.readiness import Readiness
from services.gateway.settings import GatewaySettings
from services.gateway.streams.manager import StreamManager, shutting_down
from services.gateway.streams.watchdog import WorkerWatchdog
from services.gateway.workers.connections import ConnectionManager
from services.gateway.workers.embeddings import EmbedClient
from services.gateway.workers.registry import WorkerRegistry
from services.gateway.workers.tokenizer_parity import TokenizerParity

log = logging.getLogger(__name__)

FLUSH_REPORTS_S = 1.0
STARTUP_WAIT_S = 2.0


async def serve(settings: GatewaySettings, stop: Stop) -> None:
    """Runs the gateway until it is stopped."""
    metrics = GatewayMetrics()
    credentials = channel_credentials(settings)
    tasks = TaskOwner(on_death=stop.fail)

    preprocess = ObservedPreprocess(settings.preprocess, credentials, settings.tokenize_timeout_s)
    router = ObservedRouter(
        settings.router,
        credentials,
        settings.route_timeout_s,
        owner=f"gateway-{uuid.uuid4().hex}",
    )
    stream_manager = ObservedStreamManager(
        settings.max_streams, router.prefill_complete, router.free, metrics, settings.postprocess_wait_s
    )
    metrics.watch(lambda: stream_manager.live)
    connections = ConnectionManager(
        settings.postprocess,
        credentials,
        settings.connect_timeout_s,
        stream_manager,
        tasks,
        settings.worker_message_mb << 20,
        Budget("batch_tokens", settings.max_batch_tokens, "--max-batch-tokens"),
    )
    registry = WorkerRegistry(router.replicas, connections.worker_up, connections.worker_down, router.owner)
    components = Components(
        preprocess=preprocess,
        router=router,
        registry=registry,
        connections=connections,
        stream_manager=stream_manager,
        metrics=metrics,
        tasks=tasks,
        migration=settings.migration_policy,
        route_timeout_s=settings.route_timeout_s,
        post_wait_s=settings.postprocess_wait_s,
    )
    pieces = TokenPieces(connections.postprocess)
    pipelines = Pipelines(
        settings.pipeline, components, settings.model_grace_s, (pieces.forget,), settings.tokenize_timeout_s
    )

    parity = TokenizerParity(preprocess.tokenizers, registry.of_model, lambda: list(registry.models))
    write_scheduler = WriteScheduler(KeepaliveMonitor(settings.comment_every_s, settings.write_timeout_s))
    bodies = BodyMemory(settings.body_memory_bytes, BodyPace(settings.large_body_share))
    openai = OpenAIEndpoints(pipelines, settings, write_scheduler, parity, pieces, bodies)
    block_runner = BlockAnswerRunner(pipelines, settings, write_scheduler, pieces)
    response_store = build_store(settings, tasks)
    readiness = Readiness(preprocess, router, registry, connections, settings.pipeline.services)
    app = create_app(
        openai,
        TokenEndpoints(pipelines, settings, bodies),
        EmbeddingEndpoints(pipelines, EmbedClient(registry, connections, settings.embed_timeout_s), settings, bodies),
        readiness,
        [
            partial(add_responses, endpoints=ResponsesEndpoints(block_runner, settings, response_store, bodies)),
            partial(add_messages, endpoints=MessagesEndpoints(block_runner, settings, bodies)),
        ],
    )
    view = (
        LiveView(preprocess, router, stream_manager, registry, connections, settings.ui_viewers)
        if settings.ui
        else None
    )
    add_live_view(app, view)
    gate = build_gate(settings, settings.listen, tasks)
    audit_log = open_audit_log(settings, tasks)
    add_middleware(app, settings, gate, metrics, audit_log)
    server = build_server(settings, app, https_context(settings))

    replica_sets = (preprocess.replicas, router.replicas, connections.postprocess)
    for replicas in replica_sets:
        replicas.on_event = partial(metrics.trouble, replicas.peer)
        await replicas.start()
    tasks.spawn(registry.run(), "registry")
    tasks.spawn(pipelines.run(), "models")
    tasks.spawn(parity.run(), "parity")
    tasks.spawn(router.run_reports(), "reports")
    tasks.spawn(connections.run_sweeps(), "sweeps")
    watchdog = WorkerWatchdog(
        lambda: connections.workers,
        stream_manager.computing,
        settings.token_timeout_s,
        partial(metrics.trouble, "worker", SILENT),
    )
    tasks.spawn(watchdog.run(), "worker-watchdog")
    tasks.spawn(_sweep_stalled(stream_manager, settings.stall_timeout_s), "stalled")
    if view is not None:
        tasks.spawn(view.run(), "live-view")
    await readiness.first(STARTUP_WAIT_S)
    http_task = tasks.spawn(server.serve(), "http")
    log.info("HTTP server listening", extra={"address": server.address})

    await stop.wait()
    readiness.leaving = True
    if view is not None:
        view.close()
    server.stop()
    drain_timer = asyncio.get_running_loop().call_later(settings.drain_s, stream_manager.give_up_all, shutting_down())
    await asyncio.gather(http_task, return_exceptions=True)
    drain_timer.cancel()
    await router.flush_reports(FLUSH_REPORTS_S)
    await tasks.close()
    await response_store.close()
    if audit_log is not None:
        audit_log.close()
    await gate.close()
    for replicas in replica_sets:
        await replicas.close()


async def _sweep_stalled(stream_manager: StreamManager, stall_timeout_s: float) -> None:
    while True:
        await asyncio.sleep(stall_timeout_s)
        stream_manager.sweep_stalled()


def main() -> None:
    """Loads the settings and runs the gateway."""
    settings = GatewaySettings.load()
    if not settings.metrics_listen:
        telemetry.configure_metrics()  # the gateway serves /metrics itself
    scraping.health = lambda: {"status": "ok"}  # liveness only, as /health; /ready covers readiness
    run("gateway", settings, lambda stop: serve(settings, stop))


if __name__ == "__main__":
    main()
