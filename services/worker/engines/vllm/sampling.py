"""Maps requests to vLLM's parameters, without importing vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.base.errors import invalid
from services.worker.contract.generation import GenerateRequest, Role, SamplingParams, StopParams, StructuredOutput
from services.worker.engines.inprocess.sampling import (
    ENGINE_OPTIONS,
    Facts,
    output_limit,
    same_name,
    set_by,
    stop_ids,
)
from services.worker.engines.vllm.fields import FIELDS, GUIDED_FIELDS
from services.worker.engines.vllm.handoff import Handoff

RESERVED = frozenset({"kv_transfer_params", "kv_cache_report_mode"})
"""Extra arguments set by the worker itself."""

OPTIONS = set_by(FIELDS, ENGINE_OPTIONS) - {"extra_args"}
"""Fields of SamplingParams allowed in engine_options; options that are not a field go into extra_args."""

GUIDED_OPTIONS = set_by(GUIDED_FIELDS, ENGINE_OPTIONS)
"""Fields of StructuredOutputsParams allowed in engine_options."""

_SAME_NAME = same_name(FIELDS)
_GUIDED = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}


def sampling_arguments(request: GenerateRequest, facts: Facts, handoff: Handoff | None = None) -> dict[str, Any]:
    """Returns keyword arguments of vLLM's SamplingParams.

    `structured_outputs` holds the arguments of StructuredOutputsParams. `bad_words_token_ids` goes into a private
    field, because SamplingParams accepts bad words as text only.

    Args:
        handoff: The prefill worker's handoff, on a decode worker.

    Raises:
        SluiceError: INVALID_ARGUMENT for an engine option that callers must not set.
    """
    sampling = request.sampling
    arguments: dict[str, Any] = {
        **_sampling(sampling, facts.defaults),
        **_stop(request.stop, facts.room(request), 0 if handoff is None else 1),
        **_engine_options(sampling.engine_options),
    }
    if request.logprobs is not None:
        arguments["logprobs"] = request.logprobs
    if request.prompt_logprobs is not None:
        arguments["prompt_logprobs"] = request.prompt_logprobs
    if request.guided is not None:
        arguments["structured_outputs"] = _guided(request.guided, sampling.engine_options)
    if transfer := _transfer(request, handoff):
        arguments.setdefault("extra_args", {})["kv_transfer_params"] = transfer
    if _is_prefill(request):
        arguments |= {"max_tokens": 1, "min_tokens": 1}
    return arguments


def _sampling(sampling: SamplingParams, defaults: Mapping[str, Any]) -> dict[str, Any]:
    arguments = {name: defaults[name] for name in _SAME_NAME if defaults.get(name) is not None}
    arguments |= sampling.given(_SAME_NAME)
    if sampling.logit_bias:
        arguments["logit_bias"] = dict(sampling.logit_bias)
    if sampling.allowed_token_ids:
        arguments["allowed_token_ids"] = list(sampling.allowed_token_ids)
    if sampling.bad_words:
        arguments["bad_words_token_ids"] = [list(word) for word in sampling.bad_words]
    return arguments


def _stop(stop: StopParams, room: int, generated: int) -> dict[str, Any]:
    limit = output_limit(stop, room)
    return {
        "max_tokens": max(limit - generated, 1),
        "min_tokens": max(min(stop.min_tokens, limit) - generated, 0),
        "stop_token_ids": sorted(stop_ids(stop)),
        "ignore_eos": stop.ignore_eos,
    }


def _engine_options(options: Mapping[str, Any]) -> dict[str, Any]:
    refused = RESERVED | FIELDS.keys() - OPTIONS | GUIDED_FIELDS.keys() - GUIDED_OPTIONS
    if forbidden := sorted(refused & options.keys()):
        raise invalid(
            f"engine_options.{forbidden[0]} is not allowed: use the request's own field, or leave it to the worker.",
            param="engine_options",
        )
    arguments: dict[str, Any] = {name: value for name, value in options.items() if name in OPTIONS}
    if extra := {name: value for name, value in options.items() if name not in OPTIONS | GUIDED_OPTIONS}:
        arguments["extra_args"] = extra
    return arguments


def _guided(guided: StructuredOutput, options: Mapping[str, Any]) -> dict[str, Any]:
    chosen = {name: value for name, value in options.items() if name in GUIDED_OPTIONS}
    if guided.kind == "json_object":
        return {"json_object": True, **chosen}
    if guided.kind == "choice":
        return {"choice": list(guided.grammar), **chosen}
    return {_GUIDED[guided.kind]: guided.grammar, **chosen}


def _is_prefill(request: GenerateRequest) -> bool:
    return request.disaggregation is not None and request.disaggregation.role is Role.PREFILL


def _transfer(request: GenerateRequest, handoff: Handoff | None) -> dict[str, Any]:
    """Returns the parameters for vLLM's KV connectors: keep the cache (prefill), or where it is (decode)."""
    if _is_prefill(request):
        return {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
    return {} if handoff is None else dict(handoff.transfer)
