"""Converts parts of generations to and from messages: sampling, constraints, embeddings, log-probabilities."""

from __future__ import annotations

from typing import Any

import orjson

from services.common.base.errors import invalid
from services.common.base.packing import pack_u32, unpack_u32
from services.common.net.intake.json_intake import foreign_json
from services.common.types.generation import PositionLogprobs, PromptEmbeds, TokenLogprob
from services.common.types.sampling import SCALARS, UNSET, SamplingParams, StructuredOutput
from sluice.v1 import common_pb2, worker_pb2


def write_sampling(sampling: SamplingParams) -> common_pb2.SamplingOptions:
    """Returns the message of sampling parameters."""
    if sampling is UNSET:
        return common_pb2.SamplingOptions()
    return common_pb2.SamplingOptions(
        **sampling.given(SCALARS),
        logit_bias=sampling.logit_bias,
        allowed_token_ids=pack_u32(sampling.allowed_token_ids),
        bad_words=[pack_u32(word) for word in sampling.bad_words],
        engine_options_json=orjson.dumps(sampling.engine_options) if sampling.engine_options else b"",
    )


def read_sampling(message: common_pb2.SamplingOptions) -> SamplingParams:
    """Returns the sampling parameters of a message; raises SluiceError (INVALID_ARGUMENT) if a part is malformed."""
    if not message.ByteSize():
        return UNSET
    options = message.engine_options_json
    return SamplingParams(
        **{field.name: value for field, value in message.ListFields() if field.name in SCALARS},
        logit_bias=dict(message.logit_bias),
        allowed_token_ids=tuple(unpack_u32(message.allowed_token_ids, "sampling.allowed_token_ids")),
        bad_words=tuple(tuple(unpack_u32(word, "sampling.bad_words")) for word in message.bad_words),
        engine_options=_read_engine_options(options) if options else {},
    )


def _read_engine_options(document: bytes) -> dict[str, Any]:
    options = foreign_json(document, "engine_options")
    if not isinstance(options, dict):
        raise invalid("engine_options_json must be a JSON object.", param="engine_options")
    return options


def write_guided(guided: StructuredOutput) -> common_pb2.GuidedDecoding:
    """Returns the message of a constraint."""
    kind, grammar = guided.kind, guided.grammar
    if kind == "choice":
        return common_pb2.GuidedDecoding(choice=common_pb2.GuidedDecoding.ChoiceList(choices=grammar))
    if kind == "json_object":
        return common_pb2.GuidedDecoding(json_object=True)
    message = common_pb2.GuidedDecoding()
    setattr(message, kind, grammar)
    return message


def read_guided(message: common_pb2.GuidedDecoding) -> StructuredOutput | None:
    """Returns the constraint of a message; None if it has none."""
    kind = message.WhichOneof("grammar")
    if kind is None:
        return None
    if kind == "choice":
        return StructuredOutput("choice", tuple(message.choice.choices))
    if kind == "json_object":
        return StructuredOutput("json_object") if message.json_object else None
    return StructuredOutput(kind, getattr(message, kind))


def write_embeds(embeds: PromptEmbeds) -> worker_pb2.EmbedsPrompt:
    """Returns the message of input embeddings."""
    return worker_pb2.EmbedsPrompt(values=embeds.values, width=embeds.width)


def read_embeds(message: worker_pb2.EmbedsPrompt) -> PromptEmbeds:
    """Returns the input embeddings of a message; raises SluiceError (INVALID_ARGUMENT) for incomplete rows."""
    if not message.width or not message.values or len(message.values) % (4 * message.width):
        raise invalid("The prompt embeddings must be complete rows of `width` float32 values.", param="prompt_embeds")
    return PromptEmbeds(message.values, message.width)


def write_logprobs(position: PositionLogprobs) -> common_pb2.PositionLogprobs:
    """Returns the message of the log-probabilities at one position."""
    return common_pb2.PositionLogprobs(
        chosen=_write_logprob(position.chosen), top=[_write_logprob(token) for token in position.top]
    )


def _write_logprob(token: TokenLogprob) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(token_id=token.token_id, logprob=token.logprob, rank=token.rank)


def read_logprobs(message: common_pb2.PositionLogprobs) -> PositionLogprobs:
    """Returns the log-probabilities at one position."""
    return PositionLogprobs(_read_logprob(message.chosen), tuple([_read_logprob(token) for token in message.top]))


def _read_logprob(token: common_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(token.token_id, token.logprob, token.rank)
