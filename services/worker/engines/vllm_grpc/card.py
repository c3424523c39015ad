"""Builds the model card of a vLLM gRPC server from its responses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from services.common.packages import model_files as models
from services.worker.contract.capabilities import USUAL_SAMPLING, Capability
from services.worker.contract.engine import EngineConfig
from services.worker.engines.http.dialect import Description
from services.worker.engines.inprocess import card
from services.worker.engines.inprocess.card import VLLM_AND_SGLANG
from services.worker.engines.inprocess.sampling import Facts
from services.worker.settings import WorkerSettings

CAPABILITIES = VLLM_AND_SGLANG | USUAL_SAMPLING | {Capability.IMAGE}


def with_model(settings: WorkerSettings, model: Any) -> WorkerSettings:
    """Returns the settings with the server's own model, unless --model is set."""
    source = model.tokenizer_path or model.model_path
    if "model" in settings.model_fields_set or not source:
        return settings
    return card.named_by_server(settings, model.served_model_name or models.default_name(source), source)


def check_answers(model: Any, server: Any) -> None:
    """Checks what the server chose; raises SluiceError for names that are not printable and numbers out of range.

    Args:
        model: Response of GetModelInfo.
        server: Response of GetServerInfo.
    """
    Description(
        version="",
        model=model.served_model_name,
        source=model.tokenizer_path or model.model_path,
        context_length=int(model.max_context_length),
        block_size=int(server.block_size),
        max_sequences=int(server.max_num_seqs),
        ranks=max(int(server.data_parallel_size), 1),
    )


def capabilities(
    model: Any, server: Any, *, has_events: bool, profiles: bool, takes_images: bool = False
) -> frozenset[Capability]:
    """Returns the capabilities of a running server.

    Args:
        model: Response of GetModelInfo.
        server: Response of GetServerInfo.
        has_events: Whether the server publishes KV events.
        profiles: Whether the server was started with a profiler, which its responses do not contain.
        takes_images: Whether the server has processed an image.
    """
    if not model.is_generation:
        return frozenset({Capability.TOKEN_IDS, Capability.EMBEDDINGS})
    missing = {Capability.EMBEDDINGS}
    if server.data_parallel_size < 2:
        missing.add(Capability.DATA_PARALLEL_RANK)
    if not has_events:
        missing.add(Capability.KV_EVENTS)
    if not profiles:
        missing.add(Capability.PROFILE)
    if not takes_images:
        missing.add(Capability.IMAGE)
    if not server.kv_connector:
        missing |= {Capability.PREFILL, Capability.DECODE}
    return CAPABILITIES - missing


def request_facts(model: Any) -> Facts:
    """Returns the engine properties that the request mapping needs."""
    try:
        defaults = json.loads(model.default_sampling_params_json or "{}")
    except ValueError:
        defaults = {}
    return Facts(int(model.max_context_length), defaults if isinstance(defaults, dict) else {})


def total_blocks(loads: Any, block_size: int) -> int:
    """Returns the number of KV-cache blocks per rank from the response of GetLoads; 0 if unknown."""
    tokens = max((load.max_total_num_tokens for load in loads.loads), default=0)
    return int(tokens) // block_size if block_size else 0


def engine_config(
    settings: WorkerSettings,
    path: Path,
    source: str,
    block_size: int,
    model: Any,
    server: Any,
    loads: Any,
    **flags: bool,
) -> EngineConfig:
    """Returns the description of the server.

    Args:
        path: Folder of the model's tokenizer files.
        source: Folder or hub id of these files on the card.
        block_size: Tokens per Sluice block; 0 if unknown.
        flags: Keyword arguments of `capabilities`.
    """
    return card.engine_config(
        settings,
        path,
        "vllm-grpc",
        source=source,
        context_length=int(model.max_context_length),
        vocab_size=int(model.vocab_size),
        block_size=block_size,
        total_blocks=total_blocks(loads, block_size),
        max_sequences=int(server.max_num_seqs),
        max_batched_tokens=0,
        eos_token_ids=tuple(sorted(model.eos_token_ids)),
        capabilities=capabilities(model, server, **flags),
        data_parallel_size=max(int(server.data_parallel_size), 1),
        engine_version=loads.version,
    )
