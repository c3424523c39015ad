"""Disaggregation: decides whether a request runs on one worker or on a prefill/decode pair."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.common.errors import ErrorKind, SluiceError, overloaded, unavailable
from services.router.kv_index.index import NO_OVERLAP, Overlap
from services.router.scheduling.prompts import Blocks
from services.router.workers.registry import Registry
from services.router.workers.worker import Role, Worker, WorkerRank

LOCAL_PREFILL = "local_prefill"  # capability of decode workers that can prefill
FEW_UNCACHED = "few_uncached_tokens"


@dataclass(frozen=True, slots=True)
class DisaggRules:
    """Rules for requests without available prefill workers, and for prompts that bypass them.

    Attributes:
        wait_for_prefill: requests wait for the first prefill worker.
        enforce: never run a request on one worker if decode workers need a prefill worker.
        prefill_wait_s: longest wait, counted from the first request that found no prefill worker.
        bypass_uncached_tokens: prompts with at most this many uncached tokens bypass prefill workers; 0: none.
    """

    wait_for_prefill: bool = False
    enforce: bool = False
    prefill_wait_s: float = 30.0
    bypass_uncached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EligibleWorkers:
    """Workers eligible for a request: a pair from `prefill` and `decode` if both are set, else one of `standalone`.

    `skipped` is the reason for not using available prefill workers.
    """

    standalone: Sequence[Worker] = ()
    prefill: Sequence[Worker] = ()
    decode: Sequence[Worker] = ()
    skipped: str = ""


class DisaggPlanner:
    """Applies the disaggregation rules.

    Args:
        most_waiting: maximum number of requests of all models that wait for a prefill worker.
    """

    def __init__(self, registry: Registry, rules: DisaggRules, most_waiting: int) -> None:
        self._registry = registry
        self._rules = rules
        self._most_waiting = most_waiting
        self._waiting = 0
        self._missing_since: dict[str, float] = {}

    async def wait_for_prefill(self, model: str) -> None:
        """Waits while decode workers have no prefill worker, if the rules require it.

        The deadline is shared by all requests, so a model without prefill workers does not delay each of them.

        Raises:
            SluiceError: OVERLOADED if too many requests wait.
        """
        if not self._rules.wait_for_prefill or not self._lacks_prefill(model):
            self._missing_since.pop(model, None)
            return
        until = self._missing_since.setdefault(model, time.monotonic()) + self._rules.prefill_wait_s
        if self._waiting >= self._most_waiting:
            raise overloaded(f"{self._waiting} requests already wait for a prefill worker; retry later.")
        watch = self._registry.watch(model)
        self._waiting += 1
        try:
            while (left := until - time.monotonic()) > 0 and self._lacks_prefill(model) and not watch.ended:
                await asyncio.wait_for(watch.next(), left)
        except TimeoutError:
            return
        finally:
            self._waiting -= 1
            self._registry.unwatch(watch)

    def plan(
        self,
        workers: Sequence[Worker],
        allowed: frozenset[str] | None,
        blocks: Blocks,
        overlaps: Mapping[WorkerRank, Overlap],
    ) -> EligibleWorkers:
        """Returns the workers eligible for a prompt.

        Args:
            workers: the model's workers that accept requests.
            allowed: worker ids to which the caller restricts the choice; None: any. Prefill or decode workers run a
                request alone only if the caller allows no others.

        Raises:
            SluiceError: FAILED_PRECONDITION (`no_candidates`), UNAVAILABLE (`no_workers`, `no_prefill_workers`).
        """
        eligible = workers if allowed is None else _allowed(workers, allowed)
        if {worker.role for worker in eligible} == {Role.AGGREGATED}:
            return EligibleWorkers(eligible)
        prefill = [worker for worker in eligible if worker.role is Role.PREFILL]
        decode = [worker for worker in eligible if worker.role is Role.DECODE]
        standalone = [worker for worker in eligible if _runs_alone(worker)]
        if prefill and decode:
            bypassing = [worker for worker in standalone if self._bypasses(worker, blocks, overlaps)]
            if bypassing:
                return EligibleWorkers(bypassing, skipped=FEW_UNCACHED)
            return EligibleWorkers([] if self._rules.enforce else standalone, prefill, decode)
        if decode and allowed is None and self._rules.wait_for_prefill and self._rules.enforce:
            raise _no_prefill(decode[0].model)
        if standalone or allowed is None:
            if not standalone:
                raise _no_prefill(eligible[0].model) if decode else _prefill_only(eligible)
            return EligibleWorkers(standalone)
        return EligibleWorkers(eligible)

    def _bypasses(self, worker: Worker, blocks: Blocks, overlaps: Mapping[WorkerRank, Overlap]) -> bool:
        held = max(overlaps.get(slot, NO_OVERLAP).device for slot in worker.slots)
        return 0 < blocks.tokens - held * blocks.size <= self._rules.bypass_uncached_tokens

    def _lacks_prefill(self, model: str) -> bool:
        roles = {worker.role for worker in self._registry.serving(model)}
        return Role.DECODE in roles and Role.PREFILL not in roles


def _runs_alone(worker: Worker) -> bool:
    return worker.role is Role.AGGREGATED or (worker.role is Role.DECODE and LOCAL_PREFILL in worker.capabilities)


def _allowed(workers: Sequence[Worker], allowed: frozenset[str]) -> list[Worker]:
    if not allowed:
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION,
            "The candidate set is empty; send at least one worker id, or omit candidates.",
            param="candidates",
            code="no_candidates",
        )
    eligible = [worker for worker in workers if worker.worker_id in allowed]
    if not eligible:
        raise unavailable(
            f"None of the {len(allowed)} candidates serves model {workers[0].model!r} at the moment.", code="no_workers"
        )
    return eligible


def _no_prefill(model: str) -> SluiceError:
    return unavailable(
        f"Model {model!r} has decode workers but no prefill worker at the moment; retry later.",
        code="no_prefill_workers",
    )


def _prefill_only(workers: Sequence[Worker]) -> SluiceError:
    return unavailable(
        f"Model {workers[0].model!r} has only prefill workers at the moment; start a decode worker.", code="no_workers"
    )
