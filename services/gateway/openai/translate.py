"""OpenAI requests in the gateway's own words."""

from __future__ import annotations

from typing import Any

import orjson

from services.common.errors import invalid
from services.common.packing import pack_u32
from services.gateway.generation import (
    ChatPrompt,
    GenerationRequest,
    Parsing,
    Prompt,
    Sampling,
    StopRules,
    TextPrompt,
    TokenPrompt,
)
from services.gateway.openai.schemas import ChatCompletionRequest, CompletionRequest, GenerationFields


def chat_request(
    body: dict[str, Any], fields: ChatCompletionRequest, request_id: str, max_choices: int
) -> GenerationRequest:
    """A chat completion; SluiceError(INVALID_ARGUMENT) names what cannot be honoured."""
    _refuse_unsupported_chat(fields)
    prompt = ChatPrompt(
        messages_json=orjson.dumps(body["messages"]),
        tools_json=_dump(body.get("tools")),
        tool_choice_json=_dump(body.get("tool_choice")),
        template_kwargs_json=_dump(_template_kwargs(fields)),
        chat_template=fields.chat_template or "",
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=bool(fields.continue_final_message),
        documents_json=_dump(body.get("documents")),
    )
    parsing = Parsing(
        tool_parser="auto" if fields.tools and fields.tool_choice != "none" else "",
        reasoning_parser="auto",
        tools_json=prompt.tools_json,
        tool_choice_json=prompt.tool_choice_json,
        single_tool_call=fields.parallel_tool_calls is False,
    )
    max_tokens = fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens
    return _request(fields, prompt, request_id, max_tokens, max_choices, parsing)


def completion_requests(fields: CompletionRequest, request_id: str, max_choices: int) -> list[GenerationRequest]:
    """A completion, one request per prompt; SluiceError(INVALID_ARGUMENT) names what cannot be honoured."""
    if fields.suffix:
        raise invalid("suffix is not supported by this model's engine.", param="suffix", code="unsupported_parameter")
    if fields.logprobs is not None:
        raise invalid(
            "logprobs are not supported by this model's engine.", param="logprobs", code="unsupported_parameter"
        )
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise invalid("best_of is only supported when it equals n.", param="best_of", code="unsupported_parameter")
    prompts = fields.prompts
    if len(prompts) * (fields.n or 1) > max_choices:
        raise invalid(
            f"{len(prompts)} prompts times n are more than {max_choices} choices.", param="prompt", code="invalid_value"
        )
    max_tokens = 16 if fields.max_tokens is None else fields.max_tokens  # OpenAI's default for this endpoint
    requests = []
    for index, given in enumerate(prompts):
        prompt: Prompt = (
            TextPrompt(given, fields.add_special_tokens) if isinstance(given, str) else TokenPrompt(pack_u32(given))
        )
        requests.append(_request(fields, prompt, f"{request_id}-{index}", max_tokens, max_choices))
    return requests


def _request(
    fields: GenerationFields,
    prompt: Prompt,
    request_id: str,
    max_tokens: int | None,
    max_choices: int,
    parsing: Parsing | None = None,
) -> GenerationRequest:
    choices = fields.n or 1
    if choices > max_choices:
        raise invalid(
            f"n is {choices}, but at most {max_choices} choices are allowed.", param="n", code="invalid_value"
        )
    min_tokens = fields.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid(f"min_tokens is {min_tokens}, more than the {max_tokens} of max_tokens.", param="min_tokens")
    return GenerationRequest(
        request_id=request_id,
        model=fields.model,
        prompt=prompt,
        choices=choices,
        sampling=Sampling(
            temperature=fields.temperature,
            top_p=fields.top_p,
            top_k=fields.top_k,
            min_p=fields.min_p,
            frequency_penalty=fields.frequency_penalty,
            presence_penalty=fields.presence_penalty,
            repetition_penalty=fields.repetition_penalty,
            seed=fields.seed,
            logit_bias=fields.logit_bias,
        ),
        stop=StopRules(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            strings=fields.stop,
            token_ids=tuple(fields.stop_token_ids or ()),
            ignore_eos=bool(fields.ignore_eos),
            include_stop_string=bool(fields.include_stop_str_in_output),
        ),
        skip_special_tokens=fields.skip_special_tokens is not False,
        parsing=parsing,
        priority=fields.priority or 0,
        cache_salt=fields.cache_salt or "",
    )


def _template_kwargs(fields: ChatCompletionRequest) -> dict[str, Any] | None:
    kwargs = dict(fields.chat_template_kwargs or {})
    if fields.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", fields.reasoning_effort)
    return kwargs or None


def _refuse_unsupported_chat(fields: ChatCompletionRequest) -> None:
    if fields.logprobs or fields.top_logprobs is not None:
        name = "logprobs" if fields.logprobs else "top_logprobs"
        raise invalid(f"{name} is not supported by this model's engine.", param=name, code="unsupported_parameter")
    if fields.response_format is not None and fields.response_format.get("type") != "text":
        raise invalid(
            "Only the response_format {'type': 'text'} is supported by this model's engine.",
            param="response_format",
            code="unsupported_parameter",
        )
    if fields.modalities not in (None, ["text"]):
        raise invalid("Only the modality 'text' is supported.", param="modalities", code="unsupported_parameter")


def _dump(value: Any) -> bytes:
    return b"" if value is None else orjson.dumps(value)
