"""Which requests run on a pair of a prefill and a decode worker: what a router is asked for, and what its answer is.

The router decides, by its settings where the mode is `auto`; what it answers is only checked here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from services.common.base.errors import unavailable
from services.gateway.backends.workers.registry import WorkerEntry
from services.gateway.core.request import Role, Route

NO_PREFILL = "no_prefill_worker"
PREFILL_BUSY = "prefill_busy"

FEW_UNCACHED = "few_uncached_tokens"
PAIR_BUSY = "pair_busy"


@dataclass(frozen=True, slots=True)
class DisaggregationPolicy:
    """Which requests run on a pair of workers.

    Attributes:
        mode: auto: as the router decides; if there is no pair, or it fails, a capable worker runs them alone. require:
            never on one worker. off: never on a pair.
        min_tokens: prompts with fewer tokens run on one worker where possible; 0 for no minimum.
    """

    mode: Literal["auto", "require", "off"] = "auto"
    min_tokens: int = 0

    def skips(self, prompt_tokens: int) -> bool:
        """Returns whether a prompt is too short for a pair."""
        return prompt_tokens < self.min_tokens

    def apply(self, route: Route, chosen: WorkerEntry | None, prompt_tokens: int) -> Route:
        """Returns a router's route, marked if one worker runs what was intended for a pair.

        Raises:
            SluiceError: UNAVAILABLE if mode is require and the route is not a pair.
        """
        skipped = self.skips(prompt_tokens) or route.prefill_skipped == FEW_UNCACHED
        if route.prefill_worker_id or skipped or self.mode == "off":
            return route
        if self.mode == "require":
            raise unavailable(
                f"Model {chosen.model if chosen else ''!r} has no available pair of a prefill and a decode worker, "
                "which --disaggregation require needs: start both, or set --disaggregation auto.",
                code="no_prefill_workers",
            )
        if route.prefill_skipped == PAIR_BUSY:
            return replace(route, split_skipped=PREFILL_BUSY)
        intended_for_pair = chosen is not None and chosen.role is Role.DECODE
        return replace(route, split_skipped=NO_PREFILL) if intended_for_pair else route


AUTO = DisaggregationPolicy()
