"""Rules about control actions."""

from __future__ import annotations

from services.common.base.errors import ErrorKind
from services.worker.contract.capabilities import Capability
from sluice.conformance.exceptions import NotClaimed
from sluice.conformance.observed_stream import REASONS
from sluice.conformance.refusals import UNSUPPORTED, expect_call_refused
from sluice.conformance.rule import expect, rule
from sluice.conformance.subject import Subject
from sluice.v1 import worker_pb2

Action = worker_pb2.ControlRequest
ENDS = (REASONS.FINISH_REASON_STOP, REASONS.FINISH_REASON_LENGTH)


async def _refused(
    subject: Subject, action: worker_pb2.ControlRequest.Action.ValueType, kinds: tuple[ErrorKind, ...], **arguments: str
) -> str:
    request = worker_pb2.ControlRequest(action=action, arguments=arguments)
    return await expect_call_refused(subject, subject.stub.Control(request), *kinds)


@rule("sleep", "An engine serves again after sleep and wake.", "worker.proto, ACTION_SLEEP, ACTION_WAKE")
async def sleep(subject: Subject) -> str:
    if not subject.claims(Capability.SLEEP):
        raise NotClaimed(f"Refused: {await _refused(subject, Action.ACTION_SLEEP, UNSUPPORTED)}")
    await subject.wait_for_load(lambda load: load.running_requests + load.waiting_requests == 0)
    await subject.control(Action.ACTION_SLEEP)
    await subject.control(Action.ACTION_WAKE)
    stream = await subject.complete(subject.request())
    expect(stream.reason in ENDS, f"The first request after waking ended with {stream.describe()}.")
    return f"Served after waking: {stream.describe()}."


@rule("profile", "A profile can be started and stopped.", "worker.proto, ACTION_START_PROFILE, ACTION_STOP_PROFILE")
async def profile(subject: Subject) -> str:
    if not subject.claims(Capability.PROFILE):
        raise NotClaimed(f"Refused: {await _refused(subject, Action.ACTION_START_PROFILE, UNSUPPORTED)}")
    await subject.control(Action.ACTION_START_PROFILE)
    stream = await subject.complete(subject.request())
    await subject.control(Action.ACTION_STOP_PROFILE)
    expect(stream.reason in ENDS, f"A request while profiling ended with {stream.describe()}.")
    return "Started, and stopped after a request."


@rule(
    "inject-fault",
    "Only known faults are injected, and only where the capability is claimed.",
    "worker.proto, ACTION_INJECT_FAULT",
    generates=False,
)
async def inject_fault(subject: Subject) -> str:
    arguments = {"fault": "an-unknown-fault"}
    if not subject.claims(Capability.INJECT_FAULT):
        raise NotClaimed(f"Refused: {await _refused(subject, Action.ACTION_INJECT_FAULT, UNSUPPORTED, **arguments)}")
    message = await _refused(subject, Action.ACTION_INJECT_FAULT, (ErrorKind.INVALID_ARGUMENT,), **arguments)
    return f"An unknown fault is refused: {message}"


@rule(
    "bad-action",
    "An action that does not exist is INVALID_ARGUMENT.",
    "worker.proto, ACTION_UNSPECIFIED",
    generates=False,
)
async def bad_action(subject: Subject) -> str:
    message = await _refused(subject, Action.ACTION_UNSPECIFIED, (ErrorKind.INVALID_ARGUMENT,))
    return f"Refused: {message}"
