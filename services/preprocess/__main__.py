"""Starts the preprocess service: ``python -m services.preprocess``."""

from __future__ import annotations

import asyncio
import gc
from threading import get_ident

from services.common.discovery.model_discovery import ModelDiscovery
from services.common.discovery.tokenizer_delivery import DiscoveredModel
from services.common.rpc.server import GrpcServer
from services.common.runner import run
from services.common.tasks import Stop
from services.preprocess.encoders.samples import SAMPLES
from services.preprocess.limits import Limits
from services.preprocess.protocol import packed_text
from services.preprocess.service import PreprocessService
from services.preprocess.settings import PreprocessSettings
from services.preprocess.templates.processes import TemplateProcesses
from services.preprocess.thread_pool import ComputePool
from services.preprocess.tokenizers.loading import load_tokenizer
from services.preprocess.tokenizers.registry import ModelRegistry
from sluice.v1 import preprocess_pb2, preprocess_pb2_grpc

WAITING_THREADS = 32
WARM_UP = ("Hello, world!", "\n".join(SAMPLES))


async def serve(settings: PreprocessSettings, stop: Stop) -> None:
    """Serves until `stop` is set, then drains."""
    template_processes = TemplateProcesses(
        settings.template_processes,
        settings.template_limit_s,
        settings.max_prompt_bytes,
        settings.template_memory_mb,
        settings.worker_template_processes,
        settings.work_limit_s,
        asyncio.get_running_loop(),
    )
    limits = Limits(
        settings.max_prompt_bytes, settings.template_limit_s, template_processes, settings.trust_worker_templates
    )
    pool = ComputePool(settings.tokenize_threads, settings.max_waiting, settings.inline_kb << 10, settings.work_limit_s)
    # These threads only wait; the work is bounded by the engines' processes.
    wait_limit_s = settings.work_limit_s + settings.engine_start_s  # includes the restart of a process that died
    waiters, template_waiters = (ComputePool(WAITING_THREADS, settings.max_waiting, 0, wait_limit_s) for _ in range(2))
    engines, encoder_options = settings.engines, settings.encoder_options
    registry = ModelRegistry(
        settings.served,
        lambda spec: load_tokenizer(spec, limits, engines, encoder_options, settings.template_file(spec.name)),
        settings.load_wait_s,
    )
    media = settings.media_loader()
    server = GrpcServer(settings, preprocess_pb2.DESCRIPTOR)
    preprocess_pb2_grpc.add_PreprocessServicer_to_server(
        PreprocessService(
            registry, pool, settings.max_prompt_bytes, waiters, template_waiters, settings.session_pause_s, media
        ),
        server.server,
    )
    await server.start()
    discovery = _model_discovery(settings, registry, stop) if settings.learns else None
    try:
        if discovery is not None:
            await discovery.start()
        if settings.preload:
            await stop.unless_set(registry.preload())
        if discovery is not None:
            await discovery.catch_up()
        if settings.preload:
            # Vocabularies live as long as the process: exclude them from garbage collections.
            gc.collect()
            gc.freeze()
            await pool.on_every_thread(lambda: _warm(registry))
        if not stop.is_set():
            await server.set_serving(True)
        await stop.wait()
    finally:
        await server.stop(settings.drain_s)
        if discovery is not None:
            await discovery.close()
        await registry.close()
        pool.close()
        waiters.close()
        template_waiters.close()
        await template_processes.aclose()
        await media.close()


def _model_discovery(settings: PreprocessSettings, registry: ModelRegistry, stop: Stop) -> ModelDiscovery:
    async def on_model(model: DiscoveredModel) -> None:
        await registry.add(settings.learned_spec(model))
        settings.warn_without_native_code(model)

    async def on_gone(model: DiscoveredModel) -> None:
        registry.remove(model.spec.name)

    configured = {spec.name for spec in settings.served}
    return ModelDiscovery("preprocess", settings, configured, registry, on_model, on_gone, stop)


def _warm(registry: ModelRegistry) -> None:
    """Fills each tokenizer's per-thread state before the first request needs it."""
    for _, tokenizer in registry:
        if tokenizer is not None and not getattr(tokenizer, "blocks", False):
            # Different text for each thread: cached text would not be encoded.
            for text in WARM_UP:
                packed_text(tokenizer, f"{get_ident()} {text}", add_special_tokens=None)


def main() -> None:
    """Reads settings and runs until stopped."""
    settings = PreprocessSettings.load()
    run("preprocess", settings, lambda stop: serve(settings, stop))


if __name__ == "__main__":
    main()
