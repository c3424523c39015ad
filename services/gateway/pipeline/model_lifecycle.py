"""Notifies custom stages and handlers of the models that appear and disappear.

They may define `async on_model(worker)` and `async on_model_removed(name)`: the first is awaited before requests of the
model reach the stage, the second is called when no worker has served the model for the grace period.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic

from services.common.base.errors import unavailable
from services.common.base.tasks import TaskOwner
from services.gateway.backends.workers.registry import WorkerRegistry

log = logging.getLogger(__name__)

SET_UP_RETRY_S = 5.0


class ModelLifecycle:
    """Notifies the stages of one pipeline once when a model appears and once when it is removed.

    Args:
        candidates: stages and handlers; those with `on_model` or `on_model_removed` are notified.
        set_up_s: how long a request waits for the setup, seconds.
    """

    def __init__(
        self, candidates: Sequence[object], registry: WorkerRegistry, tasks: TaskOwner, set_up_s: float
    ) -> None:
        self._listeners = [one for one in candidates if hasattr(one, "on_model") or hasattr(one, "on_model_removed")]
        self._registry = registry
        self._tasks = tasks
        self._set_up_s = set_up_s
        self._set_up: dict[str, asyncio.Task[bool]] = {}
        self._retry_at: dict[str, float] = {}

    async def ready(self, model: str) -> None:
        """Waits until every listener is set up for a served model.

        Raises:
            SluiceError: UNAVAILABLE when the setup failed or takes too long.
        """
        if not self._listeners:
            return
        self.begin(model)
        setting_up = self._set_up.get(model)
        if setting_up is not None:
            done, _ = await asyncio.wait((setting_up,), timeout=self._set_up_s)
            if done and setting_up.result():
                return
        raise unavailable(
            f"A stage of this gateway is not set up for model {model!r}; see the gateway's log for details.",
            code="stage_unavailable",
        )

    def begin(self, model: str) -> None:
        """Starts the setup for a model, unless it is done, in progress, or failed less than SET_UP_RETRY_S ago."""
        if not self._listeners or model not in self._registry.models:
            return
        before = self._set_up.get(model)
        failed = before is not None and before.done() and not before.result()
        if before is None or (failed and monotonic() >= self._retry_at.get(model, 0.0)):
            worker = self._registry.models[model]
            self._set_up[model] = self._tasks.spawn(self._call_each("on_model", model, worker), f"on-model-{model}")

    def remove(self, model: str) -> None:
        """Notifies the listeners that a model was removed, after any setup in progress."""
        self._retry_at.pop(model, None)
        before = self._set_up.pop(model, None)
        if before is not None:
            self._tasks.spawn(self._after(before, model), f"on-model-removed-{model}")

    async def _after(self, before: asyncio.Task[bool], model: str) -> None:
        await asyncio.wait((before,))
        await self._call_each("on_model_removed", model, model)

    async def _call_each(self, method: str, model: str, argument: object) -> bool:
        """Calls every listener and returns whether all succeeded; logs the errors of those that raise."""
        succeeded = True
        for listener in self._listeners:
            call: Callable[[object], Awaitable[None]] | None = getattr(listener, method, None)
            if call is None:
                continue
            try:
                await call(argument)
            except Exception:
                succeeded = False
                log.exception("%s.%s failed", type(listener).__name__, method, extra={"model": model})
        if not succeeded:
            self._retry_at[model] = monotonic() + SET_UP_RETRY_S
        return succeeded
