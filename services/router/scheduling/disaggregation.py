"""Who may play which part for a request: one worker alone, or one for the prompt and another for the output."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.common.errors import ErrorKind, SluiceError, overloaded, unavailable
from services.router.kv_index.index import NO_OVERLAP, Overlap
from services.router.scheduling.prompts import Blocks
from services.router.workers.registry import Registry
from services.router.workers.worker import Role, Worker, WorkerRank

LOCAL_PREFILL = "local_prefill"  # capability of decode workers that can compute prompts themselves
FEW_UNCACHED = "few_uncached_tokens"


@dataclass(frozen=True, slots=True)
class DisaggRules:
    """What happens while decode workers have no prefill worker, and who skips the prefill workers.

    `wait_for_prefill`: requests wait for the first prefill worker, at most `prefill_wait_s` after the first of them
    found none. `enforce`: what is meant for a pair is never served by one worker. `bypass_uncached_tokens`: prompts of
    which no more than this is left to compute skip the prefill workers; 0 for none.
    """

    wait_for_prefill: bool = False
    enforce: bool = False
    prefill_wait_s: float = 30.0
    bypass_uncached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Cast:
    """Who may run a request: a pair of `prefill` and `decode` if there are both, else one of `whole`.

    `skipped`: why there is no pair although there are prefill workers.
    """

    whole: list[Worker] = field(default_factory=list)
    prefill: list[Worker] = field(default_factory=list)
    decode: list[Worker] = field(default_factory=list)
    skipped: str = ""


class Casting:
    """Applies the rules.

    Args:
        most_waiting: requests that wait for a prefill worker at once, of all models.
    """

    def __init__(self, registry: Registry, rules: DisaggRules, most_waiting: int) -> None:
        self._registry = registry
        self._rules = rules
        self._most_waiting = most_waiting
        self._waiting = 0
        self._missing_since: dict[str, float] = {}

    async def wait_for_prefill(self, model: str) -> None:
        """Waits, if the rules say so, while decode workers have no prefill worker.

        The time runs once for all requests, so a model whose prefill workers stay away does not slow each of them.

        Raises:
            SluiceError: OVERLOADED when too many wait already.
        """
        if not self._rules.wait_for_prefill or not self._lacks_prefill(model):
            self._missing_since.pop(model, None)
            return
        until = self._missing_since.setdefault(model, time.monotonic()) + self._rules.prefill_wait_s
        if self._waiting >= self._most_waiting:
            raise overloaded(f"{self._waiting} requests wait for a prefill worker already.")
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

    def cast(
        self,
        workers: Sequence[Worker],
        allowed: frozenset[str] | None,
        blocks: Blocks,
        overlaps: Mapping[WorkerRank, Overlap],
    ) -> Cast:
        """Who may run a prompt.

        Args:
            workers: of the model that take requests.
            allowed: ids the caller restricts them to; None for any. Workers that only play a part are taken alone if
                the caller names no others.

        Raises:
            SluiceError: FAILED_PRECONDITION no_candidates, UNAVAILABLE no_workers or no_prefill_workers.
        """
        able = _allowed(workers, allowed)
        prefill = [worker for worker in able if worker.role is Role.PREFILL]
        decode = [worker for worker in able if worker.role is Role.DECODE]
        whole = [worker for worker in able if _runs_alone(worker)]
        if prefill and decode:
            near = [worker for worker in whole if self._skips(worker, blocks, overlaps)]
            if near:
                return Cast(near, skipped=FEW_UNCACHED)
            return Cast([] if self._rules.enforce else whole, prefill, decode)
        if decode and allowed is None and self._rules.wait_for_prefill and self._rules.enforce:
            raise _no_prefill(decode[0].model)
        if whole or allowed is None:
            if not whole:
                raise _no_prefill(able[0].model) if decode else _nobody(able)
            return Cast(whole)
        return Cast(able)

    def _skips(self, worker: Worker, blocks: Blocks, overlaps: Mapping[WorkerRank, Overlap]) -> bool:
        held = max(overlaps.get(slot, NO_OVERLAP).device for slot in worker.slots)
        return 0 < blocks.tokens - held * blocks.size <= self._rules.bypass_uncached_tokens

    def _lacks_prefill(self, model: str) -> bool:
        roles = {worker.role for worker in self._registry.workers(model) if not worker.draining}
        return Role.DECODE in roles and Role.PREFILL not in roles


def _runs_alone(worker: Worker) -> bool:
    return worker.role is Role.AGGREGATED or (worker.role is Role.DECODE and LOCAL_PREFILL in worker.capabilities)


def _allowed(workers: Sequence[Worker], allowed: frozenset[str] | None) -> list[Worker]:
    if allowed is None:
        return list(workers)
    if not allowed:
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION,
            "The candidate set is empty, so no worker is allowed.",
            param="candidates",
            code="no_candidates",
        )
    able = [worker for worker in workers if worker.worker_id in allowed]
    if not able:
        raise unavailable(
            f"None of the {len(allowed)} candidates serves model {workers[0].model!r} now.", code="no_workers"
        )
    return able


def _no_prefill(model: str) -> SluiceError:
    return unavailable(
        f"Model {model!r} has decode workers and no prefill worker for them now.", code="no_prefill_workers"
    )


def _nobody(workers: Sequence[Worker]) -> SluiceError:
    return unavailable(
        f"Model {workers[0].model!r} has prefill workers only, and none that answers.", code="no_workers"
    )
