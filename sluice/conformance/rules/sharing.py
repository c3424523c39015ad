"""Many requests on one session, and slots that come and go."""

from __future__ import annotations

from services.common.errors import ErrorKind
from sluice.conformance.heard import REASONS, ObservedStream
from sluice.conformance.rule import NotChecked, expect, rule
from sluice.conformance.subject import OUTPUT_TOKENS, Subject

STOP, LENGTH = REASONS.FINISH_REASON_STOP, REASONS.FINISH_REASON_LENGTH
ATTEMPTS = 5
"""On a machine that is busy a fast engine is done before the kit gets its turn."""


def _all_ended_well(requests: list[ObservedStream]) -> None:
    bad = [heard for heard in requests if heard.reason not in (STOP, LENGTH) or not heard.token_ids]
    expect(not bad, f"{len(bad)} of {len(requests)} failed; one ended with {bad[0].describe() if bad else ''}.")
    long = [heard for heard in requests if len(heard.token_ids) > heard.request.stop.max_tokens]
    expect(not long, f"{len(long)} of {len(requests)} got more tokens than they asked for.")


@rule("eight-interleaved", "Eight generations at once all succeed.", "worker.proto, Session")
async def eight_interleaved(subject: Subject) -> str:
    async with subject.session() as caller:
        heard = await caller.ask(*(subject.endless(max_tokens=10 + 3 * index) for index in range(8)))
    _all_ended_well(heard)
    return f"{sum(len(one.token_ids) for one in heard)} tokens for 8 requests."


@rule(
    "many-on-one-session",
    "Sixty-four requests share one session, and each gets its own tokens.",
    "worker.proto, Session",
)
async def many_on_one_session(subject: Subject) -> str:
    async with subject.session() as caller:
        heard = await caller.ask(*(subject.endless(max_tokens=4 + index % 8) for index in range(64)))
        batches = caller.batches
    _all_ended_well(heard)
    if subject.lasts:
        mixed = [one for one in heard if len(one.token_ids) != one.request.stop.max_tokens]
        expect(not mixed, f"{len(mixed)} of 64 got another number of tokens than they asked for.")
    return f"{sum(len(one.token_ids) for one in heard)} tokens for 64 requests in {batches} messages."


@rule("slot-reuse", "A slot is free again after its terminal delta.", "worker.proto, SessionStart.slot")
async def slot_reuse(subject: Subject) -> str:
    async with subject.session() as caller:
        for turn in range(4):
            heard = await caller.ask_one(subject.request(max_tokens=3), slot=5)
            expect(heard.reason in (STOP, LENGTH), f"Turn {turn + 1} in the same slot ended with {heard.describe()}.")
            expect(bool(heard.token_ids), f"Turn {turn + 1} in the same slot got no tokens.")
    return "Four requests, one after another, in one slot."


@rule("unknown-cancel", "Cancels of unknown and ended slots are ignored.", "worker.proto, WorkerSessionRequest.cancels")
async def unknown_cancel(subject: Subject) -> str:
    async with subject.session() as caller:
        ended = await caller.ask_one(subject.request(max_tokens=2))
        await caller.cancel([ended.slot, 4_000_000, 77])
        await caller.cancel([78, 78])
        after = await caller.ask_one(subject.request(max_tokens=3))
        expect(after.reason in (STOP, LENGTH), f"The request after them ended with {after.describe()}.")
    return "The session went on as if they had not been there."


@rule(
    "duplicate-request-id",
    "A request id that is alive is refused a second time, on the second slot only.",
    "worker.proto, GenerateRequest.request_id",
)
async def duplicate_request_id(subject: Subject) -> str:
    for _ in range(ATTEMPTS):
        if said := await _twins(subject):
            return said
    raise NotChecked("The first request had ended every time before the second one came.")


async def _twins(subject: Subject) -> str:
    """What the second one heard; empty when the first one had ended before it came."""
    async with subject.session() as caller:
        request = subject.long()
        (first,) = await caller.start(request)
        await caller.began(first)
        if first.terminals:
            return ""
        twin = subject.request()
        twin.request_id = request.request_id
        second = await caller.ask_one(twin)
        if second.reason in (STOP, LENGTH) and first.terminals:
            return ""
        expect(
            second.reason == REASONS.FINISH_REASON_ERROR, f"The second request was taken and ended {second.describe()}."
        )
        kind = int(second.terminal.error.kind)
        expect(kind == ErrorKind.INVALID_ARGUMENT, f"The error's kind is {kind}, not INVALID_ARGUMENT.")
        unharmed = not first.terminals or first.reason in (STOP, LENGTH)
        expect(unharmed, f"The first request ended with {first.describe()}.")
        await caller.cancel([first.slot])
        await caller.ended(first)
    return f"Refused: {second.terminal.error.message}"


@rule(
    "neighbours",
    "A request that is refused ends its own slot and nothing else.",
    "common.proto, ErrorDetail: one request's failure must not end the stream",
)
async def neighbours(subject: Subject) -> str:
    async with subject.session() as caller:
        wrong = subject.request()
        wrong.model = f"{subject.card.model}-which-nobody-serves"
        good = [subject.endless(max_tokens=2 * OUTPUT_TOKENS) for _ in range(3)]
        heard = await caller.ask(good[0], wrong, good[1], good[2])
    expect(heard[1].reason == REASONS.FINISH_REASON_ERROR, f"The wrong request ended with {heard[1].describe()}.")
    _all_ended_well([heard[0], *heard[2:]])
    return "Three requests beside a refused one came to their ends."
