"""Maps the options of a request to the engine capabilities they require."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from services.worker.contract.capabilities import Capability
from services.worker.contract.generation import GenerateRequest, SamplingParams

Uses = Callable[[GenerateRequest], bool]

GUIDED_KINDS = {
    "json_schema": Capability.GUIDED_JSON,
    "json_object": Capability.GUIDED_JSON,
    "regex": Capability.GUIDED_REGEX,
    "ebnf": Capability.GUIDED_GRAMMAR,
    "choice": Capability.GUIDED_CHOICE,
    "structural_tag": Capability.STRUCTURAL_TAG,
}


def _sampling(uses: Callable[[SamplingParams], bool]) -> Uses:
    return lambda request: uses(request.sampling)


# Capability, API field, and whether a request uses it. A value without effect does not count as use.
_OPTIONS: tuple[tuple[Capability, str, Uses], ...] = (
    (Capability.TEXT, "prompt", lambda request: request.text is not None),
    (Capability.MESSAGES, "prompt", lambda request: request.messages_json is not None),
    (Capability.PROMPT_EMBEDS, "prompt_embeds", lambda request: request.embeds is not None),
    (Capability.TEXT_OUT, "postprocess", lambda request: request.text_out is not None),
    (Capability.LOGPROBS, "logprobs", lambda request: request.logprobs is not None),
    (Capability.PROMPT_LOGPROBS, "prompt_logprobs", lambda request: request.prompt_logprobs is not None),
    (Capability.TEMPERATURE, "temperature", _sampling(lambda sampling: sampling.temperature is not None)),
    (Capability.TOP_P, "top_p", _sampling(lambda sampling: sampling.top_p not in (None, 1))),
    (Capability.TOP_K, "top_k", _sampling(lambda sampling: sampling.top_k not in (None, 0, -1))),
    (Capability.MIN_P, "min_p", _sampling(lambda sampling: bool(sampling.min_p))),
    (Capability.FREQUENCY_PENALTY, "frequency_penalty", _sampling(lambda sampling: bool(sampling.frequency_penalty))),
    (Capability.PRESENCE_PENALTY, "presence_penalty", _sampling(lambda sampling: bool(sampling.presence_penalty))),
    (
        Capability.REPETITION_PENALTY,
        "repetition_penalty",
        _sampling(lambda sampling: sampling.repetition_penalty not in (None, 1)),
    ),
    (Capability.SEED, "seed", _sampling(lambda sampling: sampling.seed is not None)),
    (Capability.LOGIT_BIAS, "logit_bias", _sampling(lambda sampling: bool(sampling.logit_bias))),
    (Capability.ALLOWED_TOKEN_IDS, "allowed_token_ids", _sampling(lambda sampling: bool(sampling.allowed_token_ids))),
    (Capability.BAD_WORDS, "bad_words", _sampling(lambda sampling: bool(sampling.bad_words))),
    (
        Capability.THINKING_TOKEN_BUDGET,
        "thinking_token_budget",
        _sampling(lambda sampling: sampling.thinking_token_budget is not None),
    ),
    (Capability.ENGINE_OPTIONS, "engine_options", _sampling(lambda sampling: bool(sampling.engine_options))),
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
    for kind in dict.fromkeys(item.span.kind for item in request.media):
        yield Capability(kind.capability), "media"
    if request.guided is not None:
        yield GUIDED_KINDS[request.guided.kind], "response_format"
