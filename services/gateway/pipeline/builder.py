"""Puts the stages together that a PipelineConfig describes."""

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
from services.gateway.placement.selector import WorkerSelector
from services.gateway.streams.disaggregation import DisaggOrchestrator, DisaggRules
from services.gateway.streams.migration import Migrator
from services.gateway.workers.registry import WorkerEntry


class Stages(NamedTuple):
    """Who does what.

    Attributes:
        placement: finds workers for what runs.
        router_asking: says who would be chosen.
        migrator: moves generations whose worker is lost.
        pairs: conducts generations that two workers share.
        text: the link to a stage of the operator's that makes the text; None: it is made elsewhere.
        own: the operator's stages.
    """

    tokenizing: TokenizeStage
    placement: PlaceStage
    router_asking: WorkerSelector
    migrator: Migrator
    pairs: DisaggOrchestrator
    text: CustomPostprocessAdapter | None
    own: tuple[object, ...]


class FrontendTokenizeStage:
    """Asks the preprocess services."""

    def __init__(self, preprocess: PreprocessClient) -> None:
        self._preprocess = preprocess

    async def tokenize(self, request: GenerationRequest, worker: WorkerEntry) -> TokenizedPrompt:
        """See TokenizeStage."""
        return await self._preprocess.tokenize(
            request.model, request.prompt, worker.block_size, request.lora, request.cache_salt
        )


def assembled(config: PipelineConfig, components: Components) -> Stages:
    """Returns the stages of a configuration.

    Raises:
        ValueError: a stage of the operator's cannot take the place it is to have.
    """
    plugins = Plugins(config, components)
    rules = DisaggRules(config.disaggregation, config.disagg_min_tokens)
    asking = WorkerSelector(
        components.router,
        components.registry,
        components.connections,
        components.tasks,
        components.route_timeout_s,
        rules,
    )
    if plugins.route is not None:
        asking.own_route = plugins.route.route
    placement: PlaceStage = asking
    if plugins.place is not None:
        placement = plugins.place
    elif config.routing == "direct":
        placement = DirectSelector(components.registry, components.connections, rules.mode != "off")
    tokenizing: TokenizeStage = FrontendTokenizeStage(components.preprocess)
    if config.preprocessing == "engine":
        tokenizing = EngineTokenizeStage()
    stream_manager, parts = components.stream_manager, components
    policy = replace(parts.migration, enabled=config.migration)
    return Stages(
        plugins.tokenize or tokenizing,
        placement,
        asking,
        Migrator(policy, placement, parts.registry, parts.connections, stream_manager, parts.metrics, parts.tasks),
        DisaggOrchestrator(rules, parts.registry, parts.connections, stream_manager, parts.metrics, config.migration),
        None if plugins.postprocess is None else CustomPostprocessAdapter(plugins.postprocess, stream_manager),
        plugins.all,
    )
