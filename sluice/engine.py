"""The contract for engines: what an engine author implements, and the types that pass through it.

An engine is a class derived from `LLMEngine`, named by `sluice worker --engine MODULE:CLASS` or by the entry point
group `sluice.engines`. `examples/engine` is one; docs/writing-an-engine.md explains it.
"""

from services.common.base.errors import ErrorKind, SluiceError, internal, invalid, not_found, overloaded, unavailable
from services.common.packages.model_files import detect_processor, fingerprint, read_json, resolve
from services.common.types.hashing import HASH_SCHEME, block_hashes, seed_for
from services.worker.contract.cache_events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheTier,
    KvEvent,
    KvEventSource,
)
from services.worker.contract.capabilities import GUIDED, SAMPLING, Capability
from services.worker.contract.delta_stream import DeltaStream
from services.worker.contract.engine import Embedded, EngineConfig, GenerateContext, LLMEngine, Load, Sink
from services.worker.contract.generation import (
    Delta,
    Disaggregation,
    FinishReason,
    GenerateRequest,
    MediaFile,
    MediaItem,
    MediaKind,
    MediaSpan,
    PositionLogprobs,
    PromptEmbeds,
    Role,
    SamplingParams,
    StopParams,
    StructuredOutput,
    TokenLogprob,
    Usage,
)
from services.worker.contract.text_delta import TextUpdate
from services.worker.engines.shared.arguments import read_options
from services.worker.engines.shared.grammar_compiler import GrammarCompiler
from services.worker.settings import WorkerSettings

__all__ = [
    "GUIDED",
    "HASH_SCHEME",
    "SAMPLING",
    "BlocksRemoved",
    "BlocksStored",
    "CacheCleared",
    "CacheTier",
    "Capability",
    "Delta",
    "DeltaStream",
    "Disaggregation",
    "Embedded",
    "EngineConfig",
    "ErrorKind",
    "FinishReason",
    "GenerateContext",
    "GenerateRequest",
    "GrammarCompiler",
    "KvEvent",
    "KvEventSource",
    "LLMEngine",
    "Load",
    "MediaFile",
    "MediaItem",
    "MediaKind",
    "MediaSpan",
    "PositionLogprobs",
    "PromptEmbeds",
    "Role",
    "SamplingParams",
    "Sink",
    "SluiceError",
    "StopParams",
    "StructuredOutput",
    "TextUpdate",
    "TokenLogprob",
    "Usage",
    "WorkerSettings",
    "block_hashes",
    "detect_processor",
    "fingerprint",
    "internal",
    "invalid",
    "not_found",
    "overloaded",
    "read_json",
    "read_options",
    "resolve",
    "seed_for",
    "unavailable",
]
