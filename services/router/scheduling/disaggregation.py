"""Disaggregation: decides whether a request runs on one worker or on a prefill/decode pair."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.common.base.errors import ErrorKind, SluiceError, overloaded, unavailable
from services.common.discovery.handoff_forms import can_hand_over
from services.router.scheduling.prompts import Blocks
from services.router.scheduling.queries import Query
from services.router.state.kv_index.index import NO_OVERLAP, Overlap
from services.router.state.workers.registry import Registry
from services.router.state.workers.worker import Role, Worker, WorkerRank

LOCAL_PREFILL = "local_prefill"  # capability of decode workers that can prefill
FEW_UNCACHED = "few_uncached_tokens"
NO_PARTNER = "no_partner"
"""Why prefill workers are skipped of which none runs the engine of a decode worker, in its version."""


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

    Each of `prefill` and `decode` has a partner among the others. `skipped` is the reason for not using available
    prefill workers.
    """

    standalone: Sequence[Worker] = ()
    prefill: Sequence[Worker] = ()
    decode: Sequence[Worker] = ()
    skipped: str = ""

    def partners(self, decode: Worker) -> Sequence[Worker]:
        """Returns the prefill workers that can hand over to a decode worker."""
        return [worker for worker in self.prefill if can_hand_over(worker.handoff_form, decode.handoff_form)]


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
                async with asyncio.timeout(left):
                    await watch.next()
        except TimeoutError:
            return
        finally:
            self._waiting -= 1
            self._registry.unwatch(watch)

    def may_bypass(self, query: Query) -> bool:
        """Returns whether a prompt is short enough to bypass prefill workers whatever is cached."""
        return query.prompt.prompt_tokens <= self._bypass_limit(query)

    def plan(
        self, query: Query, workers: Sequence[Worker], blocks: Blocks, overlaps: Mapping[WorkerRank, Overlap]
    ) -> EligibleWorkers:
        """Returns the workers eligible for a query; the one place where it is decided whether they are a pair.

        A role in the query, or that it requires a pair, precedes the rules. Prefill or decode workers run a request
        alone only if the query's candidates are no others.

        Args:
            workers: the model's workers that accept requests.

        Raises:
            SluiceError: FAILED_PRECONDITION (`no_candidates`), UNAVAILABLE (`no_workers`, `no_prefill_workers`,
                `none_runs_alone`).
        """
        allowed, rules = query.candidates, self._rules
        eligible = workers if allowed is None else _allowed(workers, allowed)
        if query.role is not None:
            return EligibleWorkers(_of_role(eligible, query.role))
        if not query.require_pair and {worker.role for worker in eligible} == {Role.AGGREGATED}:
            return EligibleWorkers(eligible)
        prefill = [worker for worker in eligible if worker.role is Role.PREFILL]
        decode = [worker for worker in eligible if worker.role is Role.DECODE]
        standalone = [worker for worker in eligible if _runs_alone(worker)]
        both = bool(prefill and decode)
        prefill, decode = _paired(prefill, decode)
        if both and not prefill and not query.require_pair:
            if rules.enforce or not standalone:
                raise _no_partner(eligible[0].model)
            return EligibleWorkers(standalone, skipped=NO_PARTNER)
        if query.require_pair or (prefill and decode):
            limit = self._bypass_limit(query)
            bypassing = [worker for worker in standalone if limit and _left(worker, blocks, overlaps) <= limit]
            if bypassing and blocks.tokens:
                return EligibleWorkers(bypassing, skipped=FEW_UNCACHED)
            if both and not prefill:
                raise _no_partner(eligible[0].model)
            if not (prefill and decode):
                raise unavailable(
                    f"Model {eligible[0].model!r} has no available pair of a prefill and a decode worker, which this "
                    "request requires (require_pair, or --disaggregation require of its gateway): start both, or do "
                    "not require one.",
                    code="no_prefill_workers",
                )
            return EligibleWorkers([] if rules.enforce or query.require_pair else standalone, prefill, decode)
        if decode and rules.wait_for_prefill and rules.enforce:
            raise _no_prefill(decode[0].model)
        if standalone or allowed is None:
            if not standalone and decode:
                raise _no_prefill(decode[0].model)
            if not standalone:
                raise unavailable(
                    f"Model {eligible[0].model!r} has only prefill workers at the moment; start a decode worker.",
                    code="no_workers",
                )
            return EligibleWorkers(standalone)
        return EligibleWorkers(eligible)

    def _bypass_limit(self, query: Query) -> int:
        return query.bypass_uncached_tokens or self._rules.bypass_uncached_tokens

    def _lacks_prefill(self, model: str) -> bool:
        roles = {worker.role for worker in self._registry.serving(model)}
        return Role.DECODE in roles and Role.PREFILL not in roles


def _of_role(workers: Sequence[Worker], role: Role) -> list[Worker]:
    """Returns the workers for one half of a request, or those that run it alone."""
    if role is Role.AGGREGATED:
        standalone = [worker for worker in workers if _runs_alone(worker)]
        if not standalone:
            raise unavailable(
                f"Model {workers[0].model!r} has no worker that can run this request alone at the moment: start "
                "aggregated workers, or decode workers whose engine computes prompts.",
                code="none_runs_alone",
            )
        return standalone
    found = [worker for worker in workers if worker.role is role]
    if not found:
        name = role.name.lower()
        raise unavailable(
            f"Model {workers[0].model!r} has no {name} worker at the moment; start one, or leave role out.",
            code="no_prefill_workers" if role is Role.PREFILL else "no_workers",
        )
    return found


def _left(worker: Worker, blocks: Blocks, overlaps: Mapping[WorkerRank, Overlap]) -> int:
    """Returns the tokens of a prompt that a worker has not cached."""
    return blocks.tokens - blocks.size * max(overlaps.get(slot, NO_OVERLAP).device for slot in worker.slots)


def _paired(prefill: list[Worker], decode: list[Worker]) -> tuple[list[Worker], list[Worker]]:
    """Returns the workers of each half that have a partner in the other one."""
    forms = [{worker.handoff_form for worker in half} for half in (prefill, decode)]
    if len(forms[0] | forms[1]) < 2:
        return prefill, decode
    return (
        [worker for worker in prefill if any(can_hand_over(worker.handoff_form, form) for form in forms[1])],
        [worker for worker in decode if any(can_hand_over(worker.handoff_form, form) for form in forms[0])],
    )


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


def _no_partner(model: str) -> SluiceError:
    return unavailable(
        f"No prefill worker of model {model!r} runs the engine of a decode worker, in its version, so none can hand "
        "over to it: start a prefill worker of the decode workers' version.",
        code="no_prefill_workers",
    )
