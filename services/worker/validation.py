"""Refuses requests that can never work, before an engine sees them."""

from __future__ import annotations

import math

from services.common.errors import ErrorKind, SluiceError, invalid, not_found
from services.worker.engine import EngineConfig
from services.worker.generation import GenerateRequest, Role, Sampling

_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0, math.inf),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("frequency_penalty", -2, 2),
    ("presence_penalty", -2, 2),
    ("repetition_penalty", 0, math.inf),
)


def validate(request: GenerateRequest, config: EngineConfig) -> None:
    """Raises SluiceError naming the field at fault when this worker cannot run the request."""
    if not request.request_id:
        raise invalid("request_id is empty; it must be unique among all requests alive.", param="request_id")
    _validate_model(request, config)
    _validate_prompt(request, config)
    _validate_stop(request)
    _validate_sampling(request.sampling, config.vocab_size)
    _validate_placement(request, config)
    _validate_capabilities(request, config)


def _validate_model(request: GenerateRequest, config: EngineConfig) -> None:
    served = (config.model, *config.adapters)
    if request.model not in served:
        raise not_found(
            f"This worker does not serve model {request.model!r}; it serves {', '.join(served)}.",
            param="model",
            code="model_not_found",
        )
    if request.lora and request.lora not in config.adapters:
        raise not_found(f"LoRA adapter {request.lora!r} is not loaded.", param="lora", code="adapter_not_found")


def _validate_prompt(request: GenerateRequest, config: EngineConfig) -> None:
    for name, given in (("text", request.text), ("messages", request.messages_json)):
        if given is not None:
            _require(name, config, "prompt")
            return
    length = len(request.token_ids)
    if length == 0:
        raise invalid("The prompt is empty; at least one token is needed.", param="prompt")
    if config.vocab_size and (highest := max(request.token_ids)) >= config.vocab_size:
        raise invalid(
            f"Token id {highest} is outside the vocabulary; ids are below {config.vocab_size}.", param="prompt"
        )
    if config.context_length and length >= config.context_length:
        raise invalid(
            f"The prompt has {length} tokens; with at least one token to generate it does not fit into the context of "
            f"{config.context_length}.",
            param="prompt",
            code="context_length_exceeded",
        )
    if request.resumed_tokens >= length:
        raise invalid("resumed_tokens must leave at least one token of the prompt.", param="resumed_tokens")


def _validate_stop(request: GenerateRequest) -> None:
    stop = request.stop
    if stop.max_tokens is None:
        return
    if stop.max_tokens < 1:
        raise invalid("max_tokens must be at least 1.", param="max_tokens")
    if stop.min_tokens > stop.max_tokens:
        raise invalid("min_tokens must not be above max_tokens.", param="min_tokens")


def _validate_sampling(sampling: Sampling, vocab_size: int) -> None:
    for name, lowest, highest in _RANGES:
        value = getattr(sampling, name)
        if value is not None and not (lowest <= value <= highest and math.isfinite(value)):
            limit = "" if math.isinf(highest) else f" and at most {highest:g}"
            raise invalid(f"{name} must be a number of at least {lowest:g}{limit}.", param=name)
    for name in ("top_p", "repetition_penalty"):
        if getattr(sampling, name) == 0:
            raise invalid(f"{name} must be above 0.", param=name)
    if sampling.top_k is not None and sampling.top_k < -1:
        raise invalid("top_k must be at least 1; 0 or -1 for no limit.", param="top_k")
    if any(not -100 <= bias <= 100 for bias in sampling.logit_bias.values()):
        raise invalid("logit_bias values must be between -100 and 100.", param="logit_bias")
    if vocab_size and any(token_id >= vocab_size for token_id in sampling.logit_bias):
        raise invalid(f"logit_bias names token ids outside the vocabulary of {vocab_size}.", param="logit_bias")


def _validate_placement(request: GenerateRequest, config: EngineConfig) -> None:
    rank = request.data_parallel_rank
    if rank is not None and rank >= config.data_parallel_size:
        raise invalid(
            f"data_parallel_rank {rank} does not exist; this worker has {config.data_parallel_size}.",
            param="data_parallel_rank",
        )
    if request.disaggregation is not None and request.disaggregation.role not in (Role.AGGREGATED, config.role):
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION,
            f"This worker serves {config.role.name.lower()} requests only.",
            param="disaggregation",
        )


def _validate_capabilities(request: GenerateRequest, config: EngineConfig) -> None:
    if request.logprobs is not None or request.prompt_logprobs is not None:
        _require("logprobs", config, "logprobs")
    if request.guided is not None:
        _require("guided", config, "response_format")


def _require(capability: str, config: EngineConfig, param: str) -> None:
    if capability not in config.capabilities:
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION,
            f"The {config.engine or 'hosted'} engine does not have the capability {capability!r}.",
            param=param,
            code="unsupported_by_engine",
        )
