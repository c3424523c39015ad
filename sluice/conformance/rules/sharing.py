"""Rules about concurrent requests and slots of one session."""

from __future__ import annotations

from services.common.base.errors import ErrorKind
from sluice.conformance.exceptions import NotChecked
from sluice.conformance.observed_stream import REASONS, ObservedStream
from sluice.conformance.rule import expect, rule
from sluice.conformance.subject import OUTPUT_TOKENS, Subject

STOP, LENGTH = REASONS.FINISH_REASON_STOP, REASONS.FINISH_REASON_LENGTH
ATTEMPTS = 5
"""On a busy machine, a fast engine may end a long request before the kit sends the next one."""


def _expect_success(streams: list[ObservedStream]) -> None:
    bad = [stream for stream in streams if stream.reason not in (STOP, LENGTH) or not stream.token_ids]
    expect(not bad, f"{len(bad)} of {len(streams)} failed; one ended with {bad[0].describe() if bad else ''}.")
    long = [stream for stream in streams if len(stream.token_ids) > stream.request.stop.max_tokens]
    expect(not long, f"{len(long)} of {len(streams)} received more than max_tokens tokens.")


@rule("eight-interleaved", "Eight concurrent generations succeed.", "worker.proto, Session")
async def eight_interleaved(subject: Subject) -> str:
    async with subject.session() as caller:
        streams = await caller.complete(*(subject.full_length(max_tokens=10 + 3 * index) for index in range(8)))
    _expect_success(streams)
    return f"{sum(len(one.token_ids) for one in streams)} tokens for 8 requests."


@rule(
    "many-on-one-session",
    "Sixty-four requests share one session, and each receives its own tokens.",
    "worker.proto, Session",
)
async def many_on_one_session(subject: Subject) -> str:
    async with subject.session() as caller:
        streams = await caller.complete(*(subject.full_length(max_tokens=4 + index % 8) for index in range(64)))
        batches = caller.batches
    _expect_success(streams)
    if subject.supports_full_length:
        mixed = [one for one in streams if len(one.token_ids) != one.request.stop.max_tokens]
        expect(not mixed, f"{len(mixed)} of 64 received a number of tokens other than max_tokens.")
    return f"{sum(len(one.token_ids) for one in streams)} tokens for 64 requests in {batches} messages."


@rule("slot-reuse", "A slot can be reused after its terminal delta.", "worker.proto, SessionStart.slot")
async def slot_reuse(subject: Subject) -> str:
    async with subject.session() as caller:
        for turn in range(4):
            stream = await caller.complete_one(subject.request(max_tokens=3), slot=5)
            expect(stream.reason in (STOP, LENGTH), f"Request {turn + 1} in one slot ended with {stream.describe()}.")
            expect(bool(stream.token_ids), f"Request {turn + 1} in one slot received no tokens.")
    return "Four consecutive requests in one slot."


@rule("unknown-cancel", "Cancels of unknown and ended slots are ignored.", "worker.proto, WorkerSessionRequest.cancels")
async def unknown_cancel(subject: Subject) -> str:
    async with subject.session() as caller:
        ended = await caller.complete_one(subject.request(max_tokens=2))
        await caller.cancel([ended.slot, 4_000_000, 77])
        await caller.cancel([78, 78])
        after = await caller.complete_one(subject.request(max_tokens=3))
        expect(after.reason in (STOP, LENGTH), f"The request after the cancels ended with {after.describe()}.")
    return "The session served a request after them."


@rule(
    "duplicate-request-id",
    "A second request with the id of a running one is refused, and the running one continues.",
    "worker.proto, GenerateRequest.request_id",
)
async def duplicate_request_id(subject: Subject) -> str:
    for _ in range(ATTEMPTS):
        if observed := await _send_duplicate(subject):
            return observed
    raise NotChecked("The first request always ended before the second one was sent.")


async def _send_duplicate(subject: Subject) -> str:
    """Returns how the second request was refused; empty when the first one ended before it arrived."""
    async with subject.session() as caller:
        request = subject.long()
        (first,) = await caller.start(request)
        await caller.wait_begun(first)
        if first.terminals:
            return ""
        duplicate = subject.request()
        duplicate.request_id = request.request_id
        second = await caller.complete_one(duplicate)
        if second.reason in (STOP, LENGTH) and first.terminals:
            return ""
        expect(
            second.reason == REASONS.FINISH_REASON_ERROR,
            f"The second request was accepted and ended with {second.describe()}.",
        )
        kind = int(second.terminal.error.kind)
        expect(kind == ErrorKind.INVALID_ARGUMENT, f"The error's kind is {kind}, not INVALID_ARGUMENT.")
        unaffected = not first.terminals or first.reason in (STOP, LENGTH)
        expect(unaffected, f"The first request ended with {first.describe()}.")
        await caller.cancel([first.slot])
        await caller.wait_ended(first)
    return f"Refused: {second.terminal.error.message}"


@rule(
    "neighbours",
    "A refused request ends only its own slot.",
    "common.proto, ErrorDetail: one request's failure must not end the stream",
)
async def neighbours(subject: Subject) -> str:
    async with subject.session() as caller:
        wrong = subject.request()
        wrong.model = subject.unknown_model
        good = [subject.full_length(max_tokens=2 * OUTPUT_TOKENS) for _ in range(3)]
        streams = await caller.complete(good[0], wrong, good[1], good[2])
    refused, others = streams[1], [streams[0], *streams[2:]]
    expect(refused.reason == REASONS.FINISH_REASON_ERROR, f"The invalid request ended with {refused.describe()}.")
    _expect_success(others)
    return "Three requests completed alongside a refused one."
