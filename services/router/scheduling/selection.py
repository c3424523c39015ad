"""Chooses one rank among workers for one part of a request, and books that part on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from operator import lt
from random import Random

from services.common.errors import unavailable
from services.router.kv_index.index import NO_OVERLAP, Overlap
from services.router.reservations.cost import MILLI, NO_LOAD, Limits, Load, Offer
from services.router.reservations.ids import prefill_id
from services.router.reservations.table import AllBusy, Choice, Owner, ReservationParams
from services.router.scheduling.policies import Candidate, Demand, Policy, Shelf, direct, least_loaded, shortlist
from services.router.scheduling.preselect import EACH_BY_ITSELF, MOST, LoadSnapshot, nearest, occurring
from services.router.scheduling.prompts import Blocks
from services.router.scheduling.queries import Query, Score
from services.router.scheduling.thresholds import CLOSED, Thresholds
from services.router.store.base import Store
from services.router.sync.load_reports import Reports
from services.router.sync.model_state import ModelState
from services.router.sync.reservation_manager import ReservationManager
from services.router.workers.registry import Registry
from services.router.workers.worker import Role, Worker, WorkerRank

ATTEMPTS = 2  # a request may be booked already, on a worker that has gone since


class Part(Enum):
    """What the chosen worker will do for the request."""

    WHOLE = "whole"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class SchedulingRequest:
    """A query and what the index says about its prompt.

    `place` False: only if it is booked already. `pinned`: where its session's last request went.
    """

    query: Query
    view: ModelState
    blocks: Blocks
    overlaps: Mapping[WorkerRank, Overlap]
    place: bool = True
    pinned: WorkerRank | None = None

    @property
    def demand(self) -> Demand:
        """Blocks it needs."""
        return Demand(self.blocks.count, -(-self.query.expected_output_tokens // self.blocks.size))


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen rank; `best_blocks` is the largest overlap any candidate had."""

    worker: Worker
    choice: Choice
    overlap: Overlap
    best_blocks: int
    degraded: str
    offers: list[Offer]

    @property
    def slot(self) -> WorkerRank:
        """The rank."""
        return self.choice.slot


@dataclass(frozen=True, slots=True)
class SelectorConfig:
    """Defaults of queries, and when ranks are busy."""

    policy: str
    ttl_ms: int
    owner_lease_ms: int
    thresholds: Thresholds


class Selector:
    """See the module."""

    def __init__(
        self,
        store: Store,
        bookkeeper: ReservationManager,
        registry: Registry,
        reports: Reports,
        config: SelectorConfig,
        random: Random,
    ) -> None:
        self._store = store
        self._bookkeeper = bookkeeper
        self._registry = registry
        self._reports = reports
        self._config = config
        self._random = random
        self._policies = Shelf(random)
        self._standings: dict[str, LoadSnapshot] = {}

    async def pick(self, ask: SchedulingRequest, part: Part, workers: Sequence[Worker]) -> Selection:
        """Chooses among the ranks of at least one worker.

        Raises:
            AllBusy: all of them are over the thresholds.
            SluiceError: INVALID_ARGUMENT for an unknown policy.
        """
        slots = [slot for worker in workers for slot in worker.slots]
        name = ask.query.policy or self._config.policy
        policy = self._policies.get(name, ask.query.model, part.value)
        limits = self._limits(ask, workers)
        overlaps = occurring(slots, ask.overlaps)
        some = slots
        if name in EACH_BY_ITSELF and len(slots) > MOST and not ask.query.explain and not ask.query.cost.temperature:
            some = self._nearest(ask, part, policy, slots, overlaps, limits)
        offers = _of_part(policy(_candidates(ask, some), ask.demand, ask.query.cost), part)
        for _ in range(ATTEMPTS):
            choice, degraded = await self._book(ask, part, slots, offers, limits)
            worker = self._registry.get(ask.query.model, choice.slot.worker_id)
            if worker is not None:
                break
            await self._bookkeeper.free(ask.query.model, [_request_id(ask, part)])
        else:
            raise unavailable(f"The worker chosen for model {ask.query.model!r} has just gone.", code="no_workers")
        if some is not slots and choice.expires_unix_ms and not choice.repeated:
            self._standing(ask).add(offer for offer in offers if offer.slot == choice.slot)
        overlap = ask.overlaps.get(choice.slot, NO_OVERLAP)
        best = max(each.blocks for each in overlaps)
        return Selection(worker, choice, overlap, best, degraded, offers)

    async def place(self, ask: SchedulingRequest, slot: WorkerRank, role: Role) -> Choice:
        """Books on a rank the caller chose, busy or not: the part that a worker of its role plays."""
        part = {Role.PREFILL: Part.PREFILL, Role.DECODE: Part.DECODE}.get(role, Part.WHOLE)
        offers = _of_part(direct(_candidates(ask, [slot]), ask.demand, ask.query.cost), part)
        terms = replace(self._terms(ask, part), request_id=ask.query.request_id)
        choice, _ = await self._bookkeeper.select(ask.query.model, offers, terms, ask.view.loads)
        return choice

    async def give_back(self, ask: SchedulingRequest, part: Part, pick: Selection) -> None:
        """Undoes a pick, unless it had been booked before."""
        if ask.query.request_id and not pick.choice.repeated:
            await self._bookkeeper.free(ask.query.model, [_request_id(ask, part)])

    def scores(self, ask: SchedulingRequest, offers: Sequence[Offer], booked: Mapping[WorkerRank, Load]) -> list[Score]:
        """Of the offers, cheapest first, before anything is booked for this query."""
        found = []
        for offer in offers:
            load = booked.get(offer.slot, NO_LOAD)
            cost = offer.cost(load, ask.query.cost.prefill_load_scale)
            found.append(Score(offer.slot, cost, ask.overlaps.get(offer.slot, NO_OVERLAP), load))
        return sorted(found, key=lambda score: score.cost)

    async def _book(
        self,
        ask: SchedulingRequest,
        part: Part,
        slots: Sequence[WorkerRank],
        offers: list[Offer],
        limits: Mapping[WorkerRank, Limits],
    ) -> tuple[Choice, str]:
        terms = self._terms(ask, part)
        for some in self._rounds(ask, part, slots, offers, limits):
            try:
                return await self._bookkeeper.select(ask.query.model, some, terms, ask.view.loads)
            except AllBusy:
                continue
        raise AllBusy

    def _rounds(
        self,
        ask: SchedulingRequest,
        part: Part,
        slots: Sequence[WorkerRank],
        offers: list[Offer],
        limits: Mapping[WorkerRank, Limits],
    ) -> Iterator[list[Offer]]:
        """What to offer: where the session was, then what the policy says, then, if that is busy, all the others."""
        if ask.pinned is not None and ask.pinned in slots and part is not Part.PREFILL:
            only = least_loaded(_candidates(ask, [ask.pinned]), ask.demand, ask.query.cost)
            yield _limited(_of_part(only, part), limits)
        some = self._shortlist(ask, _limited(offers, limits))
        yield some
        if not limits or not ask.place:
            return
        tried = {offer.slot for offer in some}
        rest = _of_part(least_loaded(_candidates(ask, slots), ask.demand, ask.query.cost), part)
        rest = [offer for offer in _limited(rest, limits) if not offer.busy(ask.view.loads.get(offer.slot, NO_LOAD))]
        while rest := [offer for offer in rest if offer.slot not in tried]:
            some = self._shortlist(ask, rest)
            tried |= {offer.slot for offer in some}
            yield some

    def _standing(self, ask: SchedulingRequest) -> LoadSnapshot:
        return self._standings.setdefault(ask.query.model, LoadSnapshot())

    def _nearest(
        self,
        ask: SchedulingRequest,
        part: Part,
        policy: Policy,
        slots: Sequence[WorkerRank],
        overlaps: set[Overlap],
        limits: Mapping[WorkerRank, Limits],
    ) -> list[WorkerRank]:
        """The ranks worth making candidates of."""
        query, loads = ask.query, ask.view.loads
        if limits:
            below = [
                slot for slot in slots if slot not in limits or all(map(lt, loads.get(slot, NO_LOAD), limits[slot]))
            ]
            slots = below or slots
        offers = policy([Candidate(WorkerRank("", 0), overlap, 0) for overlap in overlaps], ask.demand, query.cost)
        samples = dict(zip(overlaps, _of_part(offers, part), strict=True))
        booked = self._standing(ask).booked(loads)
        return nearest(slots, ask.overlaps, samples, booked, query.cost.prefill_load_scale, self._random)

    def _shortlist(self, ask: SchedulingRequest, offers: list[Offer]) -> list[Offer]:
        most = self._store.shortlist
        if most is None:
            return offers
        return shortlist(offers, ask.view.loads, ask.query.cost.prefill_load_scale, most, self._random)

    def _limits(self, ask: SchedulingRequest, workers: Sequence[Worker]) -> dict[WorkerRank, Limits]:
        """Of the ranks that have any."""
        if not ask.place:
            return {slot: CLOSED for worker in workers for slot in worker.slots}
        thresholds = self._config.thresholds
        if not thresholds:
            return {}
        used = self._reports.used_blocks(ask.view) if thresholds.kv_share else {}
        limits = {slot: thresholds.limits(worker, slot, used) for worker in workers for slot in worker.slots}
        return {slot: limit for slot, limit in limits.items() if limit is not None}

    def _terms(self, ask: SchedulingRequest, part: Part) -> ReservationParams:
        query = ask.query
        return ReservationParams(
            _request_id(ask, part),
            query.ttl_ms or self._config.ttl_ms,
            query.cost.prefill_load_scale,
            query.cost.temperature,
            query.candidates,
            0 if part is Part.PREFILL else ask.demand.output_blocks * MILLI,
            Owner(query.owner, self._config.owner_lease_ms) if query.owner else None,
        )


def _candidates(ask: SchedulingRequest, slots: Sequence[WorkerRank]) -> list[Candidate]:
    held, overlaps = ask.view.index.blocks, ask.overlaps
    return [Candidate(slot, overlaps.get(slot, NO_OVERLAP), held(slot)) for slot in slots]


def _request_id(ask: SchedulingRequest, part: Part) -> str:
    request_id = ask.query.request_id
    return prefill_id(request_id) if request_id and part is Part.PREFILL else request_id


def _of_part(offers: list[Offer], part: Part) -> list[Offer]:
    """A prefill worker is judged and booked by what it computes, a decode worker by what it keeps."""
    if part is Part.PREFILL:
        return [offer._replace(added=0.0, book_decode=0) for offer in offers]
    if part is Part.DECODE:
        return [offer._replace(uncached=0.0, book_prefill=0) for offer in offers]
    return offers


def _limited(offers: list[Offer], limits: Mapping[WorkerRank, Limits]) -> list[Offer]:
    return [offer._replace(limits=limits.get(offer.slot)) for offer in offers] if limits else offers
