"""Builds a worker's GenerateRequest."""

from __future__ import annotations

from dataclasses import replace

import orjson

from services.common.base.packing import pack_u32
from services.common.observability import telemetry
from services.common.rpc.generation import write_embeds, write_guided, write_sampling
from services.common.rpc.media import span_messages
from services.gateway.backends.rpc.postprocess_link import stream_options
from services.gateway.core.request import (
    ChatPrompt,
    DisaggregationPart,
    GenerationRequest,
    StopParams,
    TextPrompt,
    TokenizedPrompt,
)
from services.gateway.core.stream_view import StreamView
from sluice.v1 import common_pb2, worker_pb2


def generate_request(
    stream: StreamView, request_id: str, rank: int | None, resumed: int, part: DisaggregationPart | None
) -> worker_pb2.GenerateRequest:
    """Returns the message that starts a stream; for the arguments see `WorkerLink.start`."""
    request, prompt, sampling = stream.request, stream.prompt, stream.request.sampling
    if sampling.seed is not None:
        sampling = replace(sampling, seed=stream.seed)
    message = worker_pb2.GenerateRequest(
        request_id=request_id,
        model=request.model,
        sampling=write_sampling(sampling),
        stop=_stop(request.stop, prompt, stream.max_tokens, resumed),
        output=_output(request, stream.computed),
        guided=write_guided(request.guided) if request.guided else None,
        lora=request.lora,
        cache_salt=request.cache_salt,
        priority=request.priority,
        data_parallel_rank=rank,
        trace=telemetry.trace_context(stream.current_span),
        resumed_tokens=resumed,
        postprocess=stream_options(request, prompt) if request.engine_text else None,
    )
    if prompt.embeds is not None:
        message.embeds.CopyFrom(write_embeds(prompt.embeds))
    elif isinstance(prompt.raw, TextPrompt):
        message.text = prompt.raw.text
    elif prompt.raw is not None:
        message.messages_json = _chat_body(prompt.raw)
    else:
        message.tokens.token_ids = prompt.token_ids + pack_u32(stream.tokens[:resumed]) if resumed else prompt.token_ids
        if prompt.media:
            message.tokens.media.extend(span_messages(item.span for item in prompt.media))
    if part is not None:
        message.disaggregation.role = common_pb2.WorkerRole.ValueType(int(part.role))
        message.disaggregation.handoff = part.handoff
    return message


def _chat_body(prompt: ChatPrompt) -> bytes:
    """Returns an OpenAI request body with the fields that determine the prompt."""
    opens = prompt.add_generation_prompt
    parts = {
        b"messages": prompt.messages_json,
        b"tools": prompt.tools_json,
        b"tool_choice": prompt.tool_choice_json,
        b"chat_template_kwargs": prompt.template_kwargs_json,
        b"documents": prompt.documents_json,
        b"chat_template": orjson.dumps(prompt.chat_template) if prompt.chat_template else b"",
        b"continue_final_message": b"true" if prompt.continue_final_message else b"",
        b"add_generation_prompt": b"" if opens is None else orjson.dumps(opens),
    }
    return b"{%b}" % b",".join(b'"%b":%b' % part for part in parts.items() if part[1])


def _output(request: GenerationRequest, computed: bool) -> common_pb2.OutputOptions | None:
    """Returns the requested log-probabilities; those of a prompt that was computed before have been received."""
    prompt_logprobs = None if computed else request.prompt_logprobs
    if request.logprobs is None and prompt_logprobs is None:
        return None
    return common_pb2.OutputOptions(logprobs=request.logprobs, prompt_logprobs=prompt_logprobs)


def _stop(stop: StopParams, prompt: TokenizedPrompt, max_tokens: int, generated: int) -> common_pb2.StopOptions:
    return common_pb2.StopOptions(
        max_tokens=None if prompt.raw is not None and stop.max_tokens is None else max_tokens - generated,
        min_tokens=max(stop.min_tokens - generated, 0),
        stop_token_ids=pack_u32(stop.token_ids) + (b"" if stop.ignore_eos else prompt.stop_token_ids),
        ignore_eos=stop.ignore_eos,
        eos_token_ids=prompt.eos_token_ids,
    )
