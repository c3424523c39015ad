"""The stages of the gateway's pipeline that an operator may replace, and the types that pass through them.

A stage is named in the configuration of the pipeline (docs/pipeline.md); `examples/plugins` has one of each.
"""

from services.common.base.errors import ErrorKind, SluiceError, internal, invalid, not_found, overloaded, unavailable
from services.common.base.packing import pack_u32, unpack_u32
from services.gateway.backends.placement.disaggregation_policy import DisaggregationPolicy
from services.gateway.backends.placement.interfaces import Placement, PlacementRequest, PlaceStage, WorkerRouter
from services.gateway.backends.workers.registry import WorkerEntry
from services.gateway.core.generation import AnsweredGeneration, Generation
from services.gateway.core.request import (
    ChatPrompt,
    EmbedsPrompt,
    Finish,
    FinishReason,
    GenerationRequest,
    Prompt,
    Reservations,
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
from services.gateway.pipeline.pipeline import Pipeline
from services.gateway.pipeline.stages import (
    Components,
    CustomStream,
    Handler,
    PostprocessStage,
    TextDelta,
    TokenizeStage,
)

__all__ = [
    "AnsweredGeneration",
    "ChatPrompt",
    "Components",
    "CustomStream",
    "DisaggregationPolicy",
    "EmbedsPrompt",
    "ErrorKind",
    "Finish",
    "FinishReason",
    "Generation",
    "GenerationRequest",
    "Handler",
    "Pipeline",
    "PipelineConfig",
    "PlaceStage",
    "Placement",
    "PlacementRequest",
    "PostprocessStage",
    "Prompt",
    "Reservations",
    "Role",
    "Route",
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
    "WorkerRouter",
    "internal",
    "invalid",
    "not_found",
    "overloaded",
    "pack_u32",
    "unavailable",
    "unpack_u32",
]
