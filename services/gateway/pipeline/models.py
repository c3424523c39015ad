"""The pipelines of a gateway by model: one serves all models without a configuration of their own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic

from services.gateway.backends.rpc.preprocess import PreprocessClient
from services.gateway.backends.workers.capabilities import are_text_only
from services.gateway.backends.workers.registry import WorkerRegistry
from services.gateway.core.request import GenerationRequest
from services.gateway.pipeline.config import PipelineConfig
from services.gateway.pipeline.pipeline import Pipeline, build_pipeline, named
from services.gateway.pipeline.stages import Components

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
GRACE_S = 300.0


class Pipelines:
    """The pipelines of a gateway, by model.

    Args:
        config: the configuration, including those of single models.
        components: the components of this process.
        grace_s: how long stages keep the state of a model without workers, seconds.
        on_removed: called with the name of a model after that time.

    Raises:
        SluiceError: FAILED_PRECONDITION for an invalid configuration.
    """

    def __init__(
        self,
        config: PipelineConfig,
        components: Components,
        grace_s: float = GRACE_S,
        on_removed: Sequence[Callable[[str], None]] = (),
    ) -> None:
        self.config = config
        self.registry: WorkerRegistry = components.registry
        self.preprocess: PreprocessClient = components.preprocess
        self._default = build_pipeline(config, components)
        self._of_model = {name: build_pipeline(own, components) for name, own in config.models.items()}
        self._build = partial(build_pipeline, components=components)
        self._of_text: dict[Pipeline, Pipeline] = {}
        self._grace_s = grace_s
        self._on_removed = on_removed
        self._remove_at: dict[str, float] = {}

    @property
    def all(self) -> list[Pipeline]:
        """All pipelines."""
        return [self._default, *self._of_model.values(), *self._of_text.values()]

    def of(self, model: str) -> Pipeline:
        """Returns the pipeline of a model, or of a LoRA adapter's model.

        A model whose engines take and return text is served with that, however the gateway is configured.
        """
        workers = self.registry.of_model(model)
        found = self._of_model.get(model)
        if found is None and workers and self._of_model:
            found = self._of_model.get(workers[0].model)
        found = found or self._default
        return self._with_text(found) if are_text_only(workers) else found

    def _with_text(self, pipeline: Pipeline) -> Pipeline:
        config = pipeline.config
        if config.handler or config.stages or config.routing == "query-only":
            return pipeline
        if pipeline not in self._of_text:
            self._of_text[pipeline] = self._build(replace(config, preprocessing="engine", postprocessing="engine"))
        return self._of_text[pipeline]

    def named(self, request: GenerationRequest) -> GenerationRequest:
        """Returns the request with a LoRA adapter's name resolved, as `pipeline.named`."""
        return named(request, self.registry)

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
            self.of(name).lifecycle.begin(name)
        for name in [name for name, due in self._remove_at.items() if due <= now]:
            del self._remove_at[name]
            log.info("model removed", extra={"model": name})
            self.of(name).lifecycle.remove(name)
            for removed in self._on_removed:
                removed(name)
