"""The router: chooses workers for prompts, and keeps what it needs to know for that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from services.common.errors import SluiceError, invalid, not_found, quoted, unavailable
from services.common.tasks import TaskOwner
from services.router.kv_index.index import NO_OVERLAP, Overlap
from services.router.kv_index.predictions import Lifetimes
from services.router.metrics import Metrics
from services.router.registration.manager import WorkerManager
from services.router.reservations.cost import NO_LOAD, Load
from services.router.reservations.ids import unscoped
from services.router.reservations.table import AllBusy, Choice
from services.router.scheduling.admission_queue import AdmissionQueues
from services.router.scheduling.decisions import Decision, Decisions
from services.router.scheduling.disaggregation import Casting, DisaggRules
from services.router.scheduling.lifecycle import RequestLifecycle
from services.router.scheduling.openai_prompts import Bodies, NoBodies
from services.router.scheduling.prompts import in_blocks
from services.router.scheduling.queries import Prompt, Query, Route
from services.router.scheduling.request_limits import check
from services.router.scheduling.scheduler import Scheduler
from services.router.scheduling.selection import SchedulingRequest, Selector, SelectorConfig
from services.router.scheduling.session_affinity import SessionAffinity
from services.router.scheduling.thresholds import Thresholds
from services.router.store.base import Store
from services.router.store.store_health import Link
from services.router.sync.load_reconciler import LoadReconciler, ReadReport
from services.router.sync.load_reports import Reports, UsedBlocks
from services.router.sync.model_state import ModelState
from services.router.sync.reservation_manager import ReservationManager
from services.router.sync.reservation_owners import Owners
from services.router.sync.synchronizer import IndexSynchronizer
from services.router.workers.registry import Registry
from services.router.workers.worker import Role, Worker, WorkerRank, holding


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """What the router needs of the settings."""

    policy: str = "kv"
    lease_ms: int = 6_000
    reservation_ttl_ms: int = 600_000
    owner_lease_ms: int = 10_000
    decisions_kept: int = 1_000
    drift_after_s: float = 30.0
    lifetimes: Lifetimes = field(default_factory=Lifetimes)
    session_ttl_ms: int = 600_000
    thresholds: Thresholds = field(default_factory=Thresholds)
    wait_ms: int = 0
    line_limit: int = 1_000
    disagg: DisaggRules = field(default_factory=DisaggRules)


class Router:
    """See the module. `start` before anything else, `close` at the end.

    Args:
        used_blocks: reads workers' reports; without it only what is booked makes a worker busy.
        read_report: reads them too; without it the load book is not corrected by them.
        bodies: tokenizes OpenAI bodies; without it they are refused.
    """

    def __init__(
        self,
        store: Store,
        config: RouterConfig | None = None,
        random: Random | None = None,
        on_death: Callable[[str, BaseException], None] | None = None,
        used_blocks: UsedBlocks = lambda report: (),
        read_report: ReadReport = lambda report: (),
        bodies: Bodies | None = None,
    ) -> None:
        self.config = config or RouterConfig()
        self.registry = Registry()
        self.metrics = Metrics()
        self.ready = asyncio.Event()
        self._random = random or Random()
        self._store = store
        self._tasks = TaskOwner(on_death)
        self._link = Link(store)
        self._bookkeeper = ReservationManager(store, self._link, self._random)
        self._keeper = IndexSynchronizer(
            store,
            self._link,
            self._bookkeeper,
            self.registry,
            self._tasks,
            self.metrics,
            self.config.lease_ms,
            self.config.lifetimes,
            LoadReconciler(store, read_report, self.metrics, self.config.drift_after_s),
        )
        self.owners = Owners(store, self._link, self._keeper, self.metrics, self.config.owner_lease_ms)
        self.decisions = Decisions(self.config.decisions_kept)
        self.lines: AdmissionQueues[Route] = AdmissionQueues(self._tasks, self.config.line_limit, self._abandon)
        self.metrics.watch_views(lambda: self._keeper.views, self.lines.length)
        self.followups = RequestLifecycle(
            self._bookkeeper, self._keeper, self.decisions, self.metrics, self.lines.ended
        )
        self._casting = Casting(self.registry, self.config.disagg, self.config.line_limit)
        self._selector = Selector(
            store,
            self._bookkeeper,
            self.registry,
            Reports(used_blocks),
            SelectorConfig(
                self.config.policy,
                self.config.reservation_ttl_ms,
                self.config.owner_lease_ms,
                self.config.thresholds,
            ),
            self._random,
        )
        sessions = SessionAffinity(store, self._link, self.config.session_ttl_ms)
        self._decider = Scheduler(store, self._keeper, self._selector, sessions, self._casting, self.config.policy)
        self._bodies = bodies or NoBodies()
        self.workforce = WorkerManager(
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
        await self.workforce.take_leave()  # last: workers may go all the while

    async def query(self, query: Query) -> Route:
        """Chooses a worker, or a pair of them, and, with a request id, books the request there.

        Raises:
            SluiceError: NOT_FOUND model_not_found, UNAVAILABLE no_workers or no_prefill_workers, FAILED_PRECONDITION
                for an empty candidate set or a body without a preprocess service, INVALID_ARGUMENT for a prompt or
                policy that makes no sense, OVERLOADED when all workers are busy and stay so.
        """
        check(query)
        query = replace(query, prompt=await self.tokenized(query.model, query.prompt))
        if query.candidates is None:
            await self._casting.wait_for_prefill(query.model)

        async def attempt(*, place: bool = True) -> Route:
            view, workers = self._serving(query.model)
            return await self._decider.decide(query, view, holding(workers, query.prompt.lora), place)

        patience = query.max_wait_ms or self.config.wait_ms
        scope = (query.candidates, query.prompt.prompt_tokens <= self.config.disagg.bypass_uncached_tokens)
        try:
            route, waited_ms = await self.lines.admit(query.model, attempt, query.priority, patience, scope)
        except AllBusy:
            self.metrics.shed.add(1)
            raise
        route = replace(route, waited_ms=waited_ms)
        self._record(query, route)
        return route

    async def tokenized(self, model: str, prompt: Prompt) -> Prompt:
        """Returns the prompt, by its tokens if it came as an OpenAI body; SluiceError(INVALID_ARGUMENT) for two."""
        if bool(prompt.token_ids) + bool(prompt.block_hashes) + bool(prompt.openai_body) > 1:
            raise invalid("Give one of token_ids, block_hashes and openai_body.", param="prompt")
        if not prompt.openai_body:
            return prompt
        _, workers = self._serving(model)
        return await self._bodies.tokenized(model, prompt, workers)

    async def add(self, slot: WorkerRank, query: Query) -> tuple[Choice, Overlap]:
        """Books a request on a rank its caller chose; NOT_FOUND when that is not there."""
        check(query)
        view, _ = self._serving(query.model)
        worker = self.registry.get(query.model, slot.worker_id)
        if worker is None or slot.rank >= worker.ranks:
            raise not_found(
                f"Worker {slot.worker_id} rank {slot.rank} does not serve model {query.model}.", param="worker_id"
            )
        query = replace(query, prompt=await self.tokenized(query.model, query.prompt))
        blocks = in_blocks(query.prompt, [worker])
        overlaps = view.match(blocks.hashes)
        overlap = overlaps.get(slot, NO_OVERLAP)
        choice = await self._selector.place(SchedulingRequest(query, view, blocks, overlaps), slot, worker.role)
        if not choice.repeated and worker.role is not Role.DECODE:
            view.expect(worker, slot, blocks.hashes, overlap, query.request_id)
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

    async def loads(self, model: str) -> dict[WorkerRank, tuple[Worker, Load]]:
        """Booked load of every rank of one or all models."""
        found: dict[WorkerRank, tuple[Worker, Load]] = {}
        for view in self._views(model):
            booked = await self._keeper.booked(view)
            for worker in view.workers:
                found |= {slot: (worker, booked.get(slot, NO_LOAD)) for slot in worker.slots}
        return found

    def overlaps(self, model: str, prompt: Prompt) -> Mapping[WorkerRank, Overlap]:
        """How much of a prompt each rank holds; ranks with nothing are left out."""
        view, workers = self._serving(model)
        return view.match(in_blocks(prompt, workers).hashes)

    def indexes(self, model: str) -> list[ModelState]:
        """The views of one or all models."""
        return self._views(model)

    # Inside

    def _views(self, model: str) -> list[ModelState]:
        if not model:
            return self._keeper.views
        view = self._keeper.find(model)
        return [view] if view else []

    def check_ready(self) -> None:
        """SluiceError(UNAVAILABLE) before the first contact with the store."""
        if not self.ready.is_set():
            raise unavailable("The router is starting and has not reached its store yet.", code="not_ready")

    def _serving(self, model: str) -> tuple[ModelState, list[Worker]]:
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
            f"Model {quoted(model)} is not served here; there is {', '.join(sorted(known))}.",
            param="model",
            code="model_not_found",
        )

    def _no_workers(self, model: str) -> SluiceError:
        return unavailable(f"No worker serves model {quoted(model)} now.", code="no_workers", retry_after_ms=1000)

    async def _abandon(self, route: Route) -> None:
        """Gives back what was booked for a caller that had gone."""
        if route.reservation_id and not route.repeated:
            await self.followups.free([route.reservation_id])

    def _record(self, query: Query, route: Route) -> None:
        self.metrics.queries.add(1, {"policy": route.policy, "degraded": route.degraded})
        self.metrics.query_seconds.record(route.seconds)
        for stage, seconds in route.stages.items():
            self.metrics.stage_seconds.record(seconds, {"stage": stage})
        if route.waited_ms:
            self.metrics.waited_seconds.record(route.waited_ms / 1000)
        self.metrics.prompt_blocks.add(route.prompt_blocks)
        self.metrics.overlap_blocks.add(route.overlap.blocks)
        if route.reservation_id and not route.repeated:
            self.metrics.reservations.add(1)
            self.decisions.add(_decision(query, route))


def _decision(query: Query, route: Route) -> Decision:
    prefill = route.prefill_worker
    expected = route.overlap.blocks + route.overlap.predicted
    return Decision(
        route.reservation_id,
        unscoped(query.scope, query.request_id),
        query.model,
        WorkerRank(route.worker.worker_id, route.rank),
        route.worker.address,
        prompt_tokens=route.prompt_tokens,
        predicted_cached_tokens=expected * route.block_size,
        best_cached_tokens=max(route.best_overlap_blocks, expected) * route.block_size,
        decided_unix_ms=time.time_ns() // 1_000_000,
        decision_us=round(route.seconds * 1e6),
        policy=route.policy,
        degraded=route.degraded,
        waited_ms=route.waited_ms,
        session_hit=route.session_hit,
        prefill_slot=None if prefill is None else WorkerRank(prefill.worker_id, route.prefill_rank),
        prefill_address=prefill.address if prefill else "",
    )
