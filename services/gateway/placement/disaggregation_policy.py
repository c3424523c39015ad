"""Decides which requests run on a pair of a prefill and a decode worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from services.common.errors import SluiceError, unavailable
from services.gateway.core.request import Role, Route
from services.gateway.workers.registry import WorkerEntry

NO_PREFILL = "no_prefill_worker"
PREFILL_BUSY = "prefill_busy"

FEW_UNCACHED = "few_uncached_tokens"
PAIR_BUSY = "pair_busy"


@dataclass(frozen=True, slots=True)
class DisaggregationPolicy:
    """Which requests run on a pair of workers.

    Attributes:
        mode: auto: those for which the router finds a pair; if there is none, or it fails, a capable worker runs them
            alone. require: never on one worker. off: never on a pair.
        min_tokens: prompts with fewer tokens run on one worker where possible; 0 for no minimum.
    """

    mode: Literal["auto", "require", "off"] = "auto"
    min_tokens: int = 0

    def skips(self, prompt_tokens: int) -> bool:
        """Returns whether a prompt is too short for a pair."""
        return prompt_tokens < self.min_tokens

    def eligible(self, workers: Sequence[WorkerEntry], prompt_tokens: int, alone: bool = False) -> list[WorkerEntry]:
        """Returns the workers that may be chosen.

        Args:
            workers: the candidates, of one model.
            alone: whether the request must run on one worker.

        Raises:
            SluiceError: UNAVAILABLE when no worker may be chosen.
        """
        roles = {worker.role for worker in workers}
        if roles <= {Role.AGGREGATED}:
            if self.mode == "require" and workers and not self.skips(prompt_tokens):
                raise _required(workers[0].model)
            return list(workers)
        capable = [worker for worker in workers if worker.runs_alone]
        if self.mode == "off" or alone:
            if not capable:
                raise _none_runs_alone(workers[0].model)
            return capable
        if self.skips(prompt_tokens) and capable:
            return capable
        if self.mode == "require":
            if not {Role.PREFILL, Role.DECODE} <= roles:
                raise _required(workers[0].model)
            return [worker for worker in workers if worker.role is not Role.AGGREGATED]
        return list(workers)

    def apply(self, route: Route, chosen: WorkerEntry | None, prompt_tokens: int) -> Route:
        """Returns the route, marked if one worker runs what was intended for a pair.

        Raises:
            SluiceError: UNAVAILABLE if mode is require and the route is not a pair.
        """
        intended_for_pair = chosen is not None and chosen.role is Role.DECODE
        intended_for_pair = intended_for_pair or route.prefill_skipped == PAIR_BUSY
        skipped = self.skips(prompt_tokens) or route.prefill_skipped == FEW_UNCACHED
        if route.prefill_worker_id or skipped or not intended_for_pair or self.mode == "off":
            return route
        if self.mode == "require":
            raise _required(chosen.model if chosen else "")
        return replace(route, split_skipped=PREFILL_BUSY if route.prefill_skipped == PAIR_BUSY else NO_PREFILL)


def _required(model: str) -> SluiceError:
    return unavailable(
        f"Model {model!r} has no available pair of a prefill and a decode worker, which --disaggregation require "
        "needs: start both, or set --disaggregation auto.",
        code="no_prefill_workers",
    )


def _none_runs_alone(model: str) -> SluiceError:
    return unavailable(
        f"No worker of model {model!r} can run this request alone: start aggregated workers, or decode workers whose "
        "engine computes prompts.",
        code="no_workers",
    )
