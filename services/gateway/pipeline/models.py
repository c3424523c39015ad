"""The pipelines of a gateway by model, and the notification of custom stages about models.

One pipeline serves all models without a configuration of their own. Custom stages and handlers may define
`async on_model(worker)` and `async on_model_removed(name)`: the first is awaited before requests of the model reach
the stage, the second is called when no worker has served the model for the grace period.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from time import monotonic
from typing import Any, cast

from services.common.errors import SluiceError, unavailable
from services.common.tasks import TaskOwner
from services.gateway.clients.postprocess_link import PostLink
from services.gateway.clients.preprocess import PreprocessClient
from services.gateway.clients.worker_link import WorkerLink
from services.gateway.core.request import GenerationRequest
from services.gateway.pipeline.config import PipelineConfig
from services.gateway.pipeline.pipeline import Pipeline, build_pipeline, named
from services.gateway.pipeline.stages import Components
from services.gateway.streams.stream import GenerationStream
from services.gateway.workers.registry import WorkerRegistry

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
SET_UP_RETRY_S = 5.0
GRACE_S = 300.0


class Pipelines:
    """The pipelines of a gateway, by model.

    Args:
        config: the configuration, including those of single models.
        components: the components of this process.
        grace_s: how long stages keep the state of a model without workers, seconds.
        on_removed: called with the name of a model after that time.
        set_up_s: how long a request waits for `on_model`, seconds.

    Raises:
        SluiceError: FAILED_PRECONDITION for an invalid configuration.
    """

    def __init__(
        self,
        config: PipelineConfig,
        components: Components,
        grace_s: float = GRACE_S,
        on_removed: Sequence[Callable[[str], None]] = (),
        set_up_s: float = 15.0,
    ) -> None:
        self.config = config
        self.registry: WorkerRegistry = components.registry
        self.preprocess: PreprocessClient = components.preprocess
        self._default = build_pipeline(config, components)
        self._of_model = {name: build_pipeline(own, components) for name, own in config.models.items()}
        self._lifecycles = {
            pipeline: ModelLifecycle(_lifecycle_listeners(pipeline), self.registry, components.tasks, set_up_s)
            for pipeline in self.all
        }
        for pipeline, models in self._lifecycles.items():
            pipeline.model_ready = models.ready
        self._grace_s = grace_s
        self._on_removed = on_removed
        self._remove_at: dict[str, float] = {}
        self._install_recovery(components)

    @property
    def all(self) -> list[Pipeline]:
        """All pipelines."""
        return [self._default, *self._of_model.values()]

    def of(self, model: str) -> Pipeline:
        """Returns the pipeline of a model, or of a LoRA adapter's model."""
        if not self._of_model:
            return self._default
        found = self._of_model.get(model)
        if found is None and (workers := self.registry.of_model(model)):
            found = self._of_model.get(workers[0].model)
        return found or self._default

    def named(self, request: GenerationRequest) -> GenerationRequest:
        """Returns the request with a LoRA adapter's name resolved, as `pipeline.named`."""
        return named(request, self.registry)

    def _install_recovery(self, components: Components) -> None:
        """Connects migration, disaggregation and custom postprocessing of each model to the stream manager."""
        stream_manager = components.stream_manager

        def migrate(stream: GenerationStream, worker: WorkerLink, error: SluiceError) -> bool:
            return self.of(stream.model).stages.migrator.take_over(stream, worker, error)

        def rescue(stream: GenerationStream, worker: WorkerLink, error: SluiceError) -> SluiceError | None:
            return self.of(stream.model).stages.pairs.rescue(stream, worker, error)

        def hand_over(stream: GenerationStream, handoff: bytes) -> None:
            self.of(stream.model).stages.pairs.hand_over(stream, handoff)

        stream_manager.migrate, stream_manager.rescue, stream_manager.hand_over = migrate, rescue, hand_over
        components.connections.makes_text = any(config.replicas_make_text for config in self.config.all)
        if any(pipeline.stages.text is not None for pipeline in self.all):
            stream_manager.texts.custom = lambda model: cast("PostLink | None", self.of(model).stages.text)

    async def run(self) -> None:
        """Sets up stages for new models and removes models without workers, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(POLL_INTERVAL_S)

    def look(self) -> None:
        """Compares the served models with those that were set up."""
        now, served = monotonic(), self.registry.models
        for name in served:
            self._remove_at[name] = now + self._grace_s
            self._lifecycles[self.of(name)].begin(name)
        for name in [name for name, due in self._remove_at.items() if due <= now]:
            del self._remove_at[name]
            log.info("model removed", extra={"model": name})
            self._lifecycles[self.of(name)].remove(name)
            for removed in self._on_removed:
                removed(name)


class ModelLifecycle:
    """Notifies the stages of one pipeline once when a model appears and once when it is removed.

    Args:
        listeners: stages and handlers with `on_model`, `on_model_removed`, or both.
        set_up_s: how long a request waits for the setup, seconds.
    """

    def __init__(self, listeners: Sequence[Any], registry: WorkerRegistry, tasks: TaskOwner, set_up_s: float) -> None:
        self._listeners = listeners
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


def _lifecycle_listeners(pipeline: Pipeline) -> list[Any]:
    candidates: Iterable[object] = (pipeline, *pipeline.stages.custom)
    return [one for one in candidates if hasattr(one, "on_model") or hasattr(one, "on_model_removed")]
