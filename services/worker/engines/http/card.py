"""Builds the model card of a remote engine from what its server reports."""

from __future__ import annotations

from pathlib import Path

from services.common.base.errors import ErrorKind, SluiceError
from services.common.packages import model_files as models
from services.preprocess.contract.generation_defaults import eos_ids
from services.worker.contract.capabilities import Capability
from services.worker.contract.engine import EngineConfig
from services.worker.engines.http.dialect import Description
from services.worker.engines.inprocess import card
from services.worker.settings import WorkerSettings

MIN_BLOCK = 16
"""Tokens of a block that a worker announces; smaller blocks of an engine are combined."""


def with_model(settings: WorkerSettings, described: Description) -> WorkerSettings:
    """Returns the settings with the server's own model, unless --model is set."""
    if "model" in settings.model_fields_set:
        return settings
    return card.named_by_server(settings, described.model, described.source)


def tokenizer_folder(settings: WorkerSettings) -> Path:
    """Returns the folder of the tokenizer's files; blocks, and may download them.

    Raises:
        SluiceError: NOT_FOUND when they are neither on this machine nor available from the hub.
    """
    try:
        return models.resolve(settings.spec.source)
    except SluiceError as error:
        if error.kind is not ErrorKind.NOT_FOUND:
            raise
        raise SluiceError(
            ErrorKind.NOT_FOUND,
            f"{error.message} Set --model NAME=SOURCE to a folder or hub id with the tokenizer of the server's model.",
            param="model",
        ) from error


def block_size(settings: WorkerSettings, engine_size: int) -> int:
    """Returns the tokens per Sluice block; 0 if unknown.

    Args:
        engine_size: tokens per block or page of the engine; small ones are combined.

    Raises:
        SluiceError: INVALID_ARGUMENT when --block-size is set and incompatible.
    """
    combined = engine_size * -(-MIN_BLOCK // engine_size) if engine_size else 0
    return card.declared_block_size(settings, engine_size) or combined


def vocab_size(path: Path) -> int:
    """Returns the vocabulary size in the model's config.json; 0 if absent."""
    config = models.read_json(path, "config.json")
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return size if isinstance(size, int) and size > 0 else 0


def engine_config(
    settings: WorkerSettings, path: Path, described: Description, engine: str, *, has_events: bool, address: str
) -> EngineConfig:
    """Returns the description of the engine.

    Args:
        path: folder of the tokenizer's files.
        has_events: whether the KV events were proven.
        address: host:port of the server.
    """
    size = block_size(settings, described.block_size)
    total = described.total_blocks * described.block_size // size if size else 0
    generation, model = models.read_json(path, "generation_config.json"), models.read_json(path, "config.json")
    missing = frozenset() if has_events else frozenset({Capability.KV_EVENTS})
    return card.engine_config(
        settings,
        path,
        engine,
        context_length=described.context_length,
        vocab_size=vocab_size(path),
        block_size=size,
        total_blocks=total,
        max_sequences=described.max_sequences,
        max_batched_tokens=0,
        eos_token_ids=eos_ids(generation.get("eos_token_id", model.get("eos_token_id"))),
        capabilities=described.capabilities - missing,
        accepted=described.accepted,
        adapters=described.adapters,
        data_parallel_size=described.ranks,
        engine_version=described.version,
        http_address=address,
    )
