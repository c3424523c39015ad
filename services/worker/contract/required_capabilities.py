"""Maps the options of a request to the engine capabilities they require."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from services.common.types.sampling import UNSET
from services.worker.contract.capabilities import Capability
from services.worker.contract.generation import GenerateRequest

GUIDED_KINDS = {
    "json_schema": Capability.GUIDED_JSON,
    "json_object": Capability.GUIDED_JSON,
    "regex": Capability.GUIDED_REGEX,
    "ebnf": Capability.GUIDED_GRAMMAR,
    "choice": Capability.GUIDED_CHOICE,
    "structural_tag": Capability.STRUCTURAL_TAG,
}


# Capability, API field, value of a request, and the value besides None that does not count as use.
_OPTIONS: tuple[tuple[Capability, str, Callable[[GenerateRequest], Any], Any], ...] = (
    (Capability.TEXT, "prompt", attrgetter("text"), None),
    (Capability.MESSAGES, "prompt", attrgetter("messages_json"), None),
    (Capability.PROMPT_EMBEDS, "prompt_embeds", attrgetter("embeds"), None),
    (Capability.TEXT_OUT, "postprocess", attrgetter("text_out"), None),
    (Capability.LOGPROBS, "logprobs", attrgetter("logprobs"), None),
    (Capability.PROMPT_LOGPROBS, "prompt_logprobs", attrgetter("prompt_logprobs"), None),
    (Capability.MIN_TOKENS, "min_tokens", attrgetter("stop.min_tokens"), 0),
    (Capability.IGNORE_EOS, "ignore_eos", attrgetter("stop.ignore_eos"), False),
    (Capability.PRIORITY, "priority", attrgetter("priority"), 0),
    (Capability.CACHE_SALT, "cache_salt", attrgetter("cache_salt"), ""),
    # An engine without data-parallel ranks runs everything on rank 0.
    (Capability.DATA_PARALLEL_RANK, "data_parallel_rank", attrgetter("data_parallel_rank"), 0),
    (Capability.LORA, "lora", attrgetter("lora"), ""),
)


def demands(request: GenerateRequest) -> Iterator[tuple[Capability, str]]:
    """Yields the capabilities a request requires, each with the API field that requires it."""
    for capability, param, value_of, unused in _OPTIONS:
        value = value_of(request)
        if value is not None and value != unused:
            yield capability, param
    if request.sampling is not UNSET:
        for name in request.sampling.used():
            yield Capability(name), name
    for kind in dict.fromkeys(item.span.kind for item in request.media):
        yield Capability(kind.capability), "media"
    if request.guided is not None:
        yield GUIDED_KINDS[request.guided.kind], "response_format"
