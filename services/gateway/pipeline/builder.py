"""Builds the stages of a pipeline from its configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from services.gateway.clients.preprocess import PreprocessClient
from services.gateway.core.request import GenerationRequest, TokenizedPrompt
from services.gateway.pipeline.config import PipelineConfig
from services.gateway.pipeline.engine_preprocessing import EngineTokenizeStage
from services.gateway.pipeline.plugins import Plugins
from services.gateway.pipeline.postprocess_plugin import CustomPostprocessAdapter
from services.gateway.pipeline.stages import Components, PlaceStage, TokenizeStage
from services.gateway.placement.direct import DirectSelector
from services.gateway.placement.disaggregation_policy import DisaggregationPolicy
from services.gateway.placement.selector import WorkerSelector
from services.gateway.streams.disaggregation import StreamRecovery
from services.gateway.streams.migration import Migrator
from services.gateway.workers.registry import WorkerEntry


class Stages(NamedTuple):
    """The stages of one pipeline.

    Attributes:
        tokenizing: tokenizes prompts.
        placement: chooses workers for requests that run.
        router_selector: chooses workers for query-only requests.
        recovery: continues generations whose worker cannot finish them.
        text: adapter of a custom postprocess stage; None without one.
        custom: all custom stages.
        disaggregation: which requests run on a pair of workers.
    """

    tokenizing: TokenizeStage
    placement: PlaceStage
    router_selector: WorkerSelector
    recovery: StreamRecovery
    text: CustomPostprocessAdapter | None
    custom: tuple[object, ...]
    disaggregation: DisaggregationPolicy


class FrontendTokenizeStage:
    """Tokenizes prompts with the preprocess services."""

    def __init__(self, preprocess: PreprocessClient) -> None:
        self._preprocess = preprocess

    async def tokenize(self, request: GenerationRequest, worker: WorkerEntry) -> TokenizedPrompt:
        """Implements TokenizeStage."""
        return await self._preprocess.tokenize(
            request.model, request.prompt, worker.block_size, request.lora, request.cache_salt
        )


def build_stages(config: PipelineConfig, components: Components) -> Stages:
    """Returns the stages of a configuration.

    Raises:
        ValueError: a custom stage cannot be loaded or lacks a method.
    """
    plugins = Plugins(config, components)
    pairs = DisaggregationPolicy(config.disaggregation, config.disagg_min_tokens)
    selector = WorkerSelector(
        plugins.route or components.router,
        components.reservations,
        components.registry,
        components.connections,
        components.tasks,
    )
    placement: PlaceStage = selector
    if plugins.place is not None:
        placement = plugins.place
    elif config.routing == "direct":
        placement = DirectSelector(components.registry, components.connections, pairs.mode != "off")
    tokenizing: TokenizeStage = FrontendTokenizeStage(components.preprocess)
    if config.preprocessing == "engine":
        tokenizing = EngineTokenizeStage()
    text = None
    if plugins.postprocess is not None:
        text = CustomPostprocessAdapter(plugins.postprocess, components.stream_manager.events)
    return Stages(
        plugins.tokenize or tokenizing,
        placement,
        selector,
        _build_recovery(config, components, placement, pairs),
        text,
        plugins.all,
        pairs,
    )


def _build_recovery(
    config: PipelineConfig, components: Components, placement: PlaceStage, pairs: DisaggregationPolicy
) -> StreamRecovery:
    registry, connections, metrics = components.registry, components.connections, components.metrics
    streams = components.stream_manager
    policy = replace(components.migration, enabled=config.migration)
    migrator = Migrator(policy, placement, pairs, registry, connections, streams, metrics, components.tasks)
    return StreamRecovery(pairs, registry, connections, streams, metrics, migrator, config.migration)
