"""Rules about prompts other than token ids, and about text output."""

from __future__ import annotations

import json
from array import array

from services.common.base.packing import unpack_u32
from services.worker.contract.capabilities import Capability
from sluice.conformance.observed_stream import REASONS, ObservedStream
from sluice.conformance.refusals import INVALID, expect_refused, expect_unsupported
from sluice.conformance.rule import expect, rule
from sluice.conformance.subject import Subject
from sluice.v1 import worker_pb2

ENDS = (REASONS.FINISH_REASON_STOP, REASONS.FINISH_REASON_LENGTH)
TEXT = "The gate opens and the water rises."


def _reported_ids(stream: ObservedStream) -> list[int]:
    """Returns the prompt ids that the worker reports."""
    expect(stream.reason in ENDS, f"The request ended with {stream.describe()}.")
    packed = [extra.prompt_token_ids for extra in stream.extras if extra.prompt_token_ids]
    expect(len(packed) == 1, f"prompt_token_ids was reported {len(packed)} times.")
    return unpack_u32(packed[0], "prompt_token_ids").tolist()


def _check_count(stream: ObservedStream, ids: list[int]) -> None:
    counted = stream.terminal.usage.prompt_tokens
    expect(counted == len(ids), f"usage has {counted} prompt tokens, prompt_token_ids has {len(ids)}.")


@rule("text-prompt", "A text prompt is accepted, and the first delta has its token ids.", "GenerateRequest.text")
async def text_prompt(subject: Subject) -> str:
    request = subject.request()
    request.text = TEXT
    if not subject.claims(Capability.TEXT):
        await expect_unsupported(subject, request)
    stream = await subject.complete(request)
    ids = _reported_ids(stream)
    _check_count(stream, ids)
    return f"{len(ids)} ids for {len(TEXT)} characters."


@rule(
    "messages-prompt",
    "An OpenAI chat body is accepted, and the first delta has its token ids.",
    "GenerateRequest.messages_json",
)
async def messages_prompt(subject: Subject) -> str:
    body = {"model": subject.card.model, "messages": [{"role": "user", "content": TEXT}]}
    request = subject.request()
    request.messages_json = json.dumps(body).encode()
    if not subject.claims(Capability.MESSAGES):
        await expect_unsupported(subject, request)
    stream = await subject.complete(request)
    ids = _reported_ids(stream)
    _check_count(stream, ids)
    return f"{len(ids)} ids for one message."


@rule("text-out", "A request for text output receives text and ids.", "GenerateRequest.postprocess")
async def text_out(subject: Subject) -> str:
    request = subject.full_length()
    request.postprocess.SetInParent()
    if not subject.claims(Capability.TEXT_OUT):
        await expect_unsupported(subject, request)
    stream = await subject.complete(request)
    expect(stream.reason in ENDS, f"The request ended with {stream.describe()}.")
    events = [event for extra in stream.extras for event in extra.events]
    expect(bool(events), "The request received no text.")
    expect(bool(stream.token_ids), "The request received no ids.")
    return f"{len(events)} text events and {len(stream.token_ids)} ids."


@rule(
    "prompt-embeds",
    "Input embeddings are accepted where claimed; malformed ones are refused.",
    "worker.proto, EmbedsPrompt",
)
async def prompt_embeds(subject: Subject) -> str:
    request = subject.request()
    request.embeds.CopyFrom(worker_pb2.EmbedsPrompt(values=array("f", [0.0] * 8).tobytes(), width=4))
    if not subject.claims(Capability.PROMPT_EMBEDS):
        await expect_unsupported(subject, request)
    # The card does not have the model's width, so only a malformed prompt can be tested.
    request.embeds.values = request.embeds.values[:-1]
    return f"Incomplete rows are refused: {await expect_refused(subject, request, *INVALID)}"
