"""Rules about media items of prompts."""

from __future__ import annotations

from random import randbytes

from services.common.base.errors import ErrorKind
from services.common.rpc.media import span_messages
from services.common.types.media.spans import MediaKind, MediaSpan, content_hash, png_file
from services.worker.contract.capabilities import Capability
from sluice.conformance.exceptions import NotChecked
from sluice.conformance.observed_stream import REASONS, ObservedStream
from sluice.conformance.refusals import INVALID, expect_unsupported, refusal_message
from sluice.conformance.rule import expect, rule
from sluice.conformance.subject import Subject
from sluice.v1 import worker_pb2

SIDE = 32
ITEM_TOKENS = 4
ENDS = (REASONS.FINISH_REASON_STOP, REASONS.FINISH_REASON_LENGTH)


@rule("image", "A prompt with an image is served once its file has been sent, and again.", "TokenPrompt.media")
async def image(subject: Subject) -> str:
    data = _picture()
    request = _request(subject, data)
    if not subject.claims(Capability.IMAGE):
        await expect_unsupported(subject, request)
    async with subject.session() as caller:
        await caller.send_file(data)
        first = await caller.complete_one(request)
        if first.reason not in ENDS and first.terminal.error.code != "media_missing":
            # Only the model's own placeholder tokens can stand for an image, and the card does not have them.
            raise NotChecked(f"The engine does not take other placeholders: {refusal_message(first, INVALID)}")
        again = subject.request()
        again.tokens.CopyFrom(request.tokens)
        second = await caller.complete_one(again)
    for stream in (first, second):
        expect(stream.reason in ENDS, f"The request ended with {stream.describe()}.")
    prompt = len(request.tokens.token_ids) // 4
    counted = first.terminal.usage.prompt_tokens
    expect(counted == prompt, f"usage has {counted} prompt tokens, the prompt has {prompt}.")
    return f"{len(data)} bytes served two requests."


@rule(
    "image-missing",
    'A start without its file fails with the code "media_missing".',
    "WorkerSessionRequest.media",
)
async def image_missing(subject: Subject) -> str:
    request = _request(subject, _picture())
    if not subject.claims(Capability.IMAGE):
        await expect_unsupported(subject, request)
    refused = await subject.complete(request)
    _expect_code(refused, "media_missing")
    expect(refused.terminal.error.retryable, "The error media_missing is not marked as retryable.")
    return f"Refused: {refused.terminal.error.message}"


@rule("image-hash", "A file that does not have its hash is not used.", "MediaChunk.hash")
async def image_hash(subject: Subject) -> str:
    wanted = _picture()
    request = _request(subject, wanted)
    if not subject.claims(Capability.IMAGE):
        await expect_unsupported(subject, request)
    async with subject.session() as caller:
        await caller.send_file(_picture(), content_hash(wanted))
        refused = await caller.complete_one(request)
        after = await caller.complete_one(subject.request())
    message = refusal_message(refused, (ErrorKind.INVALID_ARGUMENT, ErrorKind.UNAVAILABLE))
    expect(after.reason in ENDS, f"The request after the refused one ended with {after.describe()}.")
    return f"Refused: {message}"


def _expect_code(stream: ObservedStream, code: str) -> None:
    found = stream.terminal.error.code if stream.reason == REASONS.FINISH_REASON_ERROR else ""
    expect(found == code, f"The request ended with {stream.describe()}, expected the error {code}.")


def _request(subject: Subject, data: bytes) -> worker_pb2.GenerateRequest:
    request = subject.request()
    span = MediaSpan(MediaKind.IMAGE, content_hash(data), 2, ITEM_TOKENS, request.tokens.token_ids[8:12])
    request.tokens.media.extend(span_messages([span]))
    return request


def _picture() -> bytes:
    """Returns a new PNG file of random grey pixels."""
    return png_file(SIDE, SIDE, randbytes(SIDE * SIDE))
