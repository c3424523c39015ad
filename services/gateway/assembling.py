"""Puts the stages together that a PipelineConfig describes."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, cast

from services.gateway.clients.catalogue import WorkerEntry
from services.gateway.clients.post_link import PostLink
from services.gateway.clients.preprocess import PreprocessClient
from services.gateway.config import PipelineConfig
from services.gateway.disaggregation import DisaggOrchestrator, DisaggRules
from services.gateway.generation import GenerationRequest, Tokenized
from services.gateway.hooks import Hooks
from services.gateway.hooks_text import OwnTextLink
from services.gateway.migration import Migrator
from services.gateway.placement import Placement
from services.gateway.stages import Components, PlaceStage, PostprocessStage, TokenizeStage
from services.gateway.stages_direct import DirectPlacement
from services.gateway.stages_engine import EngineTokenizing


class Stages(NamedTuple):
    """Who does what.

    Attributes:
        placement: finds workers for what runs.
        router_asking: says who would be chosen.
        own_text: text is made by a stage of the user's.
    """

    tokenizing: TokenizeStage
    placement: PlaceStage
    router_asking: Placement
    own_text: bool


class FrontendTokenizing:
    """Asks the preprocess services."""

    def __init__(self, preprocess: PreprocessClient) -> None:
        self._preprocess = preprocess

    async def tokenize(self, request: GenerationRequest, worker: WorkerEntry) -> Tokenized:
        """See TokenizeStage."""
        return await self._preprocess.tokenize(
            request.model, request.prompt, worker.block_size, request.lora, request.cache_salt
        )


def assembled(config: PipelineConfig, components: Components) -> Stages:
    """The stages, and in the switchboard what becomes of generations whose workers are lost.

    Raises:
        ValueError: a stage of the user's cannot be what it is to replace.
    """
    hooks = Hooks(config, components)
    rules = DisaggRules(config.disaggregation, config.disagg_min_tokens)
    asking = Placement(
        components.router, components.catalogue, components.fleet, components.tasks, components.route_timeout_s, rules
    )
    if hooks.route is not None:
        asking.own_route = hooks.route.route
    placement: PlaceStage = asking
    if hooks.place is not None:
        placement = hooks.place
    elif config.routing == "direct":
        placement = DirectPlacement(components.catalogue, components.fleet, rules.mode != "off")
    _survive(config, components, placement, rules)
    _make_text(config, components, hooks.postprocess)
    tokenizing: TokenizeStage = FrontendTokenizing(components.preprocess)
    if config.preprocessing == "engine":
        tokenizing = EngineTokenizing()
    return Stages(hooks.tokenize or tokenizing, placement, asking, hooks.postprocess is not None)


def _survive(config: PipelineConfig, parts: Components, placement: PlaceStage, rules: DisaggRules) -> None:
    """Says what becomes of generations whose worker is lost, and of pairs that break."""
    board = parts.switchboard
    policy = replace(parts.migration, enabled=config.migration)
    migrator = Migrator(policy, placement, parts.catalogue, parts.fleet, board, parts.metrics, parts.tasks)
    pairs = DisaggOrchestrator(rules, parts.catalogue, parts.fleet, board, parts.metrics, config.migration)
    board.migrate, board.rescue, board.hand_over = migrator.take_over, pairs.rescue, pairs.hand_over


def _make_text(config: PipelineConfig, parts: Components, own: PostprocessStage | None) -> None:
    """Says where text is made, when it is not in the postprocess services."""
    board = parts.switchboard
    board.path.text_here = config.postprocessing == "frontend"
    parts.fleet.makes_text = board.path.text_here and own is None
    if own is not None:
        board.texts.links["own stage"] = cast(PostLink, OwnTextLink(own, board))
