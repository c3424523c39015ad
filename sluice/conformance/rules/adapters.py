"""LoRA adapters."""

from __future__ import annotations

from services.common.errors import ErrorKind
from services.worker.contract.capabilities import Capability
from sluice.conformance.heard import REASONS
from sluice.conformance.refusals import UNSUPPORTED, call_refused, unclaimed
from sluice.conformance.rule import NotChecked, NotClaimed, expect, rule
from sluice.conformance.subject import Subject
from sluice.v1 import worker_pb2

ENDS = (REASONS.FINISH_REASON_STOP, REASONS.FINISH_REASON_LENGTH)


@rule("lora", "A loaded adapter is chosen per request, by `lora` or as the model.", "GenerateRequest.lora, .model")
async def lora(subject: Subject) -> str:
    if not subject.claims(Capability.LORA):
        request = subject.request()
        request.lora = "adapter-which-nobody-loaded"
        await unclaimed(subject, request)
    if not subject.card.adapters:
        raise NotChecked("No adapter is loaded.")
    name = subject.card.adapters[0]
    by_field, by_model = subject.request(), subject.request()
    by_field.lora = name
    by_model.model = name
    async with subject.session() as caller:
        for how, heard in zip(("lora", "model"), await caller.ask(by_field, by_model), strict=True):
            expect(heard.reason in ENDS, f"Adapter {name} as {how} ended with {heard.describe()}.")
    return f"Adapter {name} answers under both fields."


@rule(
    "lora-loading",
    "Adapters are loaded and unloaded by name; a nameless one is refused.",
    "worker.proto, Control",
    generates=False,
)
async def lora_loading(subject: Subject) -> str:
    load = subject.stub.Control(worker_pb2.ControlRequest(action=worker_pb2.ControlRequest.ACTION_LOAD_LORA))
    if not subject.claims(Capability.LORA_LOADING):
        raise NotClaimed(f"Refused: {await call_refused(subject, load, *UNSUPPORTED)}")
    nameless = await call_refused(subject, load, ErrorKind.INVALID_ARGUMENT)
    unload = subject.stub.Control(
        worker_pb2.ControlRequest(
            action=worker_pb2.ControlRequest.ACTION_UNLOAD_LORA, arguments={"name": "adapter-which-nobody-loaded"}
        )
    )
    await call_refused(subject, unload, ErrorKind.NOT_FOUND, ErrorKind.INVALID_ARGUMENT)
    return f"A load without a name is refused: {nameless} So is unloading an unknown one."
