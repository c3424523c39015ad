"""Maps the options of a request to the engine capabilities they require."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from services.worker.contract.capabilities import Capability
from services.worker.contract.generation import GenerateRequest

Uses = Callable[[GenerateRequest], bool]

GUIDED_KINDS = {
    "json_schema": Capability.GUIDED_JSON,
    "json_object": Capability.GUIDED_JSON,
    "regex": Capability.GUIDED_REGEX,
    "ebnf": Capability.GUIDED_GRAMMAR,
    "choice": Capability.GUIDED_CHOICE,
    "structural_tag": Capability.STRUCTURAL_TAG,
}


# Capability, API field, and whether a request uses it. A value without effect does not count as use.
_OPTIONS: tuple[tuple[Capability, str, Uses], ...] = (
    (Capability.TEXT, "prompt", lambda request: request.text is not None),
    (Capability.MESSAGES, "prompt", lambda request: request.messages_json is not None),
    (Capability.PROMPT_EMBEDS, "prompt_embeds", lambda request: request.embeds is not None),
    (Capability.TEXT_OUT, "postprocess", lambda request: request.text_out is not None),
    (Capability.LOGPROBS, "logprobs", lambda request: request.logprobs is not None),
    (Capability.PROMPT_LOGPROBS, "prompt_logprobs", lambda request: request.prompt_logprobs is not None),
    (Capability.MIN_TOKENS, "min_tokens", lambda request: request.stop.min_tokens > 0),
    (Capability.IGNORE_EOS, "ignore_eos", lambda request: request.stop.ignore_eos),
    (Capability.PRIORITY, "priority", lambda request: request.priority != 0),
    (Capability.CACHE_SALT, "cache_salt", lambda request: bool(request.cache_salt)),
    # An engine without data-parallel ranks runs everything on rank 0.
    (Capability.DATA_PARALLEL_RANK, "data_parallel_rank", lambda request: bool(request.data_parallel_rank)),
    (Capability.LORA, "lora", lambda request: bool(request.lora)),
)


def demands(request: GenerateRequest) -> Iterator[tuple[Capability, str]]:
    """Yields the capabilities a request requires, each with the API field that requires it."""
    for capability, param, uses in _OPTIONS:
        if uses(request):
            yield capability, param
    for name in request.sampling.used():
        yield Capability(name), name
    for kind in dict.fromkeys(item.span.kind for item in request.media):
        yield Capability(kind.capability), "media"
    if request.guided is not None:
        yield GUIDED_KINDS[request.guided.kind], "response_format"
