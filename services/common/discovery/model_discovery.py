"""Serves models that are not configured: discovered from workers, which also deliver their tokenizers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Protocol

from services.common.budgets import Budget
from services.common.discovery.discovered_models import DeliverySettings, DiscoveredModel, RetainedModel
from services.common.discovery.tokenizer_check import check_tokenizer
from services.common.discovery.tokenizer_delivery import TokenizerDelivery
from services.common.discovery.tokenizer_store import TokenizerStore
from services.common.discovery.worker_watch import WorkerWatch
from services.common.rpc.replicas import ReplicaSet
from services.common.security.tls import channel_credentials
from services.common.settings import ServiceSettings
from services.common.tasks import Stop, TaskOwner
from sluice.v1 import router_pb2_grpc


class ModelDiscoverySettings(DeliverySettings, ServiceSettings):
    """Settings of a service that discovers models."""


class ModelObserver(Protocol):
    """Holds models by name and can request the discovery of further ones."""

    learn: Callable[[str, float], Awaitable[bool]] | None

    def by_use(self) -> Sequence[str]:
        """Returns the names of the loaded models, least recently used first."""
        ...


class ModelDiscovery:
    """Follows the workers registered with the configured routers, and hands over their models.

    Args:
        service: label of its metrics.
        settings: with `routers` or `workers`.
        configured: names of configured models, which are never discovered.
        learner: its `learn` is set to a function that waits for a model being discovered.
        on_model: called with each model that is discovered or whose tokenizer has changed.
        on_gone: called with each model that no worker serves any more.
        model_bytes: memory that each model may take beside its tokenizer, such as a cache.
    """

    def __init__(
        self,
        service: str,
        settings: ModelDiscoverySettings,
        configured: Collection[str],
        learner: ModelObserver,
        on_model: Callable[[DiscoveredModel], Awaitable[None]],
        on_gone: Callable[[DiscoveredModel], Awaitable[None]],
        stop: Stop,
        model_bytes: int = 0,
    ) -> None:
        self._learner = learner
        self._stop = stop
        self._tasks = TaskOwner(stop.fail)
        credentials = channel_credentials(settings)
        self._routers: ReplicaSet[router_pb2_grpc.RouterAsyncStub] | None = None
        if settings.routers:
            self._routers = ReplicaSet("router", settings.routers, router_pb2_grpc.RouterStub, credentials)
        watch = WorkerWatch(self._routers, settings.workers, credentials)
        store = TokenizerStore(
            settings.tokenizer_cache,
            check=check_tokenizer,
        )
        memory = Budget("tokenizer_memory", settings.max_discovered_mb << 20, "--max-discovered-mb")
        retention = RetainedModel(memory=memory, model_bytes=model_bytes)
        self._delivery = TokenizerDelivery(
            service, watch, store, configured, on_model, credentials, on_gone, retention, learner.by_use
        )

    async def start(self) -> None:
        """Starts following; from now on, requests for models being discovered wait for them."""
        if self._routers is not None:
            await self._routers.start()
        self._tasks.spawn(self._delivery.run(), "delivery")
        self._learner.learn = self._delivery.wait_for

    async def catch_up(self) -> None:
        """Waits until the models served now are discovered (see `TokenizerDelivery`) or the service is stopping."""
        waits = [asyncio.create_task(self._delivery.catch_up()), asyncio.create_task(self._stop.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def close(self) -> None:
        """Stops following."""
        await self._tasks.close()
        if self._routers is not None:
            await self._routers.close()
