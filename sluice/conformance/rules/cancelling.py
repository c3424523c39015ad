"""Rules about cancelled and dropped requests."""

from __future__ import annotations

import uuid

import grpc

from sluice.conformance.caller import ConformanceClient
from sluice.conformance.exceptions import NotChecked
from sluice.conformance.observed_stream import REASONS, ObservedStream
from sluice.conformance.rule import expect, rule
from sluice.conformance.subject import Subject
from sluice.v1 import common_pb2, worker_pb2

CANCELLED = REASONS.FINISH_REASON_CANCELLED


async def _running(subject: Subject, caller: ConformanceClient) -> ObservedStream:
    """Starts a long request and waits for its first token."""
    (stream,) = await caller.start(subject.long())
    await caller.wait_begun(stream)
    _expect_running(stream)
    return stream


def _expect_running(stream: ObservedStream) -> None:
    if stream.terminals and stream.reason != REASONS.FINISH_REASON_ERROR:
        raise NotChecked(f"A long request ended before it could be cancelled: {stream.describe()}.")
    expect(not stream.terminals, f"A long request ended with {stream.describe()}.")


async def _expect_cancelled(subject: Subject, caller: ConformanceClient, stream: ObservedStream) -> str:
    timeout_s = subject.patience.cancel_s
    await caller.wait_ended(stream, within_s=timeout_s)
    expect(stream.reason == CANCELLED, f"The request ended with {stream.describe()}, not with CANCELLED.")
    # The terminal delta of a new request follows all remaining messages of the cancelled one.
    await caller.complete_one(subject.request(max_tokens=1))
    expect(len(stream.terminals) == 1, f"The request had {len(stream.terminals)} terminal deltas.")
    return (
        f"CANCELLED after {len(stream.token_ids)} of {stream.request.stop.max_tokens} tokens, within {timeout_s:g} s."
    )


@rule(
    "cancel",
    "A cancelled request of 10,000 tokens ends within 2 s with CANCELLED and no other terminal delta.",
    "worker.proto, WorkerSessionRequest.cancels",
)
async def cancel(subject: Subject) -> str:
    async with subject.session() as caller:
        stream = await _running(subject, caller)
        await caller.cancel([stream.slot])
        return await _expect_cancelled(subject, caller, stream)


@rule("cancelled-usage", "The usage of a cancelled request counts the delivered tokens.", "common.proto, Usage")
async def cancelled_usage(subject: Subject) -> str:
    async with subject.session() as caller:
        stream = await _running(subject, caller)
        await caller.cancel([stream.slot])
        await caller.wait_ended(stream)
    counted, received = stream.terminal.usage.completion_tokens, len(stream.token_ids)
    expect(counted == received, f"usage has {counted} generated tokens, {received} were received.")
    return f"{counted} tokens counted, as received."


@rule(
    "abort",
    "Abort ends a request of any session by its request id, and reports whether the id was found.",
    "worker.proto, Abort",
)
async def abort(subject: Subject) -> str:
    async with subject.session() as caller:
        stream = await _running(subject, caller)
        request_id = stream.request.request_id
        answer = await subject.call(subject.stub.Abort(worker_pb2.AbortRequest(request_id=request_id)))
        expect(answer.found, "Abort did not find a running request.")
        await _expect_cancelled(subject, caller, stream)
    unknown = worker_pb2.AbortRequest(request_id=f"never-{uuid.uuid4().hex}")
    answer = await subject.call(subject.stub.Abort(unknown))
    expect(not answer.found, "Abort reports an unknown request as found.")
    return f"Found and CANCELLED after {len(stream.token_ids)} tokens; an unknown id is not found."


@rule(
    "caller-gone",
    "When a session is dropped, its requests end and the engine's load returns to its previous value.",
    "worker.proto, Session; WorkerLoad.running_requests",
)
async def caller_gone(subject: Subject) -> str:
    before = _busy(await subject.load())
    async with subject.session() as caller:
        requests = await caller.start(*(subject.long() for _ in range(4)))
        await caller.wait_begun(requests[0])
        for stream in requests:
            _expect_running(stream)
        await caller.drop()
        after = _busy(await subject.wait_for_load(lambda load: _busy(load) <= before))
    expect(after <= before, f"{after} requests were active after the session was dropped, {before} before it started.")
    return f"4 requests ended; {after} are active."


@rule(
    "generate-dropped",
    "When a Generate call is dropped, its request ends and the engine's load returns to its previous value.",
    "worker.proto, Generate; WorkerLoad.running_requests",
)
async def generate_dropped(subject: Subject) -> str:
    before = _busy(await subject.load())
    call = subject.stub.Generate(subject.long())
    try:
        first = await call.read()
        expect(first is not grpc.aio.EOF, "The stream ended without a message.")
    finally:
        call.cancel()
    after = _busy(await subject.wait_for_load(lambda load: _busy(load) <= before))
    expect(after <= before, f"{after} requests were active after the call was dropped, {before} before it started.")
    return f"The request ended; {after} are active."


def _busy(load: common_pb2.WorkerLoad) -> int:
    return load.running_requests + load.waiting_requests
