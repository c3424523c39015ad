"""The two halves of a request that is split over a prefill and a decode worker."""

from __future__ import annotations

from typing import NoReturn

from services.worker.contract.capabilities import Capability
from sluice.conformance.heard import REASONS, ObservedStream
from sluice.conformance.refusals import UNSUPPORTED, refusal_of
from sluice.conformance.rule import NotChecked, NotClaimed, expect, rule
from sluice.conformance.subject import OUTPUT_TOKENS, Subject
from sluice.v1 import common_pb2, worker_pb2

HANDOFF, STOP, LENGTH = REASONS.FINISH_REASON_HANDOFF, REASONS.FINISH_REASON_STOP, REASONS.FINISH_REASON_LENGTH
PREFILL, DECODE = common_pb2.WORKER_ROLE_PREFILL, common_pb2.WORKER_ROLE_DECODE


def _in_role(subject: Subject, role: common_pb2.WorkerRole.ValueType) -> worker_pb2.GenerateRequest:
    request = subject.endless(max_tokens=OUTPUT_TOKENS)
    request.disaggregation.role = role
    return request


@rule(
    "prefill",
    "The prefill part is exactly one token and a handoff.",
    "worker.proto, DisaggregationParams; TokenExtra.handoff",
    generates=False,
)
async def prefill(subject: Subject) -> str:
    request = _in_role(subject, PREFILL)
    if not subject.claims(Capability.PREFILL):
        await not_this_part(subject, request)
    heard = await _prefilled(subject, request)
    return f"One token and a handoff of {len(heard.terminal.handoff)} bytes."


@rule(
    "decode",
    "The decode part goes on with the token after the prefill part's, and counts its own tokens.",
    "worker.proto, DisaggregationParams",
    generates=False,
)
async def decode(subject: Subject) -> str:
    request = _in_role(subject, DECODE)
    if not subject.claims(Capability.DECODE):
        request.disaggregation.handoff = b"\x00"
        await not_this_part(subject, request)
    if not subject.target.prefill_peer:
        raise NotChecked("A handoff comes from a prefill worker: give its address as --prefill-peer.")
    half = worker_pb2.GenerateRequest()
    half.CopyFrom(request)
    half.disaggregation.role = PREFILL
    async with subject.peer(subject.target.prefill_peer) as peer:
        first = await _prefilled(peer, half)
    request.disaggregation.handoff = first.terminal.handoff
    heard = await subject.ask(request)
    expect(heard.reason in (STOP, LENGTH), f"The decode part ended with {heard.describe()}.")
    expect(
        len(heard.token_ids) < OUTPUT_TOKENS,
        f"The decode part gave {len(heard.token_ids)} tokens; with the prefill part's that is more than max_tokens.",
    )
    counted = heard.terminal.usage.completion_tokens
    expect(counted == len(heard.token_ids), f"usage says {counted} generated tokens, {len(heard.token_ids)} came.")
    return f"{len(heard.token_ids)} tokens after the handoff."


async def not_this_part(subject: Subject, request: worker_pb2.GenerateRequest) -> NoReturn:
    """Ends a rule about a part that the worker does not play: it must say so."""
    heard = await subject.ask(request)
    raise NotClaimed(f"Refused: {refusal_of(heard, UNSUPPORTED)}")


async def _prefilled(subject: Subject, request: worker_pb2.GenerateRequest) -> ObservedStream:
    heard = await subject.ask(request)
    expect(heard.reason == HANDOFF, f"The prefill part ended with {heard.describe()}, not with HANDOFF.")
    expect(len(heard.token_ids) == 1, f"The prefill part gave {len(heard.token_ids)} tokens, not one.")
    expect(bool(heard.terminal.handoff), "The handoff is empty.")
    return heard
