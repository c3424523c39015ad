"""The router: chooses workers for prompts, and keeps what it needs to know for that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from services.common.errors import ErrorKind, SluiceError, invalid, not_found, unavailable
from services.common.tasks import TaskOwner
from services.router.book import Choice, Owner, Terms
from services.router.bookkeeper import Bookkeeper
from services.router.cost import MILLI, NO_LOAD, Load, Offer
from services.router.decisions import Decision, Decisions
from services.router.followups import FollowUps
from services.router.index import NO_OVERLAP, Overlap
from services.router.keeper import Keeper
from services.router.link import Link
from services.router.metrics import Metrics
from services.router.owners import Owners
from services.router.policies import Candidate, Demand, all_policies, direct, shortlist
from services.router.prompts import Blocks, in_blocks
from services.router.queries import Prompt, Query, Route, Score
from services.router.registry import Registry
from services.router.reservations import reservation_id
from services.router.store.base import Store, StoreUnavailable
from services.router.view import ModelView
from services.router.workers import Role, Slot, Worker
from services.router.workforce import Workforce

BLIND = "no_block_hashes"


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """What the router needs of the settings."""

    policy: str = "kv"
    lease_ms: int = 6_000
    reservation_ttl_ms: int = 600_000
    owner_lease_ms: int = 10_000
    decisions_kept: int = 1_000


class Router:
    """See the module. `start` before anything else, `close` at the end."""

    def __init__(
        self,
        store: Store,
        config: RouterConfig | None = None,
        random: Random | None = None,
        on_death: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self.config = config or RouterConfig()
        self.registry = Registry()
        self.metrics = Metrics()
        self.ready = asyncio.Event()
        self._random = random or Random()
        self._store = store
        self._tasks = TaskOwner(on_death)
        self._link = Link(store)
        self._bookkeeper = Bookkeeper(store, self._link, self._random)
        self._keeper = Keeper(
            store, self._link, self._bookkeeper, self.registry, self._tasks, self.metrics, self.config.lease_ms
        )
        self.owners = Owners(store, self._link, self._keeper, self.metrics, self.config.owner_lease_ms)
        self.decisions = Decisions(self.config.decisions_kept)
        self.followups = FollowUps(self._bookkeeper, self._keeper, self.decisions, self.metrics)
        self._policies = all_policies(self._random)
        self.workforce = Workforce(
            store, self._link, self._keeper, self._bookkeeper, self._tasks, self.metrics, self.config.lease_ms
        )

    def start(self) -> None:
        """Starts reaching the store; `ready` is set once every view has been read."""
        self._tasks.spawn(self._link.keep(self._recover), "link")
        self._tasks.spawn(self._get_ready(), "get-ready")
        self._tasks.spawn(self._keeper.tend(), "tend")
        self._tasks.spawn(self.owners.tend(), "owners")

    def stop(self) -> None:
        """Ends watches; from now on a worker's stream that ends does not mean that the worker is gone."""
        self.registry.close()
        self.workforce.stop()

    async def close(self) -> None:
        """Stops the background tasks and lets go of the store. Attached workers stay registered in it."""
        await self._tasks.close()
        await self._store.close()

    async def _get_ready(self) -> None:
        await self._keeper.load_all()
        self.ready.set()

    async def _recover(self) -> None:
        """The store is back: it hears first what happened here, then the views are read from it."""
        await self.workforce.recover()
        await self._bookkeeper.settle()
        await self._keeper.discover()
        await self.owners.renew()

    async def query(self, query: Query) -> Route:
        """Chooses a worker and, with a request id, books the request on it.

        Raises:
            SluiceError: NOT_FOUND model_not_found, UNAVAILABLE no_workers, FAILED_PRECONDITION for an empty candidate
                set, INVALID_ARGUMENT for a prompt or policy that makes no sense.
        """
        started = time.perf_counter()
        view, workers = self._serving(query.model)
        blocks = in_blocks(query.prompt, workers)
        overlaps = view.index.match(blocks.hashes)
        candidates = self._candidates(view, workers, overlaps, query)
        name = query.policy or self.config.policy
        policy = self._policies.get(name)
        if policy is None:
            raise invalid(f"Policy {name!r} is unknown; choose from {', '.join(self._policies)}.", param="policy")
        demand = _demand(blocks, query)
        offers = policy(candidates, demand, query.cost)
        scores = await self._scores(view, candidates, offers, query) if query.explain else []
        choice, degraded = await self._choose(view, offers, query, demand)
        worker = self.registry.get(query.model, choice.slot.worker_id)
        if worker is None:  # booked earlier on a worker that has gone since
            await self._bookkeeper.free(query.model, [query.request_id])
            choice, degraded = await self._choose(view, offers, query, demand)
            worker = self.registry.get(query.model, choice.slot.worker_id)
            if worker is None:
                raise self._no_workers(query.model)
        if not degraded and blocks.blind and name == "kv":
            degraded = BLIND
        route = Route(
            worker,
            choice.slot.rank,
            overlap := overlaps.get(choice.slot, NO_OVERLAP),
            max((candidate.overlap.blocks for candidate in candidates), default=0),
            max(blocks.tokens - overlap.device * blocks.size, 0),
            0 if self._store.embedded else view.age_ms,
            reservation_id(query.model, query.request_id) if choice.expires_unix_ms else "",
            choice.expires_unix_ms,
            degraded,
            scores,
        )
        seconds = time.perf_counter() - started
        self._record(name, route, blocks, seconds)
        if route.reservation_id and not choice.repeated:
            self.decisions.add(_decision(query, name, route, blocks, seconds))
        return route

    async def add(self, slot: Slot, query: Query) -> tuple[Choice, Overlap]:
        """Books a request on a rank its caller chose; NOT_FOUND when that is not there."""
        view, _ = self._serving(query.model)
        worker = self.registry.get(query.model, slot.worker_id)
        if worker is None or slot.rank >= worker.ranks:
            raise not_found(
                f"Worker {slot.worker_id} rank {slot.rank} does not serve model {query.model}.", param="worker_id"
            )
        blocks = in_blocks(query.prompt, [worker])
        overlap = view.index.match(blocks.hashes).get(slot, NO_OVERLAP)
        candidate = Candidate(slot, overlap, view.index.blocks(slot))
        demand = _demand(blocks, query)
        offers = direct([candidate], demand, query.cost)
        choice, _ = await self._bookkeeper.select(query.model, offers, self._terms(query, demand), view.loads)
        return choice, overlap

    async def mark_prefill_complete(self, reservations: Sequence[str]) -> int:
        """Gives prefill load back; returns how many ids were unknown."""
        return await self.followups.mark_prefill_complete(reservations)

    async def free(self, reservations: Sequence[str]) -> int:
        """Gives all load back; returns how many ids were unknown."""
        return await self.followups.free(reservations)

    def report(self, worker: Worker) -> bytes:
        """A worker's last load report; empty when it gave none."""
        view = self._keeper.find(worker.model)
        return view.reports.get(worker.worker_id, b"") if view else b""

    async def loads(self, model: str) -> dict[Slot, tuple[Worker, Load]]:
        """Booked load of every rank of one or all models."""
        found: dict[Slot, tuple[Worker, Load]] = {}
        for view in self._views(model):
            booked = await self._booked(view)
            for worker in view.workers:
                found |= {slot: (worker, booked.get(slot, NO_LOAD)) for slot in worker.slots}
        return found

    def overlaps(self, model: str, prompt: Prompt) -> dict[Slot, Overlap]:
        """How much of a prompt each rank holds; ranks with nothing are left out."""
        view, workers = self._serving(model)
        return view.index.match(in_blocks(prompt, workers).hashes)

    def indexes(self, model: str) -> list[ModelView]:
        """The views of one or all models."""
        return self._views(model)

    # Inside

    def _views(self, model: str) -> list[ModelView]:
        if not model:
            return self._keeper.views
        view = self._keeper.find(model)
        return [view] if view else []

    def check_ready(self) -> None:
        """SluiceError(UNAVAILABLE) before the first contact with the store."""
        if not self.ready.is_set():
            raise unavailable("The router is starting and has not reached its store yet.", code="not_ready")

    def _serving(self, model: str) -> tuple[ModelView, list[Worker]]:
        """The view of a model and its workers that take requests."""
        self.check_ready()
        view = self._keeper.find(model)
        workers = [worker for worker in self.registry.workers(model) if not worker.draining]
        if view is not None and workers:
            return view, workers
        known = self._keeper.known | set(self.registry.models())
        if model in known or not known:
            raise self._no_workers(model)
        raise not_found(
            f"Model {model!r} is not served here; there is {', '.join(sorted(known))}.",
            param="model",
            code="model_not_found",
        )

    def _no_workers(self, model: str) -> SluiceError:
        return unavailable(f"No worker serves model {model!r} now.", code="no_workers", retry_after_ms=1000)

    def _candidates(
        self, view: ModelView, workers: list[Worker], overlaps: dict[Slot, Overlap], query: Query
    ) -> list[Candidate]:
        """Every rank that may run the request. Prefill and decode workers only run parts, so they must be named."""
        if query.candidates is None:
            able = [worker for worker in workers if worker.role is Role.AGGREGATED]
        elif not query.candidates:
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                "The candidate set is empty, so no worker is allowed.",
                param="candidates",
                code="no_candidates",
            )
        else:
            able = [worker for worker in workers if worker.worker_id in query.candidates]
        if not able:
            raise self._no_workers(query.model)
        held = view.index.blocks
        return [Candidate(slot, overlaps.get(slot, NO_OVERLAP), held(slot)) for worker in able for slot in worker.slots]

    def _terms(self, query: Query, demand: Demand) -> Terms:
        return Terms(
            query.request_id,
            query.ttl_ms or self.config.reservation_ttl_ms,
            query.cost.prefill_load_scale,
            query.cost.temperature,
            query.candidates,
            demand.output_blocks * MILLI,
            Owner(query.owner, self.config.owner_lease_ms) if query.owner else None,
        )

    async def _choose(self, view: ModelView, offers: list[Offer], query: Query, demand: Demand) -> tuple[Choice, str]:
        if self._store.shortlist is not None:
            scale = query.cost.prefill_load_scale
            offers = shortlist(offers, view.loads, scale, self._store.shortlist, self._random)
        return await self._bookkeeper.select(view.model, offers, self._terms(query, demand), view.loads)

    async def _booked(self, view: ModelView) -> dict[Slot, Load]:
        """Booked loads, live while the store is there."""
        if self._link.there:
            try:
                view.take(await self._store.pulse(view.model))
            except StoreUnavailable as error:
                self._link.lost(error)
        return view.loads

    async def _scores(
        self, view: ModelView, candidates: list[Candidate], offers: list[Offer], query: Query
    ) -> list[Score]:
        """Of the offers, cheapest first, before this query books anything."""
        booked = await self._booked(view)
        overlaps = {candidate.slot: candidate.overlap for candidate in candidates}
        scores = []
        for offer in offers:
            load = booked.get(offer.slot, NO_LOAD)
            cost = offer.cost(load, query.cost.prefill_load_scale)
            scores.append(Score(offer.slot, cost, overlaps[offer.slot], load))
        return sorted(scores, key=lambda score: score.cost)

    def _record(self, policy: str, route: Route, blocks: Blocks, seconds: float) -> None:
        self.metrics.queries.add(1, {"policy": policy, "degraded": route.degraded})
        self.metrics.query_seconds.record(seconds)
        self.metrics.prompt_blocks.add(blocks.count)
        self.metrics.overlap_blocks.add(route.overlap.blocks)


def _demand(blocks: Blocks, query: Query) -> Demand:
    return Demand(blocks.count, -(-query.expected_output_tokens // blocks.size))


def _decision(query: Query, policy: str, route: Route, blocks: Blocks, seconds: float) -> Decision:
    return Decision(
        route.reservation_id,
        query.request_id,
        query.model,
        Slot(route.worker.worker_id, route.rank),
        route.worker.address,
        prompt_tokens=blocks.tokens,
        predicted_cached_tokens=route.overlap.blocks * blocks.size,
        best_cached_tokens=route.best_overlap_blocks * blocks.size,
        decided_unix_ms=time.time_ns() // 1_000_000,
        decision_us=round(seconds * 1e6),
        policy=policy,
        degraded=route.degraded,
    )
