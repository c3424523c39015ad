"""Translates chat completions and completions to generation requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from services.common.apis.prompts import (
    TEMPLATE_HINTS,
    ChatPrompt,
    TextPrompt,
    TokenPrompt,
    chat_prompt,
    implied_switches,
)
from services.common.base.budgets import Budget
from services.common.base.errors import invalid
from services.common.base.packing import pack_u32
from services.common.types.media.parts import MediaInput, take_media
from services.common.types.sampling import SCALARS, UNSET
from services.gateway.apis.openai.prompt_embeds import read_prompt_embeds
from services.gateway.apis.openai.schema_meter import SchemaMeter
from services.gateway.apis.openai.schemas import ChatCompletionRequest, CompletionRequest, GenerationFields, Tool
from services.gateway.apis.openai.structured_output import Constraint, read_constraint
from services.gateway.apis.openai.tool_choice import CALL_PARSER, forced_call
from services.gateway.apis.openai.unsupported_fields import fields_without_effect
from services.gateway.core.request import (
    GenerationRequest,
    Parsing,
    Prompt,
    SamplingParams,
    StopParams,
    StructuredOutput,
    no_effect,
)
from services.gateway.core.request_size import prompt_size, sizes_of
from services.gateway.http.body_budgets import BodyBudgets
from services.gateway.operations.field_names import FieldNameMap
from services.gateway.operations.media import media_needs

COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for completions."""


def chat_request(
    body: dict[str, Any],
    fields: ChatCompletionRequest,
    request_id: str,
    max_choices: int,
    budgets: BodyBudgets,
    forces_calls: bool = False,
    media: Sequence[MediaInput] | None = None,
) -> GenerationRequest:
    """Returns the generation request of a chat completion.

    Args:
        budgets: bounds the schemas of tools and constraint together.
        forces_calls: the model's engines support structured output, which enforces required tool calls.
        media: the items that references in the messages stand for; None: the messages contain the items themselves.

    Raises:
        SluiceError: INVALID_ARGUMENT for invalid or unsupported fields.
    """
    meter = SchemaMeter(budgets)
    count_tools(fields.tools, meter)
    constraint = read_constraint(fields, meter)
    messages = body["messages"]
    if media is None:
        messages, media = take_media(messages, budgets.media)
    prompt = chat_prompt(body, messages, media)
    forced = _forced_call(body, fields) if forces_calls else None
    if forced is not None:
        constraint = None  # it is about text, and the answer is a call
    parsing = _parsing(fields, prompt, forced)
    max_tokens = fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens
    logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    arguments = _template_fields(body)
    request = _request(
        fields, prompt, request_id, max_tokens, max_choices, logprobs, constraint, parsing, forced, arguments
    )
    check_choices([request], budgets.choice_bytes, client_names(fields, request), "messages")
    return request


def client_names(fields: GenerationFields, request: GenerationRequest) -> FieldNameMap:
    """Returns the client's names of the options whose names differ."""
    names = {"lora": "lora_path", "engine_options": "custom_params" if fields.custom_params else "vllm_xargs"}
    if fields.extra_key:
        names["cache_salt"] = "extra_key"
    for capability, field in request.needs:
        if field != "response_format" and (capability.startswith("guided_") or capability == "structural_tag"):
            names["response_format"] = field
    return FieldNameMap({**names, **fields.client_names})


def count_tools(tools: Sequence[Tool] | None, meter: SchemaMeter) -> None:
    """Measures the schemas of a chat's tools; raises SluiceError(INVALID_ARGUMENT) if one exceeds a budget."""
    for index, tool in enumerate(tools or ()):
        if tool.function.parameters is not None:
            meter.add_schema(tool.function.parameters, f"tools[{index}].function.parameters")


def completion_requests(
    fields: CompletionRequest, request_id: str, max_choices: int, budgets: BodyBudgets
) -> list[GenerationRequest]:
    """Returns the generation requests of a completion, one per prompt.

    Raises:
        SluiceError: INVALID_ARGUMENT for invalid or unsupported fields.
    """
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise invalid("best_of is not supported: it must equal n.", param="best_of", code="unsupported_parameter")
    prompts = fields.prompts
    if (fields.n or 1) <= max_choices < len(prompts) * (fields.n or 1):
        raise invalid(
            f"{len(prompts)} prompts times n exceed the limit of {max_choices} choices.",
            param="prompt",
            code="invalid_value",
        )
    max_tokens = COMPLETION_TOKENS if fields.max_tokens is None else max(fields.max_tokens, 1)
    constraint = read_constraint(fields, SchemaMeter(budgets))

    given: list[Prompt]
    if fields.prompt_embeds is not None:
        given = [read_prompt_embeds(fields.prompt_embeds)]
    else:
        given = [
            TextPrompt(value, fields.add_special_tokens) if isinstance(value, str) else TokenPrompt(pack_u32(value))
            for value in prompts
        ]
    first = _request(fields, given[0], f"{request_id}-0", max_tokens, max_choices, fields.logprobs, constraint)
    # The options are built once, for all prompts.
    rest = (replace(first, prompt=prompt, request_id=f"{request_id}-{i}") for i, prompt in enumerate(given[1:], 1))
    requests = [first, *rest]
    check_choices(requests, budgets.choice_bytes, client_names(fields, first), "prompt", fields.suffix or "")
    return requests


def check_choices(
    requests: Sequence[GenerationRequest], budget: Budget, names: FieldNameMap, prompt: str, suffix: str = ""
) -> None:
    """Raises SluiceError(INVALID_ARGUMENT) if all choices of a body together would be sent too much.

    Args:
        requests: of the body; their options are the same.
        names: the client's names of fields.
        prompt: the field of the prompt.
        suffix: what each prompt becomes longer by, later.
    """
    choices = requests[0].choices
    if choices * len(requests) == 1:
        return  # nothing is multiplied
    sizes = {field: size * len(requests) for field, size in sizes_of(requests[0]).items()}
    sizes["suffix"] = len(suffix) * len(requests)
    sizes["prompt"] = sum(prompt_size(request.prompt) for request in requests)
    if choices * sum(sizes.values()) <= budget.limit:
        return
    largest = max(sizes, key=sizes.__getitem__)
    param = prompt if largest == "prompt" else names.param(largest)
    count = f"n is {choices}" if len(requests) == 1 else f"n is {choices} and there are {len(requests)} prompts"
    raise budget.refuse(
        f"{count}, and each choice is sent {param} and the other options: {choices * sum(sizes.values())} bytes for "
        f"all choices, more than the limit of {budget.limit}; send fewer choices in one request, or shorten {param}",
        param=param,
    )


def _request(
    fields: GenerationFields,
    prompt: Prompt,
    request_id: str,
    max_tokens: int | None,
    max_choices: int,
    logprobs: int | None,
    constraint: Constraint | None,
    parsing: Parsing | None = None,
    forced: StructuredOutput | None = None,
    template_fields: tuple[tuple[str, str], ...] = (),
) -> GenerationRequest:
    choices = fields.n or 1
    if choices > max_choices:
        raise invalid(
            f"n is {choices}, but at most {max_choices} choices are allowed.", param="n", code="invalid_value"
        )
    min_tokens = fields.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid(f"min_tokens is {min_tokens}, more than max_tokens, {max_tokens}.", param="min_tokens")
    prompt_logprobs = _prompt_logprobs(fields, logprobs)
    return GenerationRequest(
        request_id=request_id,
        model=fields.model,
        prompt=prompt,
        choices=choices,
        sampling=_sampling(fields),
        stop=_stop(fields, max_tokens, min_tokens),
        skip_special_tokens=fields.skip_special_tokens is not False,
        parsing=parsing,
        priority=fields.priority or 0,
        lora=fields.lora_path or "",
        cache_salt=_cache_salt(fields),
        guided=constraint.guided if constraint else forced,
        guided_calls=forced is not None,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        token_texts=logprobs is not None or fields.continuous_usage or bool(fields.return_token_ids),
        needs=(*_of_media(prompt), *_required_capabilities(fields, logprobs, prompt_logprobs, constraint, forced)),
        degraded=tuple(map(no_effect, fields_without_effect(fields))),
        template_fields=template_fields,
    )


def _sampling(fields: GenerationFields) -> SamplingParams:
    if fields.vllm_xargs and fields.custom_params:
        raise invalid("vllm_xargs and custom_params exclude each other.", param="custom_params", code="invalid_value")
    scalars = {name: value for name in SCALARS if (value := getattr(fields, name)) is not None}
    engine_options = fields.vllm_xargs or fields.custom_params or {}
    if not (scalars or fields.logit_bias or fields.allowed_token_ids or engine_options):
        return UNSET
    return SamplingParams(
        **scalars,
        logit_bias=fields.logit_bias,
        allowed_token_ids=tuple(fields.allowed_token_ids or ()),
        engine_options=engine_options,
    )


def _stop(fields: GenerationFields, max_tokens: int | None, min_tokens: int) -> StopParams:
    return StopParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        strings=fields.stop,
        token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        include_stop_string=bool(fields.include_stop_str_in_output) or bool(fields.no_stop_trim),
    )


def _cache_salt(fields: GenerationFields) -> str:
    if fields.cache_salt and fields.extra_key:
        raise invalid("cache_salt and extra_key exclude each other.", param="extra_key", code="invalid_value")
    return fields.cache_salt or fields.extra_key or ""


def _prompt_logprobs(fields: GenerationFields, logprobs: int | None) -> int | None:
    """Returns the alternatives per prompt token; with echo, `logprobs` of a completion includes its prompt."""
    if isinstance(fields, CompletionRequest) and fields.echo and logprobs is not None:
        return max(logprobs, fields.prompt_logprobs or 0)
    return fields.prompt_logprobs


def _required_capabilities(
    fields: GenerationFields,
    logprobs: int | None,
    prompt_logprobs: int | None,
    constraint: Constraint | None,
    forced: StructuredOutput | None,
) -> list[tuple[str, str]]:
    needs = [constraint.required_capability] if constraint else []
    if forced is not None:
        needs.append(("guided_json", "tool_choice"))
    if logprobs is not None:
        needs.append(("logprobs", "logprobs"))
    if prompt_logprobs is not None:
        needs.append(("prompt_logprobs", "prompt_logprobs" if fields.prompt_logprobs is not None else "echo"))
    if isinstance(fields, CompletionRequest) and fields.prompt_embeds is not None:
        needs.append(("prompt_embeds", "prompt_embeds"))
    if fields.lora_path:
        needs.append(("lora", "lora_path"))
    return needs


def _of_media(prompt: Prompt) -> tuple[tuple[str, str], ...]:
    return media_needs(prompt.media) if isinstance(prompt, ChatPrompt) else ()


def _parsing(fields: ChatCompletionRequest, prompt: ChatPrompt, forced: StructuredOutput | None) -> Parsing:
    tools = "auto" if fields.tools and fields.tool_choice != "none" else ""
    separate = fields.separate_reasoning is not False
    return Parsing(
        tool_parser=CALL_PARSER if forced is not None else tools,
        reasoning_parser="auto" if separate else "",
        tools_json=prompt.tools_json,
        tool_choice_json=prompt.tool_choice_json,
        single_tool_call=fields.parallel_tool_calls is False,
        drop_reasoning=fields.include_reasoning is False,
        template_kwargs_json=prompt.template_kwargs_json,
    )


def _forced_call(body: dict[str, Any], fields: ChatCompletionRequest) -> StructuredOutput | None:
    return forced_call(body["tools"], fields.tool_choice) if fields.tools else None


def _template_fields(body: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Returns the arguments of the chat template and the fields that set them."""
    kwargs = body.get("chat_template_kwargs") or {}
    hints = [(name, name) for name in TEMPLATE_HINTS if name not in kwargs and body.get(name) is not None]
    # Of other efforts a template that has only the switch shows nothing.
    switches = implied_switches(body) if body.get("reasoning_effort") == "none" else ()
    implied = ((name, "reasoning_effort") for name in switches)
    return (*hints, *implied, *((name, f"chat_template_kwargs.{name}") for name in kwargs))
