"""What engines share at the start and at each request: the description of the model, limits and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.common import models
from services.common.errors import ErrorKind, SluiceError, invalid
from services.worker.contract.engine import EngineConfig
from services.worker.contract.generation import GenerateRequest, Role
from services.worker.settings import WorkerSettings


def describe(settings: WorkerSettings, path: Path, **facts: Any) -> EngineConfig:
    """Returns the description of a started engine.

    Args:
        path: Folder of the model's tokenizer files.
        facts: Fields of EngineConfig that the settings and files do not determine, or that differ from them.
    """
    declared: dict[str, Any] = {
        "model": settings.spec.name,
        "source": settings.spec.source,
        "processor": settings.spec.processor or models.detect_processor(path),
        "fingerprint": models.fingerprint(path),
        "role": Role[settings.role.upper()],
    }
    return EngineConfig(**declared | facts)


def output_limit(request: GenerateRequest, context_length: int) -> int:
    """Returns the maximum number of tokens to generate; raises SluiceError(INVALID_ARGUMENT) if none fits."""
    room = context_length - len(request.token_ids)
    limit = room if request.stop.max_tokens is None else min(request.stop.max_tokens, room)
    if limit < 1:
        raise invalid(
            f"The prompt leaves no room in the context of {context_length} tokens; shorten it.", param="prompt"
        )
    return limit


def engine_starting() -> SluiceError:
    """Returns the error of a request that arrives before the engine is ready."""
    return SluiceError(
        ErrorKind.UNAVAILABLE, "The engine is still starting; try again shortly.", code="engine_starting"
    )


def embeddings_only() -> SluiceError:
    """Returns the error of a generation on an engine that runs an embedding model."""
    return SluiceError(
        ErrorKind.FAILED_PRECONDITION,
        "This worker only computes embeddings; send the request to a model that generates text.",
        param="model",
        code="unsupported_by_engine",
    )
