"""Builds the model card of a started SGLang engine from its attributes, without importing SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.base.errors import ErrorKind, SluiceError
from services.worker.contract.capabilities import GUIDED, Capability
from services.worker.contract.engine import EngineConfig
from services.worker.engines.inprocess import card
from services.worker.engines.shared.media_prompts import placeholder_of
from services.worker.engines.shared.sglang_sampling import CAPABILITIES, Facts
from services.worker.settings import WorkerSettings

_EMBEDDING_ONLY = frozenset(
    {
        Capability.TOKEN_IDS,
        Capability.EMBEDDINGS,
        Capability.DATA_PARALLEL_RANK,
        Capability.LORA,
        Capability.LORA_LOADING,
        Capability.SLEEP,
        Capability.CLEAR_CACHE,
        Capability.PROFILE,
    }
)
_NEEDS_TOKENIZER = GUIDED | {Capability.MIN_TOKENS}


def capabilities(engine: Any) -> frozenset[Capability]:
    """Returns the capabilities of the started engine."""
    manager = engine.tokenizer_manager
    value = manager.config_value
    missing: set[Capability] = set()
    if not manager.is_generation:
        missing |= CAPABILITIES - _EMBEDDING_ONLY
    else:
        missing.add(Capability.EMBEDDINGS)
    if value("skip_tokenizer_init"):
        missing |= _NEEDS_TOKENIZER
    if value("grammar_backend") == "none":
        missing |= GUIDED
    if not value("enable_priority_scheduling"):
        missing.add(Capability.PRIORITY)
    if not value("enable_deterministic_inference"):
        missing.add(Capability.SEED)
    if not value("enable_strict_thinking"):
        missing.add(Capability.THINKING_TOKEN_BUDGET)
    if not value("enable_lora"):
        missing |= {Capability.LORA, Capability.LORA_LOADING}
    if placeholder(engine) is None:
        missing.add(Capability.IMAGE)
    if value("dp_size") < 2:
        missing.add(Capability.DATA_PARALLEL_RANK)
    else:
        missing.add(Capability.LORA_LOADING)
    if value("disable_radix_cache"):
        missing.add(Capability.KV_EVENTS)
    if not value("enable_memory_saver"):
        missing.add(Capability.SLEEP)
    mode = value("disaggregation_mode")
    missing |= {Capability.PREFILL, Capability.DECODE} - {Capability(mode) if mode != "null" else None}
    return CAPABILITIES - missing


def placeholder(engine: Any) -> int | None:
    """Returns the placeholder token of images; None where SGLang does not process images of this model."""
    manager = engine.tokenizer_manager
    if (
        manager.mm_processor is None
        or not manager.is_generation
        or manager.config_value("disaggregation_mode") != "null"
    ):
        return None
    return placeholder_of(vars(manager.model_config.hf_config))


def request_facts(engine: Any, context_length: int) -> Facts:
    """Returns the engine properties that the request mapping needs."""
    manager = engine.tokenizer_manager
    return Facts(
        context_length=context_length,
        defaults=dict(manager.model_config.get_default_sampling_params()),
        has_priorities=bool(manager.config_value("enable_priority_scheduling")),
        low_first=bool(manager.config_value("schedule_low_priority_values_first")),
        has_seeds=bool(manager.config_value("enable_deterministic_inference")),
        placeholder=placeholder(engine),
    )


def engine_config(
    settings: WorkerSettings, path: Path, engine: Any, info: Mapping[str, Any], version: str
) -> EngineConfig:
    """Returns the description of the started engine.

    Args:
        path: Folder of the model's tokenizer files.
        info: What the first scheduler reported at its start.
    """
    manager = engine.tokenizer_manager
    value = manager.config_value
    page = int(value("page_size"))
    supported = capabilities(engine)
    total_blocks = int(info["max_total_num_tokens"]) // page
    _check_memory(settings, total_blocks)
    return card.engine_config(
        settings,
        path,
        "sglang",
        # SGLang reserves a few positions; a prompt one token shorter than this always fits.
        context_length=min(int(manager.context_len), int(info["max_req_input_len"]) + 1),
        vocab_size=int(manager.model_config.vocab_size),
        block_size=page,
        total_blocks=total_blocks,
        max_sequences=int(value("max_running_requests") or 0),
        max_batched_tokens=max(int(value("chunked_prefill_size") or 0), 0),
        eos_token_ids=tuple(sorted(manager.model_config.hf_eos_token_id or ())),
        capabilities=supported,
        accepted=frozenset({Capability.SEED} - supported),
        adapters=tuple(sorted(manager.lora_registry.get_all_adapters())),
        data_parallel_size=int(value("dp_size")),
        engine_version=version,
    )


def _check_memory(settings: WorkerSettings, allocated: int) -> None:
    """Raises if the cache is smaller than requested; SGLang only logs that when memory is short."""
    requested = settings.total_blocks
    if "total_blocks" in settings.model_fields_set and allocated < requested:
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION,
            f"Not enough memory for {requested} blocks: SGLang allocated {allocated}; lower --total-blocks.",
            param="total-blocks",
            code="out_of_memory",
        )
