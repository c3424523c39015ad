"""Maps requests to SGLang's parameters, without importing SGLang."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.base.errors import invalid
from services.worker.contract.capabilities import Capability
from services.worker.contract.generation import GenerateRequest, SamplingParams, StopParams, StructuredOutput
from services.worker.engines.inprocess import sampling as inprocess
from services.worker.engines.inprocess.card import HOSTED
from services.worker.engines.inprocess.sampling import (
    ENGINE_OPTIONS,
    output_limit,
    same_name,
    sampling_of,
    set_by,
    stop_ids,
)
from services.worker.engines.shared.media_prompts import data_url, with_single_placeholders
from services.worker.engines.shared.sglang_fields import FIELDS

CAPABILITIES = HOSTED | sampling_of(FIELDS) | {Capability.THINKING_TOKEN_BUDGET, Capability.IMAGE}
"""What SGLang supports, whatever its configuration."""

SAMPLING_OPTIONS = set_by(FIELDS, ENGINE_OPTIONS)
"""Fields of SGLang's SamplingParams allowed in engine_options."""

REQUEST_OPTIONS = frozenset(
    {
        "custom_labels",
        "custom_logit_processor",
        "disagg_prefill_dp_rank",
        "extra_key",
        "kv_hints",
        "require_reasoning",
        "routing_key",
        "session_id",
    }
)
"""Fields of SGLang's GenerateReqInput allowed in engine_options."""

_MAX_SEED = (1 << 63) - 1
"""Seed of SGLang, as it has 64 signed bits; of a larger one the lower 63 bits are used."""


@dataclass(frozen=True, slots=True)
class Facts(inprocess.Facts):
    """Adds what only the mapping to SGLang's parameters needs.

    Attributes:
        has_priorities: Whether the scheduler supports priorities.
        low_first: Whether lower priority values run first.
        has_seeds: Whether seeds make outputs reproducible; if not, seeds are not sent.
        placeholder: Placeholder token of images; None: SGLang takes none with this model.
    """

    has_priorities: bool = False
    low_first: bool = True
    has_seeds: bool = False
    placeholder: int | None = None


def engine_request(request: GenerateRequest, rid: str, facts: Facts) -> dict[str, Any]:
    """Returns arguments for SGLang's GenerateReqInput.

    Args:
        rid: Engine request id; must not be a prefix of another id in flight, because SGLang aborts by prefix.

    Raises:
        SluiceError: INVALID_ARGUMENT for an unsupported engine option, or images that do not fit the prompt.
    """
    sampling_options, request_options = _engine_options(request.sampling.engine_options)
    fields: dict[str, Any] = {
        "rid": rid,
        "input_ids": request.token_ids.tolist(),
        "sampling_params": sampling_params(request, facts) | sampling_options,
        "stream": True,
        **request_options,
    }
    if request.logprobs is not None or request.prompt_logprobs is not None:
        fields |= {
            "return_logprob": True,
            "top_logprobs_num": max(request.logprobs or 0, request.prompt_logprobs or 0),
            "logprob_start_len": -1 if request.prompt_logprobs is None else 0,
        }
    if request.media:  # with expanded ids SGLang would never return, and it ignores surplus images
        fields["input_ids"] = with_single_placeholders(request, facts.placeholder, "SGLang")
        fields["image_data"] = [data_url(item.file.data) for item in request.media]
    if request.lora:
        fields["lora_path"] = request.lora
    if request.cache_salt:
        fields["cache_salt"] = request.cache_salt
    if facts.has_priorities:
        fields["priority"] = request.priority if facts.low_first else -request.priority
    if request.data_parallel_rank is not None:
        fields["routed_dp_rank"] = request.data_parallel_rank
    if request.sampling.thinking_token_budget is not None:
        fields |= {"max_thinking_tokens": request.sampling.thinking_token_budget, "require_reasoning": True}
    return fields


def sampling_params(request: GenerateRequest, facts: Facts) -> dict[str, Any]:
    """Returns arguments for SGLang's SamplingParams."""
    params = {
        **facts.defaults,
        **_sampling(request.sampling, facts),
        **_stop(request.stop, facts.room(request)),
    }
    if request.guided is not None:
        params |= _guided(request.guided)
    return params


def _sampling(sampling: SamplingParams, facts: Facts) -> dict[str, Any]:
    params = sampling.given(same_name(FIELDS))
    if sampling.top_k is not None:
        params["top_k"] = sampling.top_k if sampling.top_k > 0 else -1
    if sampling.seed is not None and facts.has_seeds:
        params["sampling_seed"] = sampling.seed & _MAX_SEED
    if sampling.logit_bias:
        params["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias.items()}
    return params


def _stop(stop: StopParams, room: int) -> dict[str, Any]:
    """With ignore_eos SGLang stops at no id; it still needs them to suppress these ids before min_new_tokens."""
    limit = output_limit(stop, room)
    params: dict[str, Any] = {"max_new_tokens": limit}
    ends = stop_ids(stop)
    if ends:
        params["stop_token_ids"] = sorted(ends)
    if stop.ignore_eos:
        params["ignore_eos"] = True
    if stop.min_tokens and (ends or not stop.ignore_eos):
        params["min_new_tokens"] = min(stop.min_tokens, limit)
    return params


def _guided(guided: StructuredOutput) -> dict[str, Any]:
    if guided.kind == "choice":
        return {"ebnf": choice_grammar(tuple(guided.grammar))}
    if guided.kind == "json_object":
        return {"json_schema": json.dumps({"type": "object"})}
    return {guided.kind: guided.grammar}


def choice_grammar(choices: tuple[str, ...]) -> str:
    """Returns an EBNF grammar that matches exactly the given texts."""
    return "root ::= " + " | ".join(json.dumps(choice) for choice in choices)


def _engine_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    unknown = sorted(set(options) - SAMPLING_OPTIONS - REQUEST_OPTIONS)
    if unknown:
        raise invalid(
            f"engine_options.{unknown[0]} is not supported by sglang; use the request's own field, or one of "
            f"{', '.join(sorted(SAMPLING_OPTIONS | REQUEST_OPTIONS))}.",
            param=f"engine_options.{unknown[0]}",
        )
    return (
        {name: value for name, value in options.items() if name in SAMPLING_OPTIONS},
        {name: value for name, value in options.items() if name in REQUEST_OPTIONS},
    )
