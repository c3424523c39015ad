"""Rejects invalid and unsupported requests before they reach the engine."""

from __future__ import annotations

import json
import logging
import math
from array import array
from collections.abc import Collection, Sequence
from dataclasses import replace

from services.common.base.budgets import Budget
from services.common.base.errors import ErrorKind, SluiceError, invalid, not_found
from services.common.types.sampling import RANGES, UNSET
from services.worker.contract.capabilities import Capability
from services.worker.contract.engine import EngineConfig
from services.worker.contract.generation import (
    GenerateRequest,
    PromptEmbeds,
    Role,
    SamplingParams,
    StructuredOutput,
)
from services.worker.contract.required_capabilities import demands

log = logging.getLogger(__name__)

MAX_LOGPROBS = 1_024
"""Log-probabilities of a token; more are refused with INVALID_ARGUMENT."""
MAX_EMBEDDED = 2_048
"""Inputs of one embedding call; more are refused with INVALID_ARGUMENT."""
MAX_TOKEN_ID = (1 << 31) - 1
"""Token id for an engine of unknown vocabulary, as engines have signed 32-bit ids; refused with INVALID_ARGUMENT."""
ENGINE_OPTIONS_WITH_IDS = ("logprob_token_ids",)
"""Options of engines that are lists of token ids."""


def usable_defaults(config: EngineConfig) -> EngineConfig:
    """Returns the configuration without the model's end-of-sequence ids that are outside its vocabulary."""
    limit = _first_unknown_id(config)
    unknown = [token_id for token_id in config.eos_token_ids if token_id >= limit]
    if not unknown:
        return config
    log.warning(
        "the model's files list end-of-sequence ids outside its vocabulary, which are ignored; correct eos_token_id in "
        "its generation_config.json",
        extra={"ids": unknown, "vocabulary": config.vocab_size},
    )
    return replace(config, eos_token_ids=tuple(token_id for token_id in config.eos_token_ids if token_id < limit))


def without_unknown_eos(request: GenerateRequest, config: EngineConfig) -> GenerateRequest:
    """Returns the request without end-of-sequence ids outside the vocabulary: they come from the model's files."""
    stop = request.stop
    if not stop.eos_token_ids or max(stop.eos_token_ids) < (limit := _first_unknown_id(config)):
        return request
    unknown = frozenset(token_id for token_id in stop.eos_token_ids if token_id >= limit)
    known = tuple(token_id for token_id in stop.eos_token_ids if token_id < limit)
    return replace(request, stop=replace(stop, eos_token_ids=known, stop_token_ids=stop.stop_token_ids - unknown))


def validate(request: GenerateRequest, config: EngineConfig) -> None:
    """Raises SluiceError with the offending field when this worker cannot run the request."""
    if not request.request_id:
        raise invalid("request_id is empty; set one that is unique among all running requests.", param="request_id")
    _validate_model(request.model, request.lora, config)
    _validate_prompt(request, config)
    _validate_stop(request, config)
    if request.sampling is not UNSET:
        _validate_sampling(request.sampling, _first_unknown_id(config))
        _validate_choice_left(request)
    _validate_output(request)
    _validate_placement(request, config)
    _validate_capabilities(request, config)


def validate_grammar_size(guided: StructuredOutput, budget: Budget) -> None:
    """Raises SluiceError (INVALID_ARGUMENT) when a grammar exceeds the budget; call it before parsing the grammar."""
    texts = [guided.grammar] if isinstance(guided.grammar, str) else guided.grammar
    if sum(map(len, texts)) > budget.limit:
        raise budget.refuse(
            f"The {guided.kind} in response_format is longer than {budget.limit} characters", param="response_format"
        )


def validate_embedding(
    model: str, lora: str, inputs: Sequence[array[int]], dimensions: int, config: EngineConfig
) -> None:
    """Raises SluiceError with the offending field when this worker can neither embed nor classify the inputs."""
    _validate_model(model, lora, config)
    if Capability.CLASSIFICATION not in config.capabilities:
        require(Capability.EMBEDDINGS, config, "model")
    elif dimensions:
        raise invalid("dimensions is set, but this model classifies; leave it out.", param="dimensions")
    if lora:
        require(Capability.LORA, config, "lora")
    if not 1 <= len(inputs) <= MAX_EMBEDDED:
        raise invalid(
            f"The request has {len(inputs)} inputs to embed; send between 1 and {MAX_EMBEDDED}.", param="input"
        )
    for token_ids in inputs:
        _validate_tokens(token_ids, config, "input")
        _validate_fits(len(token_ids), config, "input", room=0)


def _validate_model(model: str, lora: str, config: EngineConfig) -> None:
    if model != config.model and model not in config.adapters:
        served = (config.model, *config.adapters)
        raise not_found(
            f"This worker does not serve model {model!r}; it serves {', '.join(served)}.",
            param="model",
            code="model_not_found",
        )
    if lora and lora not in config.adapters:
        raise not_found(
            f"LoRA adapter {lora!r} is not loaded; load it, or choose another one.",
            param="lora",
            code="adapter_not_found",
        )


def _validate_prompt(request: GenerateRequest, config: EngineConfig) -> None:
    if request.text is not None or request.messages_json is not None:
        _validate_untokenized(request)  # tokenized later; the capability for that is checked below
        return
    if request.embeds is not None:
        _validate_embeds(request.embeds, config)
        return
    _validate_tokens(request.token_ids, config, "prompt")
    _validate_fits(len(request.token_ids), config, "prompt", room=1)
    if request.resumed_tokens >= len(request.token_ids):
        raise invalid("resumed_tokens must be less than the number of prompt tokens.", param="resumed_tokens")


def validate_prepared_prompt(token_ids: array[int], config: EngineConfig, param: str) -> None:
    """Raises SluiceError for `param` when the engine cannot run the token ids that the worker produced from it."""
    _validate_tokens(token_ids, config, param)
    _validate_fits(len(token_ids), config, param, room=1)


def _validate_untokenized(request: GenerateRequest) -> None:
    if request.resumed_tokens:
        raise invalid(
            "resumed_tokens requires a prompt of token ids: the prompt's from the first delta, then those generated.",
            param="resumed_tokens",
        )


def _validate_embeds(embeds: PromptEmbeds, config: EngineConfig) -> None:
    if embeds.length < 1:
        raise invalid("The prompt embeddings are empty; at least one row is needed.", param="prompt_embeds")
    _validate_fits(embeds.length, config, "prompt_embeds", room=1)


def _validate_tokens(token_ids: array[int], config: EngineConfig, param: str) -> None:
    if not token_ids:
        raise invalid(f"The {param} is empty; at least one token is needed.", param=param)
    if (highest := max(token_ids)) >= (limit := _first_unknown_id(config)):
        raise invalid(f"Token id {highest} is outside the vocabulary; ids are below {limit}.", param=param)


def _validate_fits(length: int, config: EngineConfig, param: str, room: int) -> None:
    if config.context_length and length + room > config.context_length:
        needed = ", and at least one must be generated" if room else ""
        raise invalid(
            f"The {param} has {length} tokens{needed}; the context length is {config.context_length}. Shorten it.",
            param=param,
            code="context_length_exceeded",
        )


def _first_unknown_id(config: EngineConfig) -> int:
    """Returns the exclusive upper bound of the ids that the engine may receive."""
    return config.vocab_size or MAX_TOKEN_ID + 1


def _validate_stop(request: GenerateRequest, config: EngineConfig) -> None:
    stop = request.stop
    if stop.stop_token_ids:
        _validate_ids(stop.stop_token_ids, _first_unknown_id(config), "stop_token_ids")
    if stop.max_tokens is None:
        if config.context_length and stop.min_tokens > config.context_length:
            raise invalid(
                f"min_tokens must be at most the context length of {config.context_length}.", param="min_tokens"
            )
        return
    if stop.max_tokens < 1:
        raise invalid("max_tokens must be at least 1.", param="max_tokens")
    if stop.min_tokens > stop.max_tokens:
        raise invalid("min_tokens must be at most max_tokens.", param="min_tokens")


def _validate_choice_left(request: GenerateRequest) -> None:
    """Raises SluiceError when no allowed token may be generated: each is a bad word, or ends before min_tokens."""
    sampling, stop = request.sampling, request.stop
    if not sampling.allowed_token_ids:
        return
    banned = {word[0] for word in sampling.bad_words if len(word) == 1}
    if stop.min_tokens:
        banned |= stop.stop_token_ids
    if banned.issuperset(sampling.allowed_token_ids):
        raise invalid(
            "None of allowed_token_ids may be generated: bad_words has each of them, or it ends the generation before "
            "min_tokens. Allow another id.",
            param="allowed_token_ids",
        )


def _validate_sampling(sampling: SamplingParams, first_unknown_id: int) -> None:
    for name, (lowest, highest) in RANGES.items():
        value = getattr(sampling, name)
        if value is not None and not (lowest <= value <= highest and math.isfinite(value)):
            limit = "" if math.isinf(highest) else f" and at most {highest:g}"
            raise invalid(f"{name} must be a number of at least {lowest:g}{limit}.", param=name)
    for name in ("top_p", "repetition_penalty"):
        if getattr(sampling, name) == 0:
            raise invalid(f"{name} must be above 0.", param=name)
    if sampling.top_k is not None and sampling.top_k < -1:
        raise invalid("top_k must be at least 1, or 0 or -1 for no limit.", param="top_k")
    if any(not -100 <= bias <= 100 for bias in sampling.logit_bias.values()):
        raise invalid("logit_bias values must be between -100 and 100.", param="logit_bias")
    _validate_ids(sampling.logit_bias, first_unknown_id, "logit_bias")
    _validate_ids(sampling.allowed_token_ids, first_unknown_id, "allowed_token_ids")
    for word in sampling.bad_words:
        if not word:
            raise invalid("bad_words must not contain an empty word.", param="bad_words")
        _validate_ids(word, first_unknown_id, "bad_words")
    for name in ENGINE_OPTIONS_WITH_IDS:
        ids = sampling.engine_options.get(name)
        if ids is None:
            continue
        if not isinstance(ids, list) or not all(type(token_id) is int for token_id in ids):
            raise invalid(f"engine_options.{name} must be a list of token ids.", param=f"engine_options.{name}")
        _validate_ids(ids, first_unknown_id, f"engine_options.{name}")


def _validate_ids(token_ids: Collection[int], first_unknown_id: int, name: str) -> None:
    if not token_ids:
        return
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < first_unknown_id:
            raise invalid(
                f"{name} has token ids outside the vocabulary, such as {token_id}; ids are below {first_unknown_id}.",
                param=name,
            )


def _validate_output(request: GenerateRequest) -> None:
    for name, count in (("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)):
        if count is not None and count > MAX_LOGPROBS:
            raise invalid(f"{name} must be at most {MAX_LOGPROBS}.", param=name)
    if request.guided is not None:
        _validate_guided(request.guided)


def _validate_placement(request: GenerateRequest, config: EngineConfig) -> None:
    rank = request.data_parallel_rank
    if rank is not None and rank >= config.data_parallel_size:
        raise invalid(
            f"data_parallel_rank {rank} does not exist; ranks are below {config.data_parallel_size}.",
            param="data_parallel_rank",
        )
    _validate_role(request, config)


def _validate_role(request: GenerateRequest, config: EngineConfig) -> None:
    role = Role.AGGREGATED if request.disaggregation is None else request.disaggregation.role
    can_aggregate = config.role is Role.AGGREGATED or Capability.LOCAL_PREFILL in config.capabilities
    if role is not config.role and not (role is Role.AGGREGATED and can_aggregate):
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION,
            f"This worker has the {config.role.name.lower()} role and cannot run a {role.name.lower()} request; send "
            "it to another worker.",
            param="disaggregation",
            code="wrong_role",
        )


def _validate_guided(guided: StructuredOutput) -> None:
    if guided.kind == "choice":
        if not guided.grammar or not all(guided.grammar):
            raise invalid("A choice needs at least one text, and none may be empty.", param="response_format")
    elif guided.kind != "json_object" and not guided.grammar:
        raise invalid(f"The {guided.kind} of response_format is empty.", param="response_format")
    if guided.kind in ("json_schema", "structural_tag"):
        _validate_json(guided)


def _validate_json(guided: StructuredOutput) -> None:
    try:
        document = json.loads(str(guided.grammar))
    except (ValueError, RecursionError) as error:
        raise invalid(f"The {guided.kind} is not valid JSON.", param="response_format") from error
    if not isinstance(document, dict | bool):
        raise invalid(f"The {guided.kind} must be a JSON object.", param="response_format")


def _validate_capabilities(request: GenerateRequest, config: EngineConfig) -> None:
    for capability, param in demands(request):
        if capability not in config.accepted:
            require(capability, config, param)


def require(capability: str, config: EngineConfig, param: str) -> None:
    """Raises SluiceError (FAILED_PRECONDITION) for `param` when the engine lacks the capability."""
    if capability not in config.capabilities:
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION,
            f"The {config.engine or 'custom'} engine does not support the capability '{capability}'; omit {param} or "
            "use another engine.",
            param=param,
            code="unsupported_by_engine",
        )
