"""The canary: a one-token generation, run when none has finished for a while, that detects a hung engine."""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.common.base.errors import ENGINE_UNHEALTHY, ErrorKind, SluiceError
from services.worker.contract.capabilities import SAMPLING, Capability
from services.worker.contract.engine import EngineConfig, GenerateContext, LLMEngine, Sink
from services.worker.contract.generation import (
    Disaggregation,
    FinishReason,
    GenerateRequest,
    PositionLogprobs,
    Role,
    StopParams,
    Usage,
)
from services.worker.serving.control import ASLEEP
from services.worker.serving.worker import Worker

if TYPE_CHECKING:
    from services.worker.contract.text_delta import TextUpdate

log = logging.getLogger(__name__)

UNHEALTHY = "unhealthy"
HIGHEST_PRIORITY = -(2**31)
MAX_CANARY_S = 10.0
"""Seconds of a canary, and between two while they fail; then it has failed."""
MAX_FAILURES = 2
"""Consecutive canaries that fail; then the worker leaves discovery."""


class Canary:
    """Removes the worker from discovery while canary generations fail, and restores it when one succeeds.

    Args:
        after_s: seconds without a finished generation before a canary runs.
        timeout_s: seconds a canary may take; also the interval between canaries while they fail.
        failures: consecutive failures after which the worker is unhealthy.
    """

    def __init__(
        self, worker: Worker, after_s: float, timeout_s: float = MAX_CANARY_S, failures: int = MAX_FAILURES
    ) -> None:
        self._worker = worker
        self._after_s = after_s
        self._timeout_s = timeout_s
        self._max_failures = failures
        self._failed = 0
        self._number = 0

    async def run(self) -> None:
        """Runs until cancelled; returns at once for a decode worker that cannot prefill."""
        if _canary_request(self._worker.config, 0) is None:
            log.info("canary disabled: a decode worker without local prefill cannot run one")
            return
        while True:
            await asyncio.sleep(self._pause_s())
            quiet_s = time.monotonic() - self._worker.last_finished_s
            if self._worker.phases.name != ASLEEP and (self._failed or quiet_s >= self._after_s):
                await self.try_once()

    async def try_once(self) -> bool:
        """Runs one canary; returns True when the engine generates."""
        delivered = self._worker.delivered_tokens
        problem = await self._generate()
        # An engine that delivered tokens to other requests meanwhile is busy, not hung. Finished requests would prove
        # nothing: they may have failed, or been cancelled by callers after a timeout.
        if problem and self._worker.delivered_tokens > delivered:
            problem = ""
        self._worker.metrics.record_canary(ok=not problem)
        if problem:
            self._failed += 1
            log.warning("canary failed: %s", problem, extra={"failures": self._failed})
            if self._failed >= self._max_failures:
                self._declare_unhealthy(problem)
        else:
            self._failed = 0
            self._worker.last_finished_s = time.monotonic()
            self._worker.gate.resume(UNHEALTHY)
        return not problem

    def _pause_s(self) -> float:
        if self._failed:
            return self._timeout_s
        return max(self._after_s - (time.monotonic() - self._worker.last_finished_s), self._after_s / 10)

    def _declare_unhealthy(self, problem: str) -> None:
        error = SluiceError(
            ErrorKind.ENGINE_SHUTDOWN,
            "The engine of this worker does not generate; send the request to another worker.",
            code=ENGINE_UNHEALTHY,
        )
        if self._failed == self._max_failures:
            log.error("worker is unhealthy and leaves discovery: %s", problem)
            self._worker.gate.suspend(UNHEALTHY, error)
        self._worker.fail_all(error)

    async def _generate(self) -> str:
        """Returns what went wrong; empty on success."""
        self._number += 1
        request = _canary_request(self._worker.config, self._number)
        assert request is not None
        context, probe = GenerateContext(request.request_id), _Probe()
        engine = self._worker.engine
        try:
            async with asyncio.timeout(self._timeout_s):
                if _only_pools(self._worker.config):
                    await _pool(engine, self._worker.config, request.token_ids)
                    return ""
                engine.submit(request, context, probe)
                await probe.done.wait()
        except TimeoutError:
            return f"a one-token generation took more than {self._timeout_s:g} seconds"
        except SluiceError as error:
            return error.message
        except Exception as error:
            log.exception("engine failed to accept the canary request")
            return f"the engine failed to accept a request ({type(error).__name__})"
        finally:
            engine.abort(context)
        return probe.problem


class _Probe(Sink):
    def __init__(self) -> None:
        self.done = asyncio.Event()
        self.problem = ""
        self._tokens = 0

    def begin(self, cached_tokens: int | None, prompt_logprobs: Sequence[PositionLogprobs] = ()) -> None:
        pass

    def push(self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs] = ()) -> None:
        self._tokens += len(token_ids)

    def push_text(self, text: TextUpdate) -> None:
        self._tokens += len(text.events)

    def finish(
        self,
        reason: FinishReason,
        usage: Usage,
        *,
        stop_token_id: int | None = None,
        error: SluiceError | None = None,
        handoff: bytes = b"",
    ) -> None:
        if error is not None:
            self.problem = error.message
        elif reason in (FinishReason.ERROR, FinishReason.CANCELLED) or not self._tokens:
            self.problem = f"a one-token generation finished as {reason.name.lower()} with {self._tokens} tokens"
        self.done.set()


def _only_pools(config: EngineConfig) -> bool:
    """Whether the engine computes embeddings or classes and cannot sample tokens."""
    pools = {Capability.EMBEDDINGS, Capability.CLASSIFICATION} & config.capabilities
    return bool(pools) and not SAMPLING & config.capabilities


async def _pool(engine: LLMEngine, config: EngineConfig, token_ids: array[int]) -> None:
    if Capability.CLASSIFICATION in config.capabilities:
        await engine.classify([token_ids], [0])
    else:
        await engine.embed([token_ids], 0)


def _canary_request(config: EngineConfig, number: int) -> GenerateRequest | None:
    """Returns a request of one prompt and one output token at the highest priority; None for a decode-only worker."""
    if config.role is Role.DECODE and Capability.LOCAL_PREFILL not in config.capabilities:
        return None
    prefill = Disaggregation(Role.PREFILL) if config.role is Role.PREFILL else None
    if Capability.TOKEN_IDS not in config.capabilities:
        return GenerateRequest(
            request_id=f"sluice-canary-{number}",
            model=config.model,
            messages_json=b'{"messages":[{"role":"user","content":"Hi"}]}',
            stop=StopParams(max_tokens=1),
        )
    return GenerateRequest(
        request_id=f"sluice-canary-{number}",
        model=config.model,
        token_ids=array("I", [min(11, config.vocab_size - 1) if config.vocab_size else 11]),
        stop=StopParams(max_tokens=1),
        priority=HIGHEST_PRIORITY if Capability.PRIORITY in config.capabilities else 0,
        disaggregation=prefill,
    )
