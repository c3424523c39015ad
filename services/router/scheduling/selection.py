"""Chooses a rank for one part of a request, and reserves the load of that part."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from operator import lt
from random import Random
from typing import Any

from services.common.base.errors import unavailable
from services.router.scheduling.composed import POLICY_FAILED, ComposedRanker
from services.router.scheduling.policies.built_in import BuiltInPolicy
from services.router.scheduling.policies.composition import Composition
from services.router.scheduling.policies.offers import cache_aware, load_only, shortlist
from services.router.scheduling.policies.registry import ComposedPolicies, PolicyRegistry
from services.router.scheduling.preselect import MOST, LoadSnapshot, distinct_overlaps, preselect
from services.router.scheduling.prompts import NOMINAL_BLOCK
from services.router.scheduling.queries import Query, Score
from services.router.scheduling.requests import Part, SchedulingRequest, of_part, part_of
from services.router.state.kv_index.index import NO_OVERLAP, Overlap
from services.router.state.reservations.cost import MILLI, NO_LOAD, Limits, Load, Offer
from services.router.state.reservations.ids import prefill_id
from services.router.state.reservations.table import (
    NO_DEADLINE,
    AllBusy,
    Owner,
    QueueOrder,
    ReservationParams,
    ReservedRank,
)
from services.router.state.sync.load_reconciler import Reported
from services.router.state.sync.replica import Replica
from services.router.state.workers.worker import Role, Worker, WorkerRank

IDLE = Reported()
CLOSED = Limits(0, 0, 0)  # every load reaches these limits, so the rank accepts no requests
ATTEMPTS = 3  # the chosen worker may have been removed since, as may the one of a reservation of the request's
_NO_SLOT = WorkerRank("", 0)


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen rank.

    Attributes:
        best_blocks: the largest overlap of any candidate.
        degraded: why less was known than usual, or the local table was used; empty: neither.
        offers: among which it was chosen, without those that a composed policy filtered out.
        scores: of the offers, if a composed policy ordered them.
    """

    worker: Worker
    choice: ReservedRank
    overlap: Overlap
    best_blocks: int
    degraded: str
    offers: list[Offer]
    scores: Mapping[WorkerRank, float] | None = None

    @property
    def slot(self) -> WorkerRank:
        return self.choice.slot

    def by_preference(self, loads: Mapping[WorkerRank, Load], scale: float) -> list[Offer]:
        """Returns the offers, most preferred first."""
        return sorted(self.offers, key=lambda offer: (offer.group, offer.cost(loads.get(offer.slot, NO_LOAD), scale)))


@dataclass(frozen=True, slots=True)
class SelectorConfig:
    """Defaults of queries, and when ranks are busy."""

    policy: str
    ttl_ms: int
    owner_lease_ms: int
    thresholds: Thresholds


class Selector:
    """Chooses ranks among workers and reserves load on them."""

    def __init__(self, replica: Replica, config: SelectorConfig, random: Random, composed: ComposedPolicies) -> None:
        self._store = replica.store
        self._reservations = replica.reservations
        self._registry = replica.registry
        self._reports = replica.reports
        self._config = config
        self._thresholds = config.thresholds if config.thresholds else None
        self._random = random
        self._policies = PolicyRegistry(random, [*composed.file.compositions])
        self._composed = composed
        self._ranker = ComposedRanker(composed, replica.metrics)
        self._load_snapshots: dict[str, LoadSnapshot] = {}
        self._slots: tuple[Sequence[Worker], list[WorkerRank]] = ((), [])

    def policy_of(self, query: Query) -> str:
        """Returns the name of the policy that applies to a query."""
        return query.policy or self._composed.file.policy_of(query.model) or self._config.policy

    def select(
        self, request: SchedulingRequest, part: Part, workers: Sequence[Worker]
    ) -> Coroutine[Any, Any, Selection]:
        """Chooses among the ranks of at least one worker.

        Raises:
            AllBusy: all ranks are over the busy thresholds.
            SluiceError: INVALID_ARGUMENT for an unknown policy, UNAVAILABLE if the chosen worker was removed.
        """
        name = request.policy
        if (composition := self._composed.find(name)) is None:
            return self._select_built_in(name, request, part, workers)
        if not request.place:  # finds the request's reservation, if any, whatever the order
            return self._select_built_in("kv", request, part, workers)
        return self._select_composed_or_built_in(composition, request, part, workers)

    async def _select_composed_or_built_in(
        self, composition: Composition, request: SchedulingRequest, part: Part, workers: Sequence[Worker]
    ) -> Selection:
        if (selection := await self._select_composed(composition, request, part, workers)) is not None:
            return selection
        selection = await self._select_built_in("kv", request, part, workers)
        return replace(selection, degraded=selection.degraded or POLICY_FAILED)

    async def _select_composed(
        self, composition: Composition, request: SchedulingRequest, part: Part, workers: Sequence[Worker]
    ) -> Selection | None:
        """Chooses by a composed policy; returns None if that failed and is to be ignored."""
        request = replace(request, query=replace(request.query, cost=replace(request.query.cost, temperature=0.0)))
        slots, limits, snapshot = self._slots_of(workers), self._limits(request, workers), self._load_snapshot(request)
        offers = request.offers(slots, cache_aware if composition.cost == "kv" else load_only, part)
        ranked = await self._ranker.rank(composition, request, part.label, workers, offers, snapshot)
        if ranked is None:
            return None

        def rounds() -> Iterator[list[Offer]]:
            """Yields offers in turn: those in groups, then, if these are busy, the others."""
            some = self._shortlist(
                request, [each for each in _limited(ranked.offers, limits) if each.group < ranked.groups]
            )
            yield some
            if limits:
                yield from self._others(request, ranked.offers, {offer.slot for offer in some}, limits)

        overlaps = distinct_overlaps(slots, request.overlaps)
        return await self._reserve(request, part, rounds, ranked.offers, overlaps, snapshot, ranked.scores)

    async def _select_built_in(
        self, name: str, request: SchedulingRequest, part: Part, workers: Sequence[Worker]
    ) -> Selection:
        slots = self._slots_of(workers)
        policy = self._policies.get(name, request.query.model, part.label)
        limits = self._limits(request, workers)
        overlaps = distinct_overlaps(slots, request.overlaps)
        offered, snapshot = policy.offered(slots), None
        if len(offered) > MOST and not request.query.explain and not request.query.cost.temperature:
            snapshot = self._load_snapshot(request)
            offered = self._preselect(request, part, policy, slots, overlaps, limits, snapshot)
        offers = request.offers(offered, policy.make_offer, part)

        def rounds() -> Iterator[list[Offer]]:
            """Yields offers in turn: the session's rank, those of the policy, then, if these are busy, all others."""
            if request.pinned is not None and request.pinned in slots and part is not Part.PREFILL:
                yield _limited(request.offers([request.pinned], load_only, part), limits)
            some = self._shortlist(request, _limited(offers, limits))
            yield some
            if limits and request.place:
                rest = request.offers(slots, load_only, part)
                yield from self._others(request, rest, {offer.slot for offer in some}, limits)

        return await self._reserve(request, part, rounds, offers, overlaps, snapshot)

    async def _reserve(
        self,
        request: SchedulingRequest,
        part: Part,
        rounds: Callable[[], Iterator[list[Offer]]],
        offers: list[Offer],
        overlaps: set[Overlap],
        snapshot: LoadSnapshot | None,
        scores: Mapping[WorkerRank, float] | None = None,
    ) -> Selection:
        """Reserves one of the offers of the first round that has one below its limits.

        Args:
            offers: of which the selection is one.
            overlaps: of all candidates.
            snapshot: to which a new reservation is added.
        """
        params, removed = self._params(request, part), set[str]()
        for _ in range(ATTEMPTS):
            if removed and all(offer.slot.worker_id in removed for offer in offers):
                break
            left = _without(removed, rounds()) if removed else rounds()
            choice, degraded = await self._book(request, left, params)
            worker = self._registry.get(request.query.model, choice.slot.worker_id)
            if worker is not None:
                if snapshot is not None and choice.expires_unix_ms and not choice.repeated:
                    snapshot.add(offer for offer in offers if offer.slot == choice.slot)
                overlap = request.overlaps.get(choice.slot, NO_OVERLAP)
                best = 0
                for each in overlaps:
                    best = max(best, each.device + each.host + each.disk)
                return Selection(worker, choice, overlap, best, degraded, offers, scores)
            removed.add(choice.slot.worker_id)
            await self._reservations.free(request.query.model, [_request_id(request, part)])
        raise unavailable(f"The worker chosen for model {request.query.model!r} was removed; retry.", code="no_workers")

    async def place(self, request: SchedulingRequest, slot: WorkerRank, role: Role) -> ReservedRank:
        """Reserves load on a rank chosen by the caller, busy or not, for the part that its role runs."""
        part = part_of(role)
        offers = request.offers([slot], cache_aware, part)
        params = replace(self._params(request, part), request_id=request.query.request_id)
        choice, _ = await self._reservations.select(request.query.model, offers, params, request.view.loads)
        return choice

    async def give_back(self, request: SchedulingRequest, part: Part, selection: Selection) -> None:
        """Undoes a selection, unless its reservation existed before."""
        if request.query.request_id and not selection.choice.repeated:
            await self._reservations.free(request.query.model, [_request_id(request, part)])

    def scores(
        self, request: SchedulingRequest, selection: Selection, booked: Mapping[WorkerRank, Load]
    ) -> list[Score]:
        """Returns the scores of a selection's candidates, most preferred first, at the loads before its reservation."""
        found, scale = [], request.query.cost.prefill_load_scale
        for offer in selection.by_preference(booked, scale):
            load = booked.get(offer.slot, NO_LOAD)
            score = selection.scores[offer.slot] if selection.scores else None
            overlap = request.overlaps.get(offer.slot, NO_OVERLAP)
            found.append(Score(offer.slot, offer.cost(load, scale), overlap, load, score))
        return found

    def fallbacks(self, request: SchedulingRequest, selection: Selection) -> list[Worker]:
        """Returns the workers of the next offers by preference and the loads last read; at most as many as queried."""
        if len(selection.offers) < 2:
            return []
        found: dict[str, Worker] = {selection.worker.worker_id: selection.worker}
        for offer in selection.by_preference(request.view.loads, request.query.cost.prefill_load_scale):
            if len(found) > request.query.fallbacks:
                break
            worker = self._registry.get(request.query.model, offer.slot.worker_id)
            if worker is not None and worker.accepts:
                found.setdefault(worker.worker_id, worker)
        return list(found.values())[1:]

    async def _book(
        self, request: SchedulingRequest, rounds: Iterator[list[Offer]], params: ReservationParams
    ) -> tuple[ReservedRank, str]:
        for some in rounds:
            try:
                return await self._reservations.select(request.query.model, some, params, request.view.loads)
            except AllBusy:
                continue
        raise AllBusy

    def _others(
        self,
        request: SchedulingRequest,
        offers: list[Offer],
        tried: set[WorkerRank],
        limits: Mapping[WorkerRank, Limits],
    ) -> Iterator[list[Offer]]:
        """Yields the offers not tried yet of ranks that were not busy when their loads were last read."""
        loads = request.view.loads
        rest = [offer for offer in _limited(offers, limits) if not offer.busy(loads.get(offer.slot, NO_LOAD))]
        while rest := [offer for offer in rest if offer.slot not in tried]:
            some = self._shortlist(request, rest)
            tried |= {offer.slot for offer in some}
            yield some

    def _slots_of(self, workers: Sequence[Worker]) -> list[WorkerRank]:
        """Returns the ranks of workers; the same list for the same sequence, as in most queries in a row."""
        if workers is not self._slots[0]:
            self._slots = workers, [slot for worker in workers for slot in worker.slots]
        return self._slots[1]

    def _load_snapshot(self, request: SchedulingRequest) -> LoadSnapshot:
        return self._load_snapshots.setdefault(request.query.model, LoadSnapshot())

    def _preselect(
        self,
        request: SchedulingRequest,
        part: Part,
        policy: BuiltInPolicy,
        slots: Sequence[WorkerRank],
        overlaps: set[Overlap],
        limits: Mapping[WorkerRank, Limits],
        snapshot: LoadSnapshot,
    ) -> list[WorkerRank]:
        """Returns the ranks to consider as candidates."""
        cost, loads = request.query.cost, request.view.loads
        if limits:
            below = [
                slot for slot in slots if slot not in limits or all(map(lt, loads.get(slot, NO_LOAD), limits[slot]))
            ]
            slots = below or slots
        offers = [policy.make_offer(_NO_SLOT, overlap, 0, request.demand, cost) for overlap in overlaps]
        samples = dict(zip(overlaps, of_part(offers, part), strict=True))
        return preselect(
            slots, request.overlaps, samples, snapshot.booked(loads), cost.prefill_load_scale, self._random
        )

    def _shortlist(self, request: SchedulingRequest, offers: list[Offer]) -> list[Offer]:
        most = self._store.shortlist
        if most is None:
            return offers
        return shortlist(offers, request.view.loads, request.query.cost.prefill_load_scale, most, self._random)

    def _limits(self, request: SchedulingRequest, workers: Sequence[Worker]) -> dict[WorkerRank, Limits]:
        """Returns the limits of the ranks that have limits."""
        if not request.place:
            return {slot: CLOSED for worker in workers for slot in worker.slots}
        thresholds = self._thresholds
        if thresholds is None:
            return {}
        reported = self._reports.by_rank(request.view) if thresholds.kv_share else {}
        return {
            slot: thresholds.limits(worker, reported.get(slot, IDLE).used_blocks)
            for worker in workers
            for slot in worker.slots
        }

    def _params(self, request: SchedulingRequest, part: Part) -> ReservationParams:
        query = request.query
        return ReservationParams(
            request_id=_request_id(request, part),
            ttl_ms=query.ttl_ms or self._config.ttl_ms,
            prefill_load_scale=query.cost.prefill_load_scale,
            temperature=query.cost.temperature,
            allowed=query.candidates,
            output=0 if part is Part.PREFILL else request.demand.output_blocks * MILLI,
            owner=Owner(query.owner, self._config.owner_lease_ms) if query.owner else None,
            order=QueueOrder(query.priority, query.deadline_unix_ms or NO_DEADLINE, request.waited_ms),
        )


def _request_id(request: SchedulingRequest, part: Part) -> str:
    request_id, pair = request.query.request_id, request.query.role is None
    return prefill_id(request_id) if request_id and pair and part is Part.PREFILL else request_id


def _limited(offers: list[Offer], limits: Mapping[WorkerRank, Limits]) -> list[Offer]:
    return [offer._replace(limits=limits.get(offer.slot)) for offer in offers] if limits else offers


def _without(removed: Set[str], rounds: Iterator[list[Offer]]) -> Iterator[list[Offer]]:
    for some in rounds:
        if left := [offer for offer in some if offer.slot.worker_id not in removed]:
            yield left


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Busy thresholds of a rank; a rank that reaches any of them is busy. 0 disables a threshold.

    Attributes:
        kv_share: share of its KV blocks, reserved or in use as last reported.
        prefill_tokens: prompt tokens reserved and not computed yet.
        requests: requests reserved.
    """

    kv_share: float = 0.0
    prefill_tokens: int = 0
    requests: int = 0

    def __bool__(self) -> bool:
        return bool(self.kv_share or self.prefill_tokens or self.requests)

    def limits(self, worker: Worker, used_blocks: int) -> Limits:
        """Returns the reserved loads at which a rank accepts no more requests."""
        most_blocks = self.kv_share * worker.total_blocks or math.inf
        if used_blocks >= most_blocks:
            return CLOSED
        block = worker.block_size or NOMINAL_BLOCK
        return Limits(self.prefill_tokens / block or math.inf, most_blocks, self.requests or math.inf)
