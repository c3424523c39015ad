"""Completes a request whose prompt was tokenized in the worker with the defaults of the model's files."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import Any

import orjson

from services.postprocess.detokenize.stream import StreamOptions
from services.preprocess.contract.tokenizer import TokenizerFacts
from services.worker.contract.generation import GenerateRequest, StopParams
from services.worker.local_processing.body import ChatRequestBody

PROMPT_TAIL_TOKENS = 16


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """Token ids, and the chat they were rendered from; None for a text prompt."""

    token_ids: array[int]
    body: ChatRequestBody | None = None
    thinking: bool = False


def completed(
    request: GenerateRequest, prompt: TokenizedPrompt, facts: TokenizerFacts, context_length: int
) -> GenerateRequest:
    """Returns the request with token ids; unset fields take the model's defaults, as in `TokenizeResponse`.

    Args:
        context_length: maximum number of prompt and output tokens; 0: unknown.
    """
    stop = _stop(request.stop, facts)
    if stop.max_tokens is None and facts.defaults.max_tokens is not None:
        room = context_length - len(prompt.token_ids) if context_length else facts.defaults.max_tokens
        stop = replace(stop, max_tokens=max(min(room, facts.defaults.max_tokens), 1))
    text_out = request.text_out
    return replace(
        request,
        token_ids=prompt.token_ids,
        text=None,
        messages_json=None,
        sampling=request.sampling.or_else(facts.defaults.sampling),
        stop=stop,
        text_out=None if text_out is None else _options(text_out, prompt, stop),
    )


def _stop(given: StopParams, facts: TokenizerFacts) -> StopParams:
    model_stops = frozenset() if given.ignore_eos else frozenset(facts.stop_ids)
    return replace(
        given, stop_token_ids=given.stop_token_ids | model_stops, eos_token_ids=given.eos_token_ids or facts.eos_ids
    )


def _options(given: StreamOptions, prompt: TokenizedPrompt, stop: StopParams) -> StreamOptions:
    options: dict[str, Any] = {
        "prompt_tail": given.prompt_tail or prompt.token_ids[-PROMPT_TAIL_TOKENS:],
        "stop_token_ids": given.stop_token_ids or stop.stop_token_ids,
        "eos_token_ids": given.eos_token_ids or frozenset(stop.eos_token_ids),
        "min_tokens": given.min_tokens or stop.min_tokens,
        "thinking": given.thinking or prompt.thinking,
        "ignore_eos": given.ignore_eos or stop.ignore_eos,
    }
    return replace(given, **options, **({} if prompt.body is None else _chat_options(given, prompt.body)))


def _chat_options(given: StreamOptions, body: ChatRequestBody) -> dict[str, Any]:
    chat = body.chat
    return {
        "tools_json": given.tools_json or _dump(chat.tools),
        "tool_choice_json": given.tool_choice_json or _dump(chat.tool_choice),
        "template_kwargs_json": given.template_kwargs_json or _dump(chat.template_kwargs or None),
        "single_tool_call": given.single_tool_call or not body.parallel_tool_calls,
    }


def _dump(value: Any) -> bytes:
    return b"" if value is None else orjson.dumps(value)
