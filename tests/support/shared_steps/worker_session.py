"""Rigs of a worker's sessions: starts of many requests in one message, and their output in one page."""

from __future__ import annotations

from array import array
from typing import Any, cast
from unittest import mock

from services.common.base.errors import SluiceError, internal
from services.common.rpc.errors import from_detail
from services.worker.contract.generation import Delta, FinishReason, TokenLogprob, Usage
from services.worker.contract.generation import PositionLogprobs as Position
from services.worker.serving import service, wire
from services.worker.serving.outbox import Page
from sluice.v1 import common_pb2, worker_pb2
from tests.support.shared_steps.rigs import ROWS, Fault, Outcome, rig


class _Session:
    def __init__(self, fault: Fault) -> None:
        self.outcome = Outcome()
        self._fault = fault

    def find_media(self, spans: Any) -> Any:
        return ()

    def start(self, slot: int, request: Any, trace: Any = None) -> None:
        self._fault.at(slot)
        self.outcome.outputs[slot] = request

    def refuse(self, slot: int, error: SluiceError) -> None:
        self.outcome.errors[slot] = error


@rig("worker.apply")
def apply(fault: Fault) -> Outcome:
    session = _Session(fault)
    read = fault.wrap(wire.read_request, lambda request, find: int(request.request_id))
    starts = [
        worker_pb2.SessionStart(slot=row, request=worker_pb2.GenerateRequest(request_id=str(row), model="m"))
        for row in range(ROWS + 1)
    ]
    with mock.patch.object(service, "read_request", read):
        for some in (starts[:ROWS], starts[ROWS:]):
            service._apply(cast(Any, session), worker_pb2.WorkerSessionRequest(starts=some))
    session.outcome.alive = session.outcome.outputs.pop(ROWS, None) is not None
    return session.outcome


@rig("worker.serialize")
def serialize(fault: Fault) -> Outcome:
    """A log-probability, a text or a usage that its message cannot hold."""

    def deltas(row: int) -> list[Delta]:
        wrong_id = 1 << 32 if fault.due(row) else 7
        wrong_count = -1 if fault.due(row) else 3
        logprobs = (Position(TokenLogprob(wrong_id, -1.0)),)
        usage = Usage(prompt_tokens=wrong_count, completion_tokens=1)
        return [Delta(logprobs=logprobs), Delta(finish_reason=FinishReason.STOP, usage=usage)]

    def broken(slot: int) -> SluiceError:
        return internal("The output of this request cannot be sent.")

    page = Page()
    page.slots, page.counts, page.token_ids = (array("I", range(ROWS)), array("I", [1] * ROWS), array("I", range(ROWS)))
    page.extras = [(row, delta) for row in range(ROWS) for delta in deltas(row)]
    message = wire.write_page(page, broken)
    outcome = Outcome({row: [] for row in range(ROWS)})
    for extra in worker_pb2.TokenBatch.FromString(message.SerializeToString()).extras:
        if extra.finish_reason == common_pb2.FINISH_REASON_ERROR:
            outcome.errors[extra.slot] = from_detail(extra.error)
        else:
            outcome.outputs[extra.slot].append(str(extra))
    return outcome
