"""The router: chooses workers for prompts, using the registry, the block index and reservations."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from services.common.base import budgets
from services.common.base.errors import SluiceError, invalid, not_found, quoted, unavailable
from services.common.base.tasks import TaskOwner
from services.router.metrics import Metrics
from services.router.registration.limits import MAX_MODELS
from services.router.registration.manager import WorkerManager
from services.router.scheduling.admission_queue import AdmissionQueues, NoWorkers, WaitTerms, no_workers, wait_terms
from services.router.scheduling.decisions import Decisions, decision_on
from services.router.scheduling.disaggregation import DisaggPlanner, DisaggRules
from services.router.scheduling.lifecycle import RequestLifecycle
from services.router.scheduling.policies.registry import ComposedPolicies
from services.router.scheduling.prompts import Tokenize, in_blocks, no_preprocess
from services.router.scheduling.queries import Prompt, Query, RouteResult, check
from services.router.scheduling.requests import SchedulingRequest
from services.router.scheduling.scheduler import Scheduler
from services.router.scheduling.selection import Selector, SelectorConfig, Thresholds
from services.router.state.kv_index.index import NO_OVERLAP, Overlap
from services.router.state.kv_index.predictions import Lifetimes
from services.router.state.reservations.cost import NO_LOAD, Load
from services.router.state.reservations.table import AllBusy, QueueOrder, ReservedRank
from services.router.state.store.base import Store, StoreUnavailable
from services.router.state.store.session_affinity import SessionAffinity
from services.router.state.sync.load_reconciler import ReadReport
from services.router.state.sync.model_state import ModelState
from services.router.state.sync.replica import Replica
from services.router.state.workers.worker import Role, Worker, WorkerRank, with_adapter

TOKENIZING_LATE, TOKENIZING_FAILED = "tokenizing_late", "tokenizing_failed"
REFUSED_BODY = frozenset({budgets.CODE, "request_too_large"})
"""Codes of bodies beyond their budgets, which are refused even where tokenizing may fail."""
BYTES_PER_TOKEN = 4  # to estimate the length of a prompt that is not tokenized


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Configuration of a router; see RouterSettings."""

    policy: str = "kv"
    lease_ms: int = 6_000
    reservation_ttl_ms: int = 600_000
    owner_lease_ms: int = 4_000
    decisions_kept: int = 1_000
    drift_after_s: float = 30.0
    lifetimes: Lifetimes = field(default_factory=Lifetimes)
    session_ttl_ms: int = 600_000
    thresholds: Thresholds = field(default_factory=Thresholds)
    wait_ms: int = 0
    wait_for_workers_ms: int = 0
    queue_limit: int = 1_000
    max_worker_models: int = MAX_MODELS
    name_pin_ms: int = 86_400_000
    queue_bytes: int = 256 << 20
    models: frozenset[str] = frozenset()
    disagg: DisaggRules = field(default_factory=DisaggRules)


class Router:
    """Chooses workers for prompts and reserves load on them. Call `start` first and `close` last.

    Args:
        read_report: parses worker reports; without it, only reservations make a worker busy, and none is reconciled.
        tokenize: tokenizes OpenAI bodies; by default they are rejected.
        policies: policies of a policy file, started by the caller.
    """

    def __init__(
        self,
        store: Store,
        config: RouterConfig | None = None,
        random: Random | None = None,
        on_death: Callable[[str, BaseException], None] | None = None,
        read_report: ReadReport = lambda report: (),
        tokenize: Tokenize = no_preprocess,
        policies: ComposedPolicies | None = None,
    ) -> None:
        self.config = config = config or RouterConfig()
        policies = policies or ComposedPolicies()
        self.reads_headers = bool(policies.file.compositions)
        """Whether a policy may read the headers of queries."""
        self.metrics = Metrics()
        self.ready = asyncio.Event()
        self._tokenize_body = tokenize
        self._tasks = TaskOwner(on_death)
        random = random or Random()
        self._replica = replica = Replica(
            store,
            random,
            self.metrics,
            self._tasks,
            read_report,
            lease_ms=config.lease_ms,
            owner_lease_ms=config.owner_lease_ms,
            drift_after_s=config.drift_after_s,
            lifetimes=config.lifetimes,
        )
        self.registry, self.owners = replica.registry, replica.owners
        self.decisions = Decisions(config.decisions_kept)
        self.queues: AdmissionQueues[RouteResult] = AdmissionQueues(
            self._tasks, config.queue_limit, self._abandon, config.queue_bytes, self._announce
        )
        self.lifecycle = RequestLifecycle(replica, self.decisions, self.queues.ended)
        self.worker_manager = WorkerManager(replica, config.max_worker_models, config.name_pin_ms)
        self._disagg = DisaggPlanner(self.registry, config.disagg, config.queue_limit)
        defaults = SelectorConfig(config.policy, config.reservation_ttl_ms, config.owner_lease_ms, config.thresholds)
        self._selector = Selector(replica, defaults, random, policies)
        sessions = SessionAffinity(store, replica.health, config.session_ttl_ms)
        self._scheduler = Scheduler(replica, self._selector, sessions, self._disagg)
        self._watch()

    def _watch(self) -> None:
        """Registers the gauges over what the router holds."""
        self.metrics.watch_indexes(lambda: [view.figures for view in self._replica.synchronizer.views])
        self.metrics.watch_queues(
            lambda: {(model, reason.value): count for (model, reason), count in self.queues.waiting.items()}
        )
        self.metrics.watch_set_aside(
            lambda: Counter((each.model, each.set_aside) for each in self.registry.workers() if each.set_aside)
        )

    def start(self) -> None:
        """Starts connecting to the store; `ready` is set once the state of every model has been loaded."""
        self._tasks.spawn(self._replica.health.keep(self._recover), "link")
        self._tasks.spawn(self._get_ready(), "get-ready")
        self._tasks.spawn(self._replica.synchronizer.tend(), "tend")
        self._tasks.spawn(self.owners.tend(), "owners")

    def stop(self) -> None:
        """Ends watches; from now on, workers stay registered when their streams end."""
        self.registry.close()
        self.worker_manager.stop()

    async def close(self) -> None:
        """Stops background tasks and closes the store, in which attached workers stay registered."""
        await self._tasks.close()
        await self._replica.store.close()

    async def _get_ready(self) -> None:
        await self._replica.synchronizer.load_all()
        self.ready.set()

    async def _recover(self) -> None:
        """Synchronizes with a store that is available again: replays local changes, then reloads model states."""
        await self.worker_manager.recover()
        await self._replica.reservations.replay()
        await self._replica.synchronizer.discover()
        await self.owners.renew()
        await self.worker_manager.remove_departed()  # last, because workers may disconnect meanwhile

    async def query(self, query: Query) -> RouteResult:
        """Chooses a worker or a prefill/decode pair; reserves load there if the query has a request id.

        Raises:
            SluiceError: NOT_FOUND (`model_not_found`), UNAVAILABLE (`no_workers`, `no_prefill_workers`),
                FAILED_PRECONDITION for an empty candidate set or a body without a preprocess service, INVALID_ARGUMENT
                for an invalid prompt or policy, OVERLOADED if all workers stay busy.
        """
        check(query)
        pending, started = _PendingQuery(query, self._tokenize), time.monotonic()
        if self.registry.serving(query.model):
            await pending.prepare()
            if query.candidates is None and query.role is None:
                await self._disagg.wait_for_prefill(query.model)

        async def attempt(*, place: bool = True) -> RouteResult:
            view, workers = self._serving(query.model)
            ready, waited_ms = await pending.ready(), int((time.monotonic() - started) * 1000)
            workers = with_adapter(workers, query.prompt.lora) if query.prompt.lora else workers
            return await self._scheduler.decide(ready, view, workers, place, waited_ms)

        def terms() -> WaitTerms:
            wait_for_workers_ms = max(self.config.wait_for_workers_ms, self.registry.returning_ms(query.model))
            return wait_terms(pending.query, self.config.wait_ms, wait_for_workers_ms, self._disagg)

        try:
            route, waited_ms = await self.queues.admit(query.model, attempt, terms, pending.prepare)
        except AllBusy:
            self.metrics.shed.add(1)
            raise
        if waited_ms or pending.degraded:
            route = replace(route, waited_ms=waited_ms, degraded=pending.degraded or route.degraded)
        self._record(pending.query, route)
        return route

    async def _tokenize(self, query: Query) -> tuple[Query, str]:
        """Returns the query with a tokenized prompt, and why it has only the prompt's length (empty: it has tokens)."""
        prompt = query.prompt
        if not query.tokenize_ms:
            if _is_body(prompt):
                query = query.with_prompt(await self.tokenized(query.model, prompt, query.return_token_ids))
            return query, ""
        try:
            async with asyncio.timeout(query.tokenize_ms / 1000):
                return query.with_prompt(await self.tokenized(query.model, prompt, query.return_token_ids)), ""
        except TimeoutError:
            degraded = TOKENIZING_LATE
        except SluiceError as error:
            if error.code in REFUSED_BODY:
                raise
            degraded = TOKENIZING_FAILED
        self.metrics.tokenizing_failed.add(1, {"why": degraded})
        length = prompt.prompt_tokens or prompt.size // BYTES_PER_TOKEN
        return query.with_prompt(Prompt(prompt_tokens=length, lora=prompt.lora)), degraded

    async def tokenized(self, model: str, prompt: Prompt, ids: bool = False) -> Prompt:
        """Returns the prompt, tokenized if it is an OpenAI body.

        Args:
            ids: whether the token ids are needed, not only what identifies its blocks.

        Raises:
            SluiceError: INVALID_ARGUMENT if the prompt is given in more than one form.
        """
        if not _is_body(prompt):
            return prompt
        _, workers = self._serving(model)
        return await self._tokenize_body(model, prompt, workers, ids)

    async def add(self, slot: WorkerRank, query: Query) -> tuple[ReservedRank, Overlap]:
        """Reserves load on a rank chosen by the caller; SluiceError (NOT_FOUND) if it does not serve the model."""
        check(query)
        view, _ = self._serving(query.model)
        worker = self.registry.get(query.model, slot.worker_id)
        if worker is None or slot.rank >= worker.ranks:
            raise not_found(
                f"Worker {slot.worker_id} rank {slot.rank} does not serve model {query.model}.", param="worker_id"
            )
        query = query.with_prompt(await self.tokenized(query.model, query.prompt, query.return_token_ids))
        blocks = in_blocks(query.prompt, [worker])
        overlaps = view.match(blocks.hashes)
        overlap = overlaps.get(slot, NO_OVERLAP)
        request = SchedulingRequest(query, view, blocks, overlaps, blocks.demand(query.expected_output_tokens))
        choice = await self._selector.place(request, slot, worker.role)
        if not choice.repeated and worker.role is not Role.DECODE:
            view.predict(worker, slot, blocks.hashes, overlap, query.request_id)
        return choice, overlap

    def report(self, worker: Worker) -> bytes:
        """Returns a worker's last load report; empty before the first one."""
        view = self._replica.synchronizer.find(worker.model)
        return view.reports.get(worker.worker_id, b"") if view else b""

    async def loads(self, model: str) -> dict[WorkerRank, tuple[Worker, Load]]:
        """Returns the reserved load of every rank of one model, or of all models for an empty name."""
        found: dict[WorkerRank, tuple[Worker, Load]] = {}
        for view in self._views(model):
            booked = await self._replica.synchronizer.booked(view)
            for worker in view.workers:
                found |= {slot: (worker, booked.get(slot, NO_LOAD)) for slot in worker.slots}
        return found

    def overlaps(self, model: str, prompt: Prompt) -> Mapping[WorkerRank, Overlap]:
        """Returns the overlap of a prompt with each rank; ranks without overlap are omitted."""
        view, workers = self._serving(model)
        return view.match(in_blocks(prompt, workers).hashes)

    def indexes(self, model: str) -> list[ModelState]:
        """Returns the state of one model, or of all models for an empty name."""
        return self._views(model)

    def _views(self, model: str) -> list[ModelState]:
        if not model:
            return self._replica.synchronizer.views
        view = self._replica.synchronizer.find(model)
        return [view] if view else []

    def check_ready(self) -> None:
        """SluiceError(UNAVAILABLE) before the first contact with the store."""
        if not self.ready.is_set():
            raise unavailable("The router is starting and has not reached its store yet.", code="not_ready")

    def _serving(self, model: str) -> tuple[ModelState, Sequence[Worker]]:
        """Returns the state of a model and its workers that accept requests."""
        self.check_ready()
        view = self._replica.synchronizer.find(model)
        workers = self.registry.serving(model)
        if view is not None and workers:
            return view, workers
        known = self._replica.synchronizer.known | set(self.registry.models()) | self.config.models
        if model in known or not known:
            raise no_workers(model)
        raise not_found(
            f"Model {quoted(model)} is not served here; use one of {', '.join(sorted(known))}.",
            param="model",
            code="model_not_found",
        )

    async def _announce(self, model: str, order: QueueOrder | None) -> int:
        """Publishes the first waiting request of a model; returns the number of other replicas with a queue."""
        if not self._replica.health.available:
            return 0
        try:
            return await self._replica.store.announce_queue(model, order)
        except StoreUnavailable as error:
            self._replica.health.mark_unavailable(error)
            return 0

    async def _abandon(self, route: RouteResult) -> None:
        """Frees the reservation of a caller that has disconnected."""
        if route.reservation_id and not route.repeated:
            await self.lifecycle.free([route.reservation_id])

    def _record(self, query: Query, route: RouteResult) -> None:
        self.metrics.queries.add(1, {"policy": route.policy, "degraded": route.degraded})
        self.metrics.query_seconds.record(route.seconds)
        for stage, seconds in route.stages.items():
            self.metrics.stage_seconds.record(seconds, {"stage": stage})
        if route.waited_ms:
            self.metrics.waited_seconds.record(route.waited_ms / 1000)
        self.metrics.prompt_blocks.add(route.prompt_blocks)
        self.metrics.overlap_blocks.add(route.overlap.blocks)
        if route.reservation_id and not route.repeated:
            decision = decision_on(query, route)
            self.metrics.decided(decision.model, decision.media_items, decision.cached_media_items)
            self.decisions.add(decision)


def _is_body(prompt: Prompt) -> bool:
    """Returns whether a prompt has to be tokenized; raises SluiceError (INVALID_ARGUMENT) for one of several forms."""
    body = bool(prompt.openai_body) or prompt.body is not None
    if bool(prompt.token_ids) + bool(prompt.block_hashes) + body > 1:
        raise invalid(
            "The prompt is given in more than one form; send only one of token_ids, block_hashes and openai_body.",
            param="prompt",
        )
    return body


class _PendingQuery:
    """A query whose prompt is tokenized once, when its model has workers."""

    def __init__(self, query: Query, tokenize: Callable[[Query], Awaitable[tuple[Query, str]]]) -> None:
        self.query = query
        self.degraded = ""
        self._tokenize = tokenize
        self._done = False
        self._error: SluiceError | None = None

    async def prepare(self) -> None:
        """Tokenizes the prompt; an error is raised by `ready`."""
        if self._done:
            return
        try:
            self.query, self.degraded = await self._tokenize(self.query)
        except NoWorkers:
            return  # the last worker has just left
        except SluiceError as error:
            self._error = error.with_traceback(None)
        self._done = True

    async def ready(self) -> Query:
        """Returns the query with tokens; raises SluiceError if its prompt cannot be tokenized."""
        if not self._done:
            await self.prepare()
        if self._error is None:
            return self.query
        error, self._error, self._done = self._error, None, False
        try:
            raise error
        finally:
            del error  # the traceback refers to this frame, and to the body: a cycle that would keep it
