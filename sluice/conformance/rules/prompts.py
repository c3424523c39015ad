"""Prompts that are no token ids, and answers that are text."""

from __future__ import annotations

import json
from array import array

from services.common.packing import unpack_u32
from services.worker.contract.capabilities import Capability
from sluice.conformance.heard import REASONS, ObservedStream
from sluice.conformance.refusals import INVALID, refused, unclaimed
from sluice.conformance.rule import expect, rule
from sluice.conformance.subject import Subject
from sluice.v1 import worker_pb2

ENDS = (REASONS.FINISH_REASON_STOP, REASONS.FINISH_REASON_LENGTH)
TEXT = "The gate opens and the water rises."


def _own_ids(heard: ObservedStream) -> list[int]:
    """The prompt's ids as the worker made them."""
    expect(heard.reason in ENDS, f"It ended with {heard.describe()}.")
    packed = [extra.prompt_token_ids for extra in heard.extras if extra.prompt_token_ids]
    expect(len(packed) == 1, f"prompt_token_ids came {len(packed)} times.")
    return unpack_u32(packed[0], "prompt_token_ids").tolist()


def _check_count(heard: ObservedStream, ids: list[int]) -> None:
    counted = heard.terminal.usage.prompt_tokens
    expect(counted == len(ids), f"usage says {counted} prompt tokens, prompt_token_ids has {len(ids)}.")


@rule("text-prompt", "Text is taken, and the first delta tells the ids it became.", "GenerateRequest.text")
async def text_prompt(subject: Subject) -> str:
    request = subject.request()
    request.text = TEXT
    if not subject.claims(Capability.TEXT):
        await unclaimed(subject, request)
    heard = await subject.ask(request)
    ids = _own_ids(heard)
    _check_count(heard, ids)
    return f"{len(ids)} ids for {len(TEXT)} characters."


@rule("messages-prompt", "An OpenAI body is taken, and the first delta tells its ids.", "GenerateRequest.messages_json")
async def messages_prompt(subject: Subject) -> str:
    body = {"model": subject.card.model, "messages": [{"role": "user", "content": TEXT}]}
    request = subject.request()
    request.messages_json = json.dumps(body).encode()
    if not subject.claims(Capability.MESSAGES):
        await unclaimed(subject, request)
    heard = await subject.ask(request)
    ids = _own_ids(heard)
    _check_count(heard, ids)
    return f"{len(ids)} ids for one message."


@rule("text-out", "A request that asks for text gets it beside the ids.", "GenerateRequest.postprocess")
async def text_out(subject: Subject) -> str:
    request = subject.endless()
    request.postprocess.SetInParent()
    if not subject.claims(Capability.TEXT_OUT):
        await unclaimed(subject, request)
    heard = await subject.ask(request)
    expect(heard.reason in ENDS, f"It ended with {heard.describe()}.")
    events = [event for extra in heard.extras for event in extra.events]
    expect(bool(events), "No text came beside the ids.")
    expect(bool(heard.token_ids), "No ids came beside the text.")
    return f"{len(events)} text events beside {len(heard.token_ids)} ids."


@rule(
    "prompt-embeds", "Input embeddings are taken where claimed; broken ones are refused.", "worker.proto, EmbedsPrompt"
)
async def prompt_embeds(subject: Subject) -> str:
    request = subject.request()
    request.embeds.CopyFrom(worker_pb2.EmbedsPrompt(values=array("f", [0.0] * 8).tobytes(), width=4))
    if not subject.claims(Capability.PROMPT_EMBEDS):
        await unclaimed(subject, request)
    # The card does not tell the model's width, so only a broken prompt can be tried.
    request.embeds.values = request.embeds.values[:-1]
    return f"Broken rows are refused: {await refused(subject, request, *INVALID)}"
