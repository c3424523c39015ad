"""The parts of a model card that do not depend on the engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.base.errors import invalid, quoted
from services.common.packages import model_files as models
from services.worker.contract.capabilities import GUIDED, Capability
from services.worker.contract.engine import EngineConfig
from services.worker.contract.generation import Role
from services.worker.settings import WorkerSettings

VLLM_AND_SGLANG = frozenset(
    {
        Capability.TOKEN_IDS,
        Capability.LOGPROBS,
        Capability.PROMPT_LOGPROBS,
        *GUIDED,
        Capability.DATA_PARALLEL_RANK,
        Capability.EMBEDDINGS,
        Capability.KV_EVENTS,
        Capability.PREFILL,
        Capability.DECODE,
        Capability.CLEAR_CACHE,
        Capability.PROFILE,
    }
)
"""What vLLM and SGLang can do, also through vLLM's gRPC server; each adds its sampling parameters and more."""
HOSTED = VLLM_AND_SGLANG | {
    Capability.PRIORITY,
    Capability.CACHE_SALT,
    Capability.LORA,
    Capability.LORA_LOADING,
    Capability.SLEEP,
}
"""The same for an engine in the worker's process."""


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the classes of a model that classifies sequences, from its config.json; empty for other models."""
    architectures = config.get("architectures") or ()
    if not any(str(name).endswith("ForSequenceClassification") for name in architectures):
        return ()
    names = config.get("id2label") or {0: "LABEL_0", 1: "LABEL_1"}  # transformers' own defaults
    return tuple(str(names[key]) for key in sorted(names, key=int))


def declared_block_size(settings: WorkerSettings, engine_size: int) -> int:
    """Returns --block-size, of an engine that runs already; 0 if it is not set.

    Args:
        engine_size: Tokens per block or page of the engine; 0 if unknown.

    Raises:
        SluiceError: INVALID_ARGUMENT when the two sizes are incompatible.
    """
    if "block_size" not in settings.model_fields_set:
        return 0
    declared = settings.block_size
    if engine_size and declared % engine_size and engine_size % declared:
        raise invalid(
            f"--block-size is {declared}, but the engine's blocks have {engine_size} tokens; one must be a multiple of "
            "the other. Remove --block-size.",
            param="block_size",
        )
    return declared


def named_by_server(settings: WorkerSettings, name: str, source: str) -> WorkerSettings:
    """Returns the settings with the model that the engine's server names.

    Raises:
        SluiceError: INVALID_ARGUMENT for a name or source in which `--model` would read more than that: after an ``@``
            it names code to be loaded.
    """
    if not name or not source or "=" in name or "@" in source:
        raise invalid(
            f"The engine's server names its model {quoted(name)} and its source {quoted(source)}, which cannot be used "
            "as they are; set --model NAME=SOURCE.",
            param="model",
        )
    return settings.model_copy(update={"model": f"{name}={source}"})


def engine_config(settings: WorkerSettings, path: Path, engine: str, **measured: Any) -> EngineConfig:
    """Returns the description of a started engine.

    Args:
        path: Folder of the model's tokenizer files.
        measured: Further fields of EngineConfig, as the engine reports them.
    """
    return EngineConfig(
        **{"source": settings.spec.source, **measured},
        model=settings.spec.name,
        processor=settings.spec.processor or models.detect_processor(path),
        fingerprint=models.fingerprint(path),
        role=Role[settings.role.upper()],
        engine=engine,
    )
