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
    foreign = TemplateProcesses(
        settings.template_processes,
        settings.template_limit_s,
        settings.max_prompt_bytes,
        settings.template_memory_mb,
        settings.worker_template_processes,
        settings.work_limit_s,
        asyncio.get_running_loop(),
    )
    limits = Limits(settings.max_prompt_bytes, settings.template_limit_s, foreign, settings.trust_worker_templates)
    pool = ComputePool(settings.tokenize_threads, settings.max_waiting, settings.inline_kb << 10, settings.work_limit_s)
    # These threads only wait; what is waited for is bounded by the engines' own processes.
    patience_s = settings.work_limit_s + settings.engine_start_s  # a process that died is back within it
    waiters, for_foreign = (ComputePool(WAITING_THREADS, settings.max_waiting, 0, patience_s) for _ in range(2))
    engines, encoder_options = settings.engines, settings.encoder_options
    registry = ModelRegistry(
        settings.served,
        lambda spec: load_tokenizer(spec, limits, engines, encoder_options, settings.template_file(spec.name)),
        settings.load_wait_s,
    )
    server = GrpcServer(settings, preprocess_pb2.DESCRIPTOR)
    preprocess_pb2_grpc.add_PreprocessServicer_to_server(
        PreprocessService(registry, pool, settings.max_prompt_bytes, waiters, for_foreign), server.server
    )
    await server.start()
    learning = _learning(settings, registry, stop) if settings.learns else None
    try:
        if learning is not None:
            await learning.start()
        if settings.preload:
            await _loaded_or_stopped(registry, stop)
        if learning is not None:
            await learning.catch_up()
        if settings.preload:
            # Vocabularies live as long as the process: keep the collector from walking them again and again.
            gc.collect()
            gc.freeze()
            await pool.on_every_thread(lambda: _warm(registry))
        if not stop.is_set():
            await server.set_serving(True)
        await stop.wait()
    finally:
        await server.stop(settings.drain_s)
        if learning is not None:
            await learning.close()
        await registry.close()
        pool.close()
        waiters.close()
        for_foreign.close()
        await foreign.aclose()


def _learning(settings: PreprocessSettings, registry: ModelRegistry, stop: Stop) -> ModelDiscovery:
    async def learned(model: DiscoveredModel) -> None:
        await registry.add(settings.learned_spec(model))
        settings.warn_without_native_code(model)

    async def gone(model: DiscoveredModel) -> None:
        registry.remove(model.spec.name)

    configured = {spec.name for spec in settings.served}
    return ModelDiscovery("preprocess", settings, configured, registry, learned, gone, stop)


def _warm(registry: ModelRegistry) -> None:
    """Has tokenizers set up what they keep for this thread, before a request would wait for it."""
    for _, tokenizer in registry:
        if tokenizer is not None and not getattr(tokenizer, "blocks", False):
            # Different text for each thread: what is remembered is not computed.
            for text in WARM_UP:
                packed_text(tokenizer, f"{get_ident()} {text}", add_special_tokens=None)


async def _loaded_or_stopped(registry: ModelRegistry, stop: Stop) -> None:
    loading = asyncio.create_task(registry.preload())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
    finally:
        loading.cancel()
        stopping.cancel()


def main() -> None:
    """Reads settings and runs until told to stop."""
    settings = PreprocessSettings.load()
    run("preprocess", settings, lambda stop: serve(settings, stop))


if __name__ == "__main__":
    main()
