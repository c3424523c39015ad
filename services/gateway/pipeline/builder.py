"""Builds the stages of a pipeline from its configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from services.gateway.backends.placement.direct import DirectSelector
from services.gateway.backends.placement.disaggregation_policy import DisaggregationPolicy
from services.gateway.backends.placement.interfaces import PlaceStage
from services.gateway.backends.placement.selector import WorkerSelector
from services.gateway.backends.rpc.preprocess import PreprocessClient
from services.gateway.backends.workers.registry import WorkerEntry
from services.gateway.core.request import GenerationRequest, TokenizedPrompt
from services.gateway.pipeline.config import PipelineConfig
from services.gateway.pipeline.engine_preprocessing import EngineTokenizeStage
from services.gateway.pipeline.plugins import Plugins
from services.gateway.pipeline.postprocess_plugin import CustomPostprocessAdapter
from services.gateway.pipeline.stages import Components, TokenizeStage
from services.gateway.streams.disaggregation import StreamRecovery
from services.gateway.streams.migration import Migrator


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
    registry, connections, metrics = components.registry, components.connections, components.metrics
    streams, tasks = components.stream_manager, components.tasks
    tokenizing: TokenizeStage = FrontendTokenizeStage(components.preprocess)
    if config.preprocessing == "engine":
        tokenizing = EngineTokenizeStage()
    pairs = DisaggregationPolicy(config.disaggregation, config.disagg_min_tokens)
    router = plugins.route or components.router
    selector = WorkerSelector(router, components.reservations, registry, connections, tasks)
    placement: PlaceStage = selector
    if plugins.place is not None:
        placement = plugins.place
    elif config.routing == "direct":
        placement = DirectSelector(registry, connections, pairs.mode != "off")
    policy = replace(components.migration, enabled=config.migration)
    migrator = Migrator(policy, placement, pairs, registry, connections, streams, metrics, tasks)
    return Stages(
        plugins.tokenize or tokenizing,
        placement,
        selector,
        StreamRecovery(pairs, registry, connections, streams, metrics, migrator, config.migration),
        None if plugins.postprocess is None else CustomPostprocessAdapter(plugins.postprocess, streams.events),
        plugins.all,
        pairs,
    )
