"""Rules about priorities and data-parallel ranks."""

from __future__ import annotations

from services.worker.contract.capabilities import Capability
from sluice.conformance.observed_stream import REASONS
from sluice.conformance.refusals import INVALID, expect_refused, expect_unsupported
from sluice.conformance.rule import expect, rule
from sluice.conformance.subject import Subject

ENDS = (REASONS.FINISH_REASON_STOP, REASONS.FINISH_REASON_LENGTH)


@rule("priority", "Requests of every priority run.", "worker.proto, GenerateRequest.priority")
async def priority(subject: Subject) -> str:
    requests = [subject.request() for _ in range(3)]
    for request, value in zip(requests, (5, -5, 0), strict=True):
        request.priority = value
    if not subject.claims(Capability.PRIORITY):
        await expect_unsupported(subject, requests[0])
    async with subject.session() as caller:
        for stream in await caller.complete(*requests):
            expect(stream.reason in ENDS, f"Priority {stream.request.priority} ended with {stream.describe()}.")
    return "Requests with priorities 5, -5 and 0 ran concurrently."


@rule("data-parallel-rank", "Every rank on the card runs requests.", "GenerateRequest.data_parallel_rank")
async def data_parallel_rank(subject: Subject) -> str:
    ranks = subject.card.data_parallel_size or 1
    if not subject.claims(Capability.DATA_PARALLEL_RANK):
        request = subject.request()
        request.data_parallel_rank = ranks
        await expect_unsupported(subject, request)
    for rank in range(ranks):
        request = subject.request()
        request.data_parallel_rank = rank
        stream = await subject.complete(request)
        expect(stream.reason in ENDS, f"Rank {rank} of {ranks} ended with {stream.describe()}.")
    return f"{ranks} ranks ran a request."


@rule("bad-rank", "A rank that does not exist is INVALID_ARGUMENT.", "GenerateRequest.data_parallel_rank")
async def bad_rank(subject: Subject) -> str:
    request = subject.request()
    request.data_parallel_rank = (subject.card.data_parallel_size or 1) + 7
    if not subject.claims(Capability.DATA_PARALLEL_RANK):
        await expect_unsupported(subject, request)
    return await expect_refused(subject, request, *INVALID)
