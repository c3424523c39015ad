"""Requests that nobody wants any more."""

from __future__ import annotations

import uuid

import grpc

from sluice.conformance.caller import Caller
from sluice.conformance.heard import REASONS, ObservedStream
from sluice.conformance.rule import NotChecked, expect, rule
from sluice.conformance.subject import Subject
from sluice.v1 import common_pb2, worker_pb2

CANCELLED = REASONS.FINISH_REASON_CANCELLED


async def _running(subject: Subject, caller: Caller) -> ObservedStream:
    """A long request that has begun."""
    (heard,) = await caller.start(subject.long())
    await caller.began(heard)
    _still_runs(heard)
    return heard


def _still_runs(heard: ObservedStream) -> None:
    if heard.terminals and heard.reason != REASONS.FINISH_REASON_ERROR:
        raise NotChecked(f"The engine cannot be kept busy: the request ended by itself, {heard.describe()}.")
    expect(not heard.terminals, f"A long request ended with {heard.describe()}.")


async def _ends_cancelled(subject: Subject, caller: Caller, heard: ObservedStream) -> str:
    within = subject.patience.cancel_s
    await caller.ended(heard, within_s=within)
    expect(heard.reason == CANCELLED, f"It ended with {heard.describe()}, not with CANCELLED.")
    # The end of a request that starts only now comes after everything the cancelled one may still say.
    await caller.ask_one(subject.request(max_tokens=1))
    expect(len(heard.terminals) == 1, f"It ended {len(heard.terminals)} times.")
    return f"CANCELLED after {len(heard.token_ids)} of {heard.request.stop.max_tokens} tokens, within {within:g} s."


@rule(
    "cancel",
    "A cancelled request of 10,000 tokens ends within 2 s with CANCELLED and no other terminal delta.",
    "worker.proto, WorkerSessionRequest.cancels",
)
async def cancel(subject: Subject) -> str:
    async with subject.session() as caller:
        heard = await _running(subject, caller)
        await caller.cancel([heard.slot])
        return await _ends_cancelled(subject, caller, heard)


@rule("cancelled-usage", "A cancelled request is billed for the tokens that came.", "common.proto, Usage")
async def cancelled_usage(subject: Subject) -> str:
    async with subject.session() as caller:
        heard = await _running(subject, caller)
        await caller.cancel([heard.slot])
        await caller.ended(heard)
    counted, received = heard.terminal.usage.completion_tokens, len(heard.token_ids)
    expect(counted == received, f"usage says {counted} generated tokens, {received} came.")
    return f"{counted} tokens, as received."


@rule(
    "abort", "Abort ends a request of any session by its request id, and knows which ids live.", "worker.proto, Abort"
)
async def abort(subject: Subject) -> str:
    async with subject.session() as caller:
        heard = await _running(subject, caller)
        request_id = heard.request.request_id
        answer = await subject.answer(subject.stub.Abort(worker_pb2.AbortRequest(request_id=request_id)))
        expect(answer.found, "Abort says that a running request does not exist.")
        await _ends_cancelled(subject, caller, heard)
    stranger = worker_pb2.AbortRequest(request_id=f"never-{uuid.uuid4().hex}")
    answer = await subject.answer(subject.stub.Abort(stranger))
    expect(not answer.found, "Abort says that it found a request which never was.")
    return f"Found and CANCELLED after {len(heard.token_ids)} tokens; an unknown id is not found."


@rule(
    "caller-gone",
    "When a session is dropped, its requests end and the engine's load comes back.",
    "worker.proto, Session; WorkerLoad.running_requests",
)
async def caller_gone(subject: Subject) -> str:
    before = _busy(await subject.load())
    async with subject.session() as caller:
        requests = await caller.start(*(subject.long() for _ in range(4)))
        await caller.began(requests[0])
        for heard in requests:
            _still_runs(heard)
        await caller.drop()
        after = _busy(await subject.settles(lambda load: _busy(load) <= before))
    expect(after <= before, f"{after} requests were at work after the caller had gone, {before} before it came.")
    return f"4 requests freed; {after} at work."


@rule(
    "generate-dropped",
    "When a Generate call is dropped, its request ends and the engine's load comes back.",
    "worker.proto, Generate; WorkerLoad.running_requests",
)
async def generate_dropped(subject: Subject) -> str:
    before = _busy(await subject.load())
    call = subject.stub.Generate(subject.long())
    try:
        first = await call.read()
        expect(first is not grpc.aio.EOF, "The stream ended without a word.")
    finally:
        call.cancel()
    after = _busy(await subject.settles(lambda load: _busy(load) <= before))
    expect(after <= before, f"{after} requests were at work after the call was dropped, {before} before it.")
    return f"Freed; {after} at work."


def _busy(load: common_pb2.WorkerLoad) -> int:
    return load.running_requests + load.waiting_requests
