"""Starts the preprocess service: ``python -m services.preprocess``."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress
from threading import get_ident

from services.common.base.errors import SluiceError
from services.common.base.tasks import Stop
from services.common.discovery.discovered_models import DiscoveredModel
from services.common.discovery.model_discovery import ModelDiscovery
from services.common.rpc.runner import run
from services.common.rpc.server import GrpcServer
from services.preprocess.encoders.samples import SAMPLES
from services.preprocess.limits import MAX_TEMPLATE_MEMORY_MB, MAX_TEMPLATE_S, MAX_WORK_S, Limits
from services.preprocess.service import PreprocessService
from services.preprocess.settings import PreprocessSettings
from services.preprocess.templates.processes import TemplateProcesses
from services.preprocess.thread_pool import ComputePool
from services.preprocess.tokenizers.engine_extensions import MAX_ENGINE_START_S
from services.preprocess.tokenizers.loading import load_tokenizer
from services.preprocess.tokenizers.registry import ModelRegistry
from sluice.v1 import preprocess_pb2, preprocess_pb2_grpc

WAITING_THREADS = 32
MAX_WAITING = 1024
"""Requests that wait for a thread; further ones are rejected at once, so that they can go to another replica."""
INLINE_BYTES = 4 << 10
"""Input up to which a request runs on the event loop, where it costs less than a thread switch, bytes."""
WARM_UP = ("Hello, world!", "\n".join(SAMPLES))


async def serve(settings: PreprocessSettings, stop: Stop) -> None:
    """Serves until `stop` is set, then drains."""
    template_processes = TemplateProcesses(
        1,
        MAX_TEMPLATE_S,
        settings.max_prompt_bytes,
        MAX_TEMPLATE_MEMORY_MB,
        wait_s=MAX_WORK_S,
        loop=asyncio.get_running_loop(),
    )
    limits = Limits(settings.max_prompt_bytes, MAX_TEMPLATE_S, template_processes)
    pool = ComputePool(settings.tokenize_threads, MAX_WAITING, INLINE_BYTES, MAX_WORK_S)
    # These threads only wait; the work is bounded by the engines' processes.
    wait_limit_s = MAX_WORK_S + MAX_ENGINE_START_S  # includes the restart of a process that died
    waiters, template_waiters = (ComputePool(WAITING_THREADS, MAX_WAITING, 0, wait_limit_s) for _ in range(2))
    engines, encoder_options = settings.engines, settings.encoder_options

    async def learn(name: str, wait_s: float) -> bool:
        return discovery is not None and await discovery.wait_for(name, wait_s)

    registry = ModelRegistry(
        settings.served,
        lambda spec: load_tokenizer(spec, limits, engines, encoder_options, settings.template_file(spec.name)),
        shared_by=lambda spec: (spec.source, spec.processor, spec.chat_template, settings.template_file(spec.name)),
        learn=learn if settings.learns else None,
    )
    discovery: ModelDiscovery | None = None
    if settings.learns:
        host, names = _Models(registry, settings), {spec.name for spec in settings.served}
        cache_bytes = settings.cache_mb << 20
        discovery = ModelDiscovery.of_settings("preprocess", settings, host, names, stop.fail, cache_bytes)
    media = settings.media_loader()
    server = GrpcServer(settings, preprocess_pb2.DESCRIPTOR)
    preprocess_pb2_grpc.add_PreprocessServicer_to_server(
        PreprocessService(
            registry, pool, settings.max_prompt_bytes, waiters, template_waiters, settings.session_pause_s, media
        ),
        server.server,
    )
    await server.start()
    try:
        if discovery is not None:
            discovery.start()
        await stop.unless_set(registry.preload())
        if discovery is not None:
            await stop.unless_set(discovery.catch_up())
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


class _Models:
    """Loads discovered models."""

    def __init__(self, registry: ModelRegistry, settings: PreprocessSettings) -> None:
        self._registry = registry
        self._settings = settings
        self.by_use = registry.by_use

    async def add(self, model: DiscoveredModel) -> None:
        await self._registry.add(self._settings.learned_spec(model))
        self._settings.warn_without_native_code(model)

    async def remove(self, model: DiscoveredModel) -> None:
        self._registry.remove(model.spec.name)


def _warm(registry: ModelRegistry) -> None:
    """Fills each tokenizer's per-thread state before the first request needs it."""
    for _, tokenizer in registry:
        if tokenizer is not None and not tokenizer.blocks:
            # Different text for each thread: cached text would not be encoded.
            for text in WARM_UP:
                with suppress(SluiceError):  # of a tokenizer that encodes chats only
                    tokenizer.pack_text(f"{get_ident()} {text}")


def main() -> None:
    """Reads settings and runs until stopped."""
    settings = PreprocessSettings.load()
    run("preprocess", settings, lambda stop: serve(settings, stop))


if __name__ == "__main__":
    main()
