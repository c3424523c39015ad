"""Serves models that nobody configured: learned from their workers, with the tokenizers these deliver."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Protocol

from services.common.discovery.tokenizer_check import check_tokenizer
from services.common.discovery.tokenizer_delivery import (
    DeliverySettings,
    DiscoveredModel,
    RetainedModel,
    TokenizerDelivery,
)
from services.common.discovery.tokenizer_store import TokenizerStore
from services.common.discovery.worker_watch import WorkerWatch
from services.common.rpc.replicas import ReplicaSet
from services.common.security.settings import RouterTokenSettings
from services.common.security.tls import channel_credentials
from services.common.settings import ServiceSettings
from services.common.tasks import Stop, TaskOwner
from sluice.v1 import router_pb2_grpc


class ModelDiscoverySettings(DeliverySettings, RouterTokenSettings, ServiceSettings):
    """Settings of a service that learns models."""


class ModelObserver(Protocol):
    """Who holds models by name and can be given more."""

    learn: Callable[[str, float], Awaitable[bool]] | None

    def by_use(self) -> Sequence[str]:
        """Names of the models that are loaded, the least recently used first."""
        ...


class ModelDiscovery:
    """Follows the workers that the settings' routers know and hands on their models.

    Args:
        service: whose metrics count it.
        settings: with `routers` or `workers`.
        configured: models that are not learned.
        learner: is told how to wait for a model that is on its way.
        on_model: takes a model that was learned, or whose tokenizer has changed.
        on_gone: ends a model that no worker serves any more.
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
            settings.max_tokenizer_mb << 20,
            settings.tokenizer_cache_mb << 20,
            check_tokenizer,
        )
        staying = RetainedModel(settings.max_learned_models, settings.model_grace_s)
        self._delivery = TokenizerDelivery(
            service, watch, store, configured, on_model, credentials, on_gone, staying, learner.by_use
        )

    async def start(self) -> None:
        """Begins to follow; requests for models that are on their way wait from now on."""
        if self._routers is not None:
            await self._routers.start()
        self._tasks.spawn(self._delivery.run(), "delivery")
        self._learner.learn = self._delivery.wait_for

    async def catch_up(self) -> None:
        """Waits until the models that are served already are learned, see TokenizerDelivery; or until the service is to
        stop."""
        ends = [asyncio.create_task(self._delivery.catch_up()), asyncio.create_task(self._stop.wait())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()

    async def close(self) -> None:
        """Stops following."""
        await self._tasks.close()
        if self._routers is not None:
            await self._routers.close()
