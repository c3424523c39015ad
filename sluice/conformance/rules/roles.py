"""Rules about disaggregated requests, which a prefill and a decode worker share."""

from __future__ import annotations

from typing import NoReturn

from services.worker.contract.capabilities import Capability
from sluice.conformance.exceptions import NotChecked, NotClaimed
from sluice.conformance.observed_stream import REASONS, ObservedStream
from sluice.conformance.refusals import UNSUPPORTED, refusal_message
from sluice.conformance.rule import expect, rule
from sluice.conformance.subject import OUTPUT_TOKENS, Subject
from sluice.v1 import common_pb2, worker_pb2

HANDOFF, STOP, LENGTH = REASONS.FINISH_REASON_HANDOFF, REASONS.FINISH_REASON_STOP, REASONS.FINISH_REASON_LENGTH
PREFILL, DECODE = common_pb2.WORKER_ROLE_PREFILL, common_pb2.WORKER_ROLE_DECODE


def _in_role(subject: Subject, role: common_pb2.WorkerRole.ValueType) -> worker_pb2.GenerateRequest:
    request = subject.full_length(max_tokens=OUTPUT_TOKENS)
    request.disaggregation.role = role
    return request


@rule(
    "prefill",
    "A prefill request returns exactly one token and a handoff.",
    "worker.proto, DisaggregationParams; TokenExtra.handoff",
    generates=False,
)
async def prefill(subject: Subject) -> str:
    request = _in_role(subject, PREFILL)
    if not subject.claims(Capability.PREFILL):
        await _unclaimed_role(subject, request)
    stream = await _prefilled(subject, request)
    return f"One token and a handoff of {len(stream.terminal.handoff)} bytes."


@rule(
    "decode",
    "A decode request continues with the token after the prefill's, and counts its own tokens.",
    "worker.proto, DisaggregationParams",
    generates=False,
)
async def decode(subject: Subject) -> str:
    request = _in_role(subject, DECODE)
    if not subject.claims(Capability.DECODE):
        request.disaggregation.handoff = b"\x00"
        await _unclaimed_role(subject, request)
    if not subject.target.prefill_peer:
        raise NotChecked("A handoff from a prefill worker is required; set its address with --prefill-peer.")
    prefill_request = worker_pb2.GenerateRequest()
    prefill_request.CopyFrom(request)
    prefill_request.disaggregation.role = PREFILL
    async with subject.peer(subject.target.prefill_peer) as peer:
        first = await _prefilled(peer, prefill_request)
    request.disaggregation.handoff = first.terminal.handoff
    stream = await subject.complete(request)
    expect(stream.reason in (STOP, LENGTH), f"The decode request ended with {stream.describe()}.")
    expect(
        len(stream.token_ids) < OUTPUT_TOKENS,
        f"The decode request returned {len(stream.token_ids)} tokens, which exceeds max_tokens with the prefill's.",
    )
    counted, received = stream.terminal.usage.completion_tokens, len(stream.token_ids)
    expect(counted == received, f"usage has {counted} generated tokens, {received} were received.")
    return f"{received} tokens after the handoff."


async def _unclaimed_role(subject: Subject, request: worker_pb2.GenerateRequest) -> NoReturn:
    """Ends a rule about a role that the worker does not have: expects the request to be refused."""
    stream = await subject.complete(request)
    raise NotClaimed(f"Refused: {refusal_message(stream, UNSUPPORTED)}")


async def _prefilled(subject: Subject, request: worker_pb2.GenerateRequest) -> ObservedStream:
    stream = await subject.complete(request)
    expect(stream.reason == HANDOFF, f"The prefill request ended with {stream.describe()}, not with HANDOFF.")
    expect(len(stream.token_ids) == 1, f"The prefill request returned {len(stream.token_ids)} tokens, not one.")
    expect(bool(stream.terminal.handoff), "The handoff is empty.")
    return stream
