"""Operating the engine."""

from __future__ import annotations

from services.common.errors import ErrorKind
from services.worker.contract.capabilities import Capability
from sluice.conformance.heard import REASONS
from sluice.conformance.refusals import UNSUPPORTED, call_refused
from sluice.conformance.rule import NotClaimed, expect, rule
from sluice.conformance.subject import Subject
from sluice.v1 import worker_pb2

Action = worker_pb2.ControlRequest
ENDS = (REASONS.FINISH_REASON_STOP, REASONS.FINISH_REASON_LENGTH)


async def _refused(
    subject: Subject, action: worker_pb2.ControlRequest.Action.ValueType, kinds: tuple[ErrorKind, ...], **arguments: str
) -> str:
    request = worker_pb2.ControlRequest(action=action, arguments=arguments)
    return await call_refused(subject, subject.stub.Control(request), *kinds)


@rule("sleep", "An engine that was put to sleep and woken serves again.", "worker.proto, ACTION_SLEEP, ACTION_WAKE")
async def sleep(subject: Subject) -> str:
    if not subject.claims(Capability.SLEEP):
        raise NotClaimed(f"Refused: {await _refused(subject, Action.ACTION_SLEEP, UNSUPPORTED)}")
    await subject.settles(lambda load: load.running_requests + load.waiting_requests == 0)
    await subject.control(Action.ACTION_SLEEP)
    await subject.control(Action.ACTION_WAKE)
    heard = await subject.ask(subject.request())
    expect(heard.reason in ENDS, f"The first request after waking ended with {heard.describe()}.")
    return f"Awake again: {heard.describe()}."


@rule("profile", "A profile is started and stopped.", "worker.proto, ACTION_START_PROFILE, ACTION_STOP_PROFILE")
async def profile(subject: Subject) -> str:
    if not subject.claims(Capability.PROFILE):
        raise NotClaimed(f"Refused: {await _refused(subject, Action.ACTION_START_PROFILE, UNSUPPORTED)}")
    await subject.control(Action.ACTION_START_PROFILE)
    heard = await subject.ask(subject.request())
    await subject.control(Action.ACTION_STOP_PROFILE)
    expect(heard.reason in ENDS, f"A request while profiling ended with {heard.describe()}.")
    return "Started, and stopped after a request."


@rule(
    "inject-fault",
    "Faults are injected only where claimed, and only known ones.",
    "worker.proto, ACTION_INJECT_FAULT",
    generates=False,
)
async def inject_fault(subject: Subject) -> str:
    arguments = {"fault": "a-fault-which-nobody-knows"}
    if not subject.claims(Capability.INJECT_FAULT):
        raise NotClaimed(f"Refused: {await _refused(subject, Action.ACTION_INJECT_FAULT, UNSUPPORTED, **arguments)}")
    said = await _refused(subject, Action.ACTION_INJECT_FAULT, (ErrorKind.INVALID_ARGUMENT,), **arguments)
    return f"An unknown fault is refused: {said}"


@rule(
    "bad-action",
    "An action that does not exist is INVALID_ARGUMENT.",
    "worker.proto, ACTION_UNSPECIFIED",
    generates=False,
)
async def bad_action(subject: Subject) -> str:
    said = await _refused(subject, Action.ACTION_UNSPECIFIED, (ErrorKind.INVALID_ARGUMENT,))
    return f"Refused: {said}"
