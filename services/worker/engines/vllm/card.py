"""Builds the model card of a started vLLM from its VllmConfig, without importing vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.worker.contract.capabilities import GUIDED, SAMPLING, Capability
from services.worker.contract.engine import EngineConfig
from services.worker.engines.inprocess import card
from services.worker.engines.inprocess.card import HOSTED
from services.worker.engines.inprocess.sampling import Facts
from services.worker.settings import WorkerSettings

CAPABILITIES = HOSTED | SAMPLING | {Capability.PROMPT_EMBEDS, Capability.CLASSIFICATION, Capability.IMAGE}
_POOLING = frozenset({Capability.TOKEN_IDS, Capability.LORA, Capability.LORA_LOADING})


def capabilities(config: Any, *, has_events: bool) -> frozenset[Capability]:
    """Returns the capabilities of the started engine; `config` is its VllmConfig."""
    model = config.model_config
    supported = {
        Capability.PROMPT_EMBEDS: model.enable_prompt_embeds,
        Capability.IMAGE: takes_images(config),
        Capability.PRIORITY: config.scheduler_config.policy == "priority",
        Capability.DATA_PARALLEL_RANK: config.parallel_config.data_parallel_size > 1,
        Capability.LORA: config.lora_config is not None,
        Capability.LORA_LOADING: config.lora_config is not None,
        Capability.KV_EVENTS: has_events,
        Capability.PREFILL: config.kv_transfer_config is not None,
        Capability.DECODE: config.kv_transfer_config is not None,
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


def takes_images(config: Any) -> bool:
    """Returns whether the model takes images, and the worker serves it whole.

    A prefill worker's tokens continue on a decode worker, where vLLM needs the images again.
    """
    model = config.model_config
    if config.kv_transfer_config is not None or not getattr(model, "supports_multimodal_inputs", False):
        return False
    hf = model.hf_config
    return getattr(hf, "vision_config", None) is not None and model.multimodal_config.get_limit_per_prompt("image") > 0


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
    settings: WorkerSettings, path: Path, config: Any, version: str, adapters: tuple[str, ...], *, has_events: bool
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
        capabilities=capabilities(config, has_events=has_events),
        adapters=adapters,
        labels=labels(config),
        data_parallel_size=int(config.parallel_config.data_parallel_size),
        engine_version=version,
    )
