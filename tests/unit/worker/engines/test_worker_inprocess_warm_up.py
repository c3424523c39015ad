"""The generation by which an engine compiles what log-probabilities need, before anybody asks for them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.common.base.errors import SluiceError, internal, invalid
from services.worker.contract.engine import GenerateContext, Sink
from services.worker.contract.generation import FinishReason, GenerateRequest, Usage
from services.worker.engines.inprocess import engine as module
from services.worker.engines.inprocess.engine import InProcessEngine


class Compiling(InProcessEngine):
    """Remembers its requests, and ends each as told.

    Args:
        end: an error of the request, an error to raise, None for a good end, or "never".
    """

    def __init__(self, end: SluiceError | str | None, raised: bool = False) -> None:
        super().__init__()
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self._end, self._raised = end, raised

    def submit(self, request: GenerateRequest, context: GenerateContext, sink: Sink) -> None:
        self.requests.append(request)
        if isinstance(self._end, SluiceError) and self._raised:
            raise self._end
        if self._end == "never":
            return
        sink.begin(0)
        if isinstance(self._end, SluiceError):
            sink.finish(FinishReason.ERROR, Usage(1, 0), error=self._end)
        else:
            sink.push([5])
            sink.finish(FinishReason.LENGTH, Usage(1, 1))

    def abort(self, context: GenerateContext) -> None:
        self.aborted.append(context.request_id)


Compiling.__abstractmethods__ = frozenset()  # the rest of an engine is not needed here


@pytest.mark.parametrize(
    ("end", "raised", "logged"),
    [
        (None, False, ""),
        (internal("It broke."), False, "It broke."),
        (invalid("No log-probabilities here."), True, "No log-probabilities here."),
        ("never", False, "more than 0.1 s"),
    ],
)
async def test_warm_up_asks_for_one_token_with_log_probabilities_and_outlives_its_failure(
    end: Any, raised: bool, logged: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "WARM_UP_S", 0.1)
    engine = Compiling(end, raised)  # type: ignore[abstract]
    async with asyncio.timeout(5):
        await engine.warm_up_logprobs()
    (request,) = engine.requests
    assert (request.logprobs, request.stop.max_tokens) == (1, 1)
    assert len(request.token_ids) > 1, "a prompt of one token ends an engine with the file connector"
    assert logged in caplog.text
    assert bool(caplog.text) == bool(logged)
    assert raised or engine.aborted == [request.request_id]
