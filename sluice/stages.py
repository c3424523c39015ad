"""The stages of the gateway's pipeline that an operator may replace, and the types that pass through them.

A stage is named in the configuration of the pipeline (docs/pipeline.md); `examples/plugins` has one of each.
"""

from services.common.errors import ErrorKind, SluiceError, internal, invalid, not_found, overloaded, unavailable
from services.common.packing import pack_u32, unpack_u32
from services.gateway.core.request import (
    ChatPrompt,
    EmbedsPrompt,
    Finish,
    FinishReason,
    GenerationRequest,
    Prompt,
    Role,
    Route,
    SamplingParams,
    Score,
    Sink,
    StopParams,
    StructuredOutput,
    TextPrompt,
    TokenizedPrompt,
    TokenPrompt,
)
from services.gateway.core.routing_hints import RoutingHints
from services.gateway.pipeline.config import PipelineConfig
from services.gateway.pipeline.pipeline import Generation, Pipeline
from services.gateway.pipeline.stages import (
    Components,
    CustomStream,
    PlaceStage,
    PostprocessStage,
    RouteStage,
    TextDelta,
    TokenizeStage,
)
from services.gateway.placement.selector import Placement, PlacementRequest
from services.gateway.workers.registry import WorkerEntry

__all__ = [
    "ChatPrompt",
    "Components",
    "CustomStream",
    "EmbedsPrompt",
    "ErrorKind",
    "Finish",
    "FinishReason",
    "Generation",
    "GenerationRequest",
    "Pipeline",
    "PipelineConfig",
    "PlaceStage",
    "Placement",
    "PlacementRequest",
    "PostprocessStage",
    "Prompt",
    "Role",
    "Route",
    "RouteStage",
    "RoutingHints",
    "SamplingParams",
    "Score",
    "Sink",
    "SluiceError",
    "StopParams",
    "StructuredOutput",
    "TextDelta",
    "TextPrompt",
    "TokenPrompt",
    "TokenizeStage",
    "TokenizedPrompt",
    "WorkerEntry",
    "internal",
    "invalid",
    "not_found",
    "overloaded",
    "pack_u32",
    "unavailable",
    "unpack_u32",
]
