"""Rules about LoRA adapters."""

from __future__ import annotations

from services.common.base.errors import ErrorKind
from services.worker.contract.capabilities import Capability
from sluice.conformance.exceptions import NotChecked, NotClaimed
from sluice.conformance.observed_stream import REASONS
from sluice.conformance.refusals import UNSUPPORTED, expect_call_refused, expect_unsupported
from sluice.conformance.rule import expect, rule
from sluice.conformance.subject import Subject
from sluice.v1 import worker_pb2

ENDS = (REASONS.FINISH_REASON_STOP, REASONS.FINISH_REASON_LENGTH)
UNKNOWN_ADAPTER = "adapter-that-is-not-loaded"


@rule("lora", "A request selects a loaded adapter by `lora` or as the model.", "GenerateRequest.lora, .model")
async def lora(subject: Subject) -> str:
    if not subject.claims(Capability.LORA):
        request = subject.request()
        request.lora = UNKNOWN_ADAPTER
        await expect_unsupported(subject, request)
    if not subject.card.adapters:
        raise NotChecked("No adapter is loaded.")
    name = subject.card.adapters[0]
    by_field, by_model = subject.request(), subject.request()
    by_field.lora = name
    by_model.model = name
    async with subject.session() as caller:
        for how, stream in zip(("lora", "model"), await caller.complete(by_field, by_model), strict=True):
            expect(stream.reason in ENDS, f"Adapter {name} as {how} ended with {stream.describe()}.")
    return f"Adapter {name} can be selected by both fields."


@rule(
    "lora-loading",
    "Adapters are loaded and unloaded by name; an action without a name is refused.",
    "worker.proto, Control",
    generates=False,
)
async def lora_loading(subject: Subject) -> str:
    load = subject.stub.Control(worker_pb2.ControlRequest(action=worker_pb2.ControlRequest.ACTION_LOAD_LORA))
    if not subject.claims(Capability.LORA_LOADING):
        raise NotClaimed(f"Refused: {await expect_call_refused(subject, load, *UNSUPPORTED)}")
    message = await expect_call_refused(subject, load, ErrorKind.INVALID_ARGUMENT)
    unload = subject.stub.Control(
        worker_pb2.ControlRequest(
            action=worker_pb2.ControlRequest.ACTION_UNLOAD_LORA, arguments={"name": UNKNOWN_ADAPTER}
        )
    )
    await expect_call_refused(subject, unload, ErrorKind.NOT_FOUND, ErrorKind.INVALID_ARGUMENT)
    return f"Loading without a name is refused: {message} Unloading an unknown adapter is refused as well."
