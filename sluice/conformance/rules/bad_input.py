"""Rules about invalid requests: each is refused with a message, and the worker keeps serving."""

from __future__ import annotations

from services.common.base.errors import ErrorKind
from services.common.base.packing import pack_u32
from services.worker.contract.capabilities import Capability
from sluice.conformance.exceptions import NotChecked, NotClaimed
from sluice.conformance.refusals import INVALID, UNSUPPORTED, expect_refused
from sluice.conformance.rule import rule
from sluice.conformance.subject import Subject
from sluice.v1 import common_pb2

MAX_PROMPT_TOKENS = 2_000_000
"""Tokens of a context; of a longer one the kit does not check that longer prompts are refused."""


@rule("bad-token-ids", "Ids outside the vocabulary are INVALID_ARGUMENT.", "common.proto, ModelCard.vocab_size")
async def bad_token_ids(subject: Subject) -> str:
    if not subject.card.vocab_size:
        raise NotClaimed("The card has no vocab_size.")
    return await expect_refused(subject, subject.request([*subject.prompt(3), subject.card.vocab_size]), *INVALID)


@rule("bad-empty-prompt", "A prompt without tokens is INVALID_ARGUMENT.", "worker.proto, TokenPrompt")
async def bad_empty_prompt(subject: Subject) -> str:
    return await expect_refused(subject, subject.request([]), *INVALID)


@rule("bad-long-prompt", "A prompt that does not fit into the context is refused.", "ModelCard.context_length")
async def bad_long_prompt(subject: Subject) -> str:
    if not subject.card.context_length:
        raise NotClaimed("The card has no context_length.")
    if subject.card.context_length > MAX_PROMPT_TOKENS:
        raise NotChecked("A prompt longer than this context does not fit into a gRPC message.")
    return await expect_refused(subject, subject.request(subject.prompt(subject.card.context_length + 1)), *INVALID)


@rule(
    "bad-packed-ids", "A packed field of invalid length is INVALID_ARGUMENT.", "common.proto, conventions: packed u32"
)
async def bad_packed_ids(subject: Subject) -> str:
    request = subject.request()
    request.tokens.token_ids = request.tokens.token_ids[:-1]
    return await expect_refused(subject, request, *INVALID)


@rule("bad-lengths", "A max_tokens of 0 is INVALID_ARGUMENT.", "common.proto, StopOptions")
async def bad_lengths(subject: Subject) -> str:
    return await expect_refused(subject, subject.request(max_tokens=0), *INVALID)


@rule("bad-sampling", "A sampling option out of its range is refused.", "common.proto, SamplingOptions")
async def bad_sampling(subject: Subject) -> str:
    request = subject.request(greedy=False)
    request.sampling.top_p = 1.5
    kinds = INVALID if subject.claims(Capability.TOP_P) else UNSUPPORTED
    return await expect_refused(subject, request, *kinds)


@rule("bad-model", "A model that is not served is NOT_FOUND.", "worker.proto, GenerateRequest.model")
async def bad_model(subject: Subject) -> str:
    request = subject.request()
    request.model = subject.unknown_model
    return await expect_refused(subject, request, ErrorKind.NOT_FOUND)


@rule("bad-lora", "A LoRA adapter that is not loaded is NOT_FOUND.", "worker.proto, GenerateRequest.lora")
async def bad_lora(subject: Subject) -> str:
    request = subject.request()
    request.lora = "adapter-that-is-not-loaded"
    kinds = (ErrorKind.NOT_FOUND,) if subject.claims(Capability.LORA) else UNSUPPORTED
    return await expect_refused(subject, request, *kinds)


@rule("bad-request-id", "A request without an id is INVALID_ARGUMENT.", "worker.proto, GenerateRequest.request_id")
async def bad_request_id(subject: Subject) -> str:
    request = subject.request()
    request.request_id = ""
    return await expect_refused(subject, request, *INVALID)


@rule("bad-handoff", "A handoff that is not from a prefill worker is refused.", "DisaggregationParams.handoff")
async def bad_handoff(subject: Subject) -> str:
    request = subject.request()
    request.disaggregation.role = common_pb2.WORKER_ROLE_DECODE
    request.disaggregation.handoff = b"\xff\x00 not a handoff"
    return await expect_refused(subject, request, *UNSUPPORTED)


@rule(
    "bad-engine-options",
    "Engine options that are not a JSON object are refused.",
    "SamplingOptions.engine_options_json",
)
async def bad_engine_options(subject: Subject) -> str:
    request = subject.request()
    request.sampling.engine_options_json = b"[1,"
    return await expect_refused(subject, request, *UNSUPPORTED)


@rule("bad-stop-ids", "A malformed list of stop ids is INVALID_ARGUMENT.", "common.proto, StopOptions.stop_token_ids")
async def bad_stop_ids(subject: Subject) -> str:
    request = subject.request()
    request.stop.stop_token_ids = pack_u32((1,))[:3]
    return await expect_refused(subject, request, *INVALID)
