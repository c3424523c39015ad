"""Drives an engine in the test's own process, as a worker would, without ports and without other services."""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import grpc

from services.common.base.errors import SluiceError
from services.worker.contract.delta_stream import DeltaStream
from services.worker.contract.engine import GenerateContext, LLMEngine
from services.worker.contract.generation import Delta, FinishReason, GenerateRequest, StopParams, Usage
from services.worker.serving.control import Controls
from services.worker.serving.service import WorkerService
from services.worker.serving.worker import Worker
from sluice.conformance import Patience, Report, Target, run, select
from sluice.v1 import worker_pb2_grpc

DRAIN_S = 2.0
MAX_MESSAGE_BYTES = 64 << 20
"""Bytes of a message to the worker of an engine under test."""

_numbers = count(1)


def mock_request(token_ids: Sequence[int] = (1, 2, 3), max_tokens: int = 8, **fields: Any) -> GenerateRequest:
    """Returns a request for up to `max_tokens` tokens; `fields` are further ones of GenerateRequest."""
    named = {"request_id": f"test-{next(_numbers)}", "model": "test", "stop": StopParams(max_tokens=max_tokens)}
    return GenerateRequest(token_ids=array("I", token_ids), **{**named, **fields})


def mock_context(request_id: str = "", **fields: Any) -> GenerateContext:
    """Returns the context of a request that is never cancelled."""
    return GenerateContext(request_id or f"test-{next(_numbers)}", **fields)


class _CancellingContext(GenerateContext):
    __slots__ = ("_after", "_reads")

    def __init__(self, request_id: str, after: int) -> None:
        self._after = after
        self._reads = 0
        super().__init__(request_id)

    @property
    def cancelled(self) -> bool:
        self._reads += 1
        return self._reads > self._after

    @cancelled.setter
    def cancelled(self, value: bool) -> None:
        if value:
            self._after = 0


def cancelling_context(after: int = 3, request_id: str = "") -> GenerateContext:
    """Returns a context whose `cancelled` is False for its first `after` readings and True from then on.

    For engines that look at it between two steps; `collect` cancels the others.
    """
    return _CancellingContext(request_id or f"test-{next(_numbers)}", after)


@dataclass(frozen=True)
class Output:
    """What an engine returned for one request.

    Attributes:
        deltas: in order; the last one is terminal.
        token_ids: of all deltas.
    """

    deltas: Sequence[Delta] = ()
    token_ids: Sequence[int] = field(default_factory=list)

    @property
    def finish_reason(self) -> FinishReason:
        """Why the generation ended."""
        reason = self.deltas[-1].finish_reason
        assert reason is not None
        return reason

    @property
    def usage(self) -> Usage | None:
        """The token counts that the engine reported."""
        return self.deltas[-1].usage

    @property
    def error(self) -> SluiceError | None:
        """Why the generation failed; None if it did not."""
        return self.deltas[-1].error


async def collect(
    engine: LLMEngine,
    request: GenerateRequest | None = None,
    context: GenerateContext | None = None,
    *,
    cancel_after: int | None = None,
) -> Output:
    """Runs a request on a started engine and returns its output.

        output = await collect(engine, mock_request([5, 6, 7], max_tokens=4))
        assert output.finish_reason is FinishReason.LENGTH

    Args:
        request: by default one of three tokens.
        cancel_after: cancels the request as a worker does, once it has so many tokens; None: never.

    Raises:
        SluiceError: the engine refused the request.
    """
    request = request or mock_request()
    context = context or mock_context(request.request_id)
    sink, deltas, token_ids = DeltaStream(), list[Delta](), list[int]()
    engine.submit(request, context, sink)
    async for delta in sink.deltas():
        deltas.append(delta)
        token_ids.extend(delta.token_ids)
        if cancel_after is not None and len(token_ids) >= cancel_after and delta.finish_reason is None:
            engine.abort(context)
            cancel_after = None
    return Output(deltas, token_ids)


class ContractViolated(AssertionError):
    """An engine violated rules of the worker contract; `report` has the result of every rule."""

    def __init__(self, report: Report) -> None:
        self.report = report
        failed = {result.rule.name: result.seen for result in report.results if result.rule.name in report.failed}
        super().__init__("\n".join(f"{name}: {seen}" for name, seen in failed.items()))


async def check(engine: LLMEngine, rules: Sequence[str] = (), patience: float = 1.0) -> Report:
    """Tests an engine against the rules of the conformance kit, in this process; starts it and cleans it up.

        await check(MyEngine.from_args(WorkerSettings(model="tiny=./my-model")))

    Args:
        engine: constructed, not started.
        rules: names of rules (`sluice conformance --list`); all of them by default.
        patience: factor for every deadline, for slow engines.

    Returns:
        The result of every rule, of which none is violated. Rules about registration and shutdown are not checked.

    Raises:
        ContractViolated: at least one rule is violated.
        SluiceError: the engine does not start, or there is no such rule.
    """
    chosen, failures = select(rules), list[BaseException]()
    worker = Worker(engine, "engine-under-test", lambda name, error: failures.append(error))
    service = WorkerService(worker, Controls(worker, lambda: False), 0.0)
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)])
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
        address = f"unix:{folder}/worker"
        server.add_insecure_port(address)
        try:
            await worker.start()
            await server.start()
            report = await run(Target(address), chosen, Patience(patience))
        finally:
            await worker.drain(DRAIN_S)
            await service.end_sessions()
            await server.stop(0)
            await worker.cleanup()
    if failures:
        raise failures[0]
    if report.failed:
        raise ContractViolated(report)
    return report
