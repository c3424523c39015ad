"""Requests that two workers share: one computes the prompt and the first token, the other one all the rest.

The router names the pair, per request; here is decided whether it may, and what becomes of a request whose pair breaks.
The first token reaches the client from the prefill worker, at once. One booking holds both workers' parts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from services.common.errors import ErrorKind, SluiceError, unavailable
from services.gateway.clients.worker_link import WorkerLink
from services.gateway.core.request import DisaggregationPart, Role, Route
from services.gateway.metrics import GatewayMetrics
from services.gateway.streams.manager import StreamManager
from services.gateway.streams.migration import INEXACT, RESUME, RESUME_GUIDED, is_history_dependent
from services.gateway.streams.stream import GenerationStream
from services.gateway.workers.connections import ConnectionManager
from services.gateway.workers.registry import WorkerEntry, WorkerRegistry

log = logging.getLogger(__name__)

NO_PREFILL = "no_prefill_worker"
PREFILL_BUSY = "prefill_busy"
PREFILL_FAILED = "prefill_failed"
HANDOFF_REFUSED = "handoff_refused"

FEW_UNCACHED = "few_uncached_tokens"
PAIR_BUSY = "pair_busy"
HANDOFF_PARAM = "disaggregation"
"""The field that workers name when they cannot play the part they were given."""


@dataclass(frozen=True, slots=True)
class DisaggRules:
    """Which requests a pair of workers serves.

    Attributes:
        mode: auto: those that the router finds a pair for; a worker that can runs them alone when there is none or the
            pair breaks. require: never one worker alone. off: never a pair.
        min_tokens: shorter prompts are not worth the way, where a worker can run them alone; tokens, 0 for none.
    """

    mode: Literal["auto", "require", "off"] = "auto"
    min_tokens: int = 0

    def skips(self, prompt_tokens: int) -> bool:
        """Whether a prompt is too short for a pair."""
        return prompt_tokens < self.min_tokens

    def eligible(self, workers: Sequence[WorkerEntry], prompt_tokens: int, alone: bool = False) -> list[WorkerEntry]:
        """Who may be chosen.

        Args:
            workers: of one model, those that are left.
            alone: the request cannot be shared.

        Raises:
            SluiceError: UNAVAILABLE when the rules leave nobody.
        """
        roles = {worker.role for worker in workers}
        if roles <= {Role.AGGREGATED}:
            if self.mode == "require" and workers and not self.skips(prompt_tokens):
                raise _required(workers[0].model)
            return list(workers)
        whole = [worker for worker in workers if worker.runs_alone]
        if self.mode == "off" or alone:
            if not whole:
                raise _nobody_alone(workers[0].model)
            return whole
        if self.skips(prompt_tokens) and whole:
            return whole
        if self.mode == "require":
            if not {Role.PREFILL, Role.DECODE} <= roles:
                raise _required(workers[0].model)
            return [worker for worker in workers if worker.role is not Role.AGGREGATED]
        return list(workers)

    def judged(self, route: Route, chosen: WorkerEntry | None, prompt_tokens: int) -> Route:
        """The route, marked when one worker has to do what was meant for two; SluiceError when it must not."""
        meant_for_two = chosen is not None and chosen.role is Role.DECODE
        meant_for_two = meant_for_two or route.prefill_skipped == PAIR_BUSY
        skipped = self.skips(prompt_tokens) or route.prefill_skipped == FEW_UNCACHED
        if route.prefill_worker_id or skipped or not meant_for_two or self.mode == "off":
            return route
        if self.mode == "require":
            raise _required(chosen.model if chosen else "")
        return replace(route, split_skipped=PREFILL_BUSY if route.prefill_skipped == PAIR_BUSY else NO_PREFILL)


class DisaggOrchestrator:
    """Conducts the pairs: takes what the prefill worker hands over to the decode worker, and sees to pairs that break.

    Args:
        migrates: whether generations may move to other workers.
    """

    def __init__(
        self,
        rules: DisaggRules,
        registry: WorkerRegistry,
        connections: ConnectionManager,
        stream_manager: StreamManager,
        metrics: GatewayMetrics,
        migrates: bool,
    ) -> None:
        self._rules = rules
        self._registry = registry
        self._connections = connections
        self._stream_manager = stream_manager
        self._metrics = metrics
        self._migrates = migrates

    def hand_over(self, stream: GenerationStream, handoff: bytes) -> None:
        """The prefill worker is done: the decode worker goes on, unless it is gone."""
        pair = stream.pair
        assert pair is not None
        stream.handed_over = True
        if not pair.worker.connected:
            stream.shift(pair.worker)
            gone = SluiceError(ErrorKind.CANNOT_CONNECT, f"The {pair.worker.peer} cannot be reached.")
            self._stream_manager.interrupted(stream, gone)
            return
        if stream.span is not None:
            stream.span.add_event("handed over", {"to": pair.worker.worker_id, "bytes": len(handoff)})
        self._metrics.disaggregated("pair")
        self._stream_manager.go_on(
            stream, pair.worker, pair.rank, pair.name, pair.resumed, DisaggregationPart(Role.DECODE, handoff)
        )

    def rescue(self, stream: GenerationStream, worker: WorkerLink, error: SluiceError) -> SluiceError | None:
        """What to do about a pair that broke: None when the decode worker does it alone, else the error to go on with.

        A prefill worker that is lost is replaced by another one if there is one; its loss costs the prompt, not the
        decode worker's booking.
        """
        pair = stream.pair
        if pair is None:
            return error
        refused = error.param == HANDOFF_PARAM
        if stream.handed_over and not (refused and len(stream.tokens) == stream.resumed):
            return error  # the decode worker has gone on: an ordinary loss
        if not refused and not error.retryable:
            return error
        reason = HANDOFF_REFUSED if stream.handed_over else PREFILL_FAILED
        self._metrics.disaggregated(reason)
        log.warning(
            "a pair of workers broke: %s",
            error.message,
            extra={"request": stream.request_id, "worker": worker.worker_id, "reason": reason},
        )
        if self._can_run_alone(stream, pair.worker) and not self._other_prefill(stream, worker):
            self._alone(stream, pair.worker, pair.rank, f"{pair.name}-alone", reason)
            return None
        if not refused:
            return error
        return unavailable("The two workers of this request could not agree on it; try again.", code=reason)

    def _can_run_alone(self, stream: GenerationStream, worker: WorkerLink) -> bool:
        entry = self._registry.workers.get(worker.worker_id)
        if self._rules.mode != "auto" or entry is None or not entry.runs_alone or not worker.connected:
            return False
        return not (stream.tokens and stream.request.guided is not None) or RESUME_GUIDED in entry.capabilities

    def _other_prefill(self, stream: GenerationStream, lost: WorkerLink) -> bool:
        """Whether another prefill worker can take the place of one that was lost."""
        if stream.handed_over or not self._migrates:
            return False
        others = (one for one in self._registry.of_model(stream.model) if one.role is Role.PREFILL)
        return any(
            (link := self._connections.find(one.worker_id)) is not None and link is not lost and link.connected
            for one in others
        )

    def _alone(self, stream: GenerationStream, worker: WorkerLink, rank: int | None, name: str, reason: str) -> None:
        stream_manager = self._stream_manager
        stream_manager.on_degraded(stream, reason)
        entry = self._registry.workers[worker.worker_id]
        if stream.tokens and is_history_dependent(stream.request.sampling) and RESUME not in entry.capabilities:
            stream_manager.on_degraded(stream, INEXACT)
        stream.pair = None
        stream_manager.go_on(stream, worker, rank, name, len(stream.tokens), None)


def _required(model: str) -> SluiceError:
    return unavailable(
        f"Model {model!r} has no pair of a prefill and a decode worker now, and --disaggregation require wants one.",
        code="no_prefill_workers",
    )


def _nobody_alone(model: str) -> SluiceError:
    return unavailable(
        f"No worker of model {model!r} can run this request alone: start aggregated workers, or decode workers whose "
        "engine computes prompts.",
        code="no_workers",
    )
