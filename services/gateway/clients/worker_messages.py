"""Builds the parts of a worker's GenerateRequest."""

from __future__ import annotations

import orjson

from services.common.packing import pack_u32
from services.common.rpc.media import span_messages
from services.gateway.core.request import ChatPrompt, EmbedsPrompt, SamplingParams, StructuredOutput, TokenizedPrompt
from sluice.v1 import common_pb2, worker_pb2


def token_prompt(prompt: TokenizedPrompt) -> worker_pb2.TokenPrompt:
    """Returns the message of a prompt of token ids, with the spans of its media items."""
    media = span_messages(item.span for item in prompt.media) if prompt.media else None
    return worker_pb2.TokenPrompt(token_ids=prompt.token_ids, media=media)


def sampling_options(sampling: SamplingParams, seed: int | None) -> common_pb2.SamplingOptions:
    """Returns the message of sampling parameters."""
    return common_pb2.SamplingOptions(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=seed,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=pack_u32(sampling.allowed_token_ids),
        bad_words=[pack_u32(word) for word in sampling.bad_words],
        thinking_token_budget=sampling.thinking_token_budget,
        engine_options_json=orjson.dumps(sampling.engine_options) if sampling.engine_options else b"",
    )


def guided_decoding(guided: StructuredOutput) -> common_pb2.GuidedDecoding:
    """Returns the message of a constraint."""
    kind, grammar = guided.kind, guided.grammar
    if kind == "choice":
        return common_pb2.GuidedDecoding(choice=common_pb2.GuidedDecoding.ChoiceList(choices=grammar))
    if kind == "json_object":
        return common_pb2.GuidedDecoding(json_object=True)
    message = common_pb2.GuidedDecoding()
    setattr(message, kind, grammar)
    return message


def chat_body(prompt: ChatPrompt) -> bytes:
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


def embeds_prompt(embeds: EmbedsPrompt) -> worker_pb2.EmbedsPrompt:
    """Returns the message of input embeddings."""
    return worker_pb2.EmbedsPrompt(values=embeds.values, width=embeds.width)
