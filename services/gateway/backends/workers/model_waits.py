"""Waits for the first worker of a model that has none, in the router's admission queue."""

from __future__ import annotations

import asyncio

from services.common.base.errors import SluiceError
from services.gateway.backends.rpc.router import RouterClient
from services.gateway.backends.workers.registry import WorkerRegistry
from services.gateway.core import context

LISTED_WITHIN_S = 5.0  # after the router has a worker, until this gateway's list has it
POLL_S = 0.05


class ModelWaits:
    """Holds requests of models that scale from zero until a worker has registered.

    Args:
        max_wait_ms: longest wait, milliseconds; 0: none.
    """

    def __init__(self, registry: WorkerRegistry, router: RouterClient, max_wait_ms: int) -> None:
        self._registry = registry
        self._router = router
        self._max_wait_ms = max_wait_ms

    def only_model(self) -> str:
        """Returns the served model if there is exactly one; else empty."""
        return self._registry.only_model()

    async def ready(self, model: str) -> None:
        """Returns once a model has a worker, at once if it has one or if requests do not wait here.

        Returns as well when the router rejects the wait: the registry then raises the error of a model without workers.
        """
        if not self._max_wait_ms or self._registry.of_model(model):
            return
        context.current().permit.check_model(model, "model")
        left_s = context.current().deadline.left_s
        try:
            await self._router.wait_for_workers(model, int(min(self._max_wait_ms, left_s * 1000)))
        except SluiceError:
            return
        for _ in range(round(LISTED_WITHIN_S / POLL_S)):
            if self._registry.of_model(model):
                return
            await asyncio.sleep(POLL_S)
