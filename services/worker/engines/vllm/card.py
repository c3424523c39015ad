"""Builds the model card of a started vLLM from its VllmConfig, without importing vLLM."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from services.common.types.media.spans import MediaKind
from services.worker.contract.capabilities import GUIDED, MEDIA, Capability
from services.worker.contract.engine import EngineConfig
from services.worker.engines.inprocess import card
from services.worker.engines.inprocess.card import HOSTED
from services.worker.engines.inprocess.sampling import Facts, sampling_of
from services.worker.engines.vllm.fields import FIELDS
from services.worker.settings import WorkerSettings

CAPABILITIES = HOSTED | sampling_of(FIELDS) | MEDIA | {Capability.PROMPT_EMBEDS, Capability.CLASSIFICATION}
_POOLING = frozenset({Capability.TOKEN_IDS, Capability.LORA, Capability.LORA_LOADING})


def capabilities(config: Any, *, has_events: bool, media: Collection[MediaKind] = ()) -> frozenset[Capability]:
    """Returns the capabilities of the started engine.

    Args:
        config: its VllmConfig.
        media: kinds of items that it takes. None is offered with a KV connector: a prefill worker's tokens continue on
            a decode worker, where vLLM needs the items again.
    """
    model = config.model_config
    has_connector = config.kv_transfer_config is not None
    supported = {
        Capability.PROMPT_EMBEDS: model.enable_prompt_embeds,
        **{Capability(kind.capability): kind in media and not has_connector for kind in MediaKind},
        Capability.PRIORITY: config.scheduler_config.policy == "priority",
        Capability.DATA_PARALLEL_RANK: config.parallel_config.data_parallel_size > 1,
        Capability.LORA: config.lora_config is not None,
        Capability.LORA_LOADING: config.lora_config is not None,
        Capability.KV_EVENTS: has_events,
        Capability.PREFILL: has_connector,
        Capability.DECODE: has_connector,
        Capability.SLEEP: model.enable_sleep_mode,
        Capability.CLEAR_CACHE: config.cache_config.enable_prefix_caching,
        Capability.PROFILE: bool(getattr(config.profiler_config, "profiler", None)),
        Capability.THINKING_TOKEN_BUDGET: getattr(config, "reasoning_config", None) is not None,
        **dict.fromkeys(GUIDED, not model.skip_tokenizer_init),
    }
    missing = {capability for capability, has in supported.items() if not has}
    if model.runner_type == "pooling":
        return _POOLING - missing | {Capability.CLASSIFICATION if labels(config) else Capability.EMBEDDINGS}
    return CAPABILITIES - missing - {Capability.EMBEDDINGS, Capability.CLASSIFICATION}


def labels(config: Any) -> tuple[str, ...]:
    """Returns the classes of a model that classifies; empty for other models."""
    return card.labels_of(vars(config.model_config.hf_config) | {"id2label": config.model_config.hf_config.id2label})


def has_segments(config: Any) -> bool:
    """Returns whether the model distinguishes the two texts of a pair by token types, as BERT does."""
    return int(getattr(config.model_config.hf_config, "type_vocab_size", 0) or 0) > 1


def request_facts(config: Any) -> Facts:
    """Returns the engine facts that the request mapping needs."""
    return Facts(
        context_length=int(config.model_config.max_model_len),
        defaults=dict(config.model_config.get_diff_sampling_param()),
    )


def usable_blocks(config: Any) -> int:
    """Returns the number of KV-cache blocks per rank available to requests; vLLM reserves one."""
    return max(int(config.cache_config.num_gpu_blocks or 1) - 1, 0)


def eos_token_ids(config: Any) -> tuple[int, ...]:
    """Returns the end-of-sequence ids of the model's generation config and model config, sorted."""
    found: set[int] = set()
    for source in (config.model_config.try_get_generation_config(), vars(config.model_config.hf_config)):
        declared = source.get("eos_token_id")
        found.update(declared if isinstance(declared, list) else [] if declared is None else [declared])
    return tuple(sorted(found))


def engine_config(
    settings: WorkerSettings,
    path: Path,
    config: Any,
    version: str,
    adapters: tuple[str, ...],
    *,
    has_events: bool,
    media: Collection[MediaKind] = (),
) -> EngineConfig:
    """Returns the description of the started engine.

    Args:
        path: Folder of the model's tokenizer files.
        config: vLLM's VllmConfig after the start.
    """
    return card.engine_config(
        settings,
        path,
        "vllm",
        context_length=int(config.model_config.max_model_len),
        vocab_size=int(config.model_config.get_vocab_size()),
        block_size=int(config.cache_config.block_size),
        total_blocks=usable_blocks(config),
        max_sequences=int(config.scheduler_config.max_num_seqs),
        max_batched_tokens=int(config.scheduler_config.max_num_batched_tokens),
        eos_token_ids=eos_token_ids(config),
        capabilities=capabilities(config, has_events=has_events, media=media),
        adapters=adapters,
        labels=labels(config),
        data_parallel_size=int(config.parallel_config.data_parallel_size),
        engine_version=version,
    )
