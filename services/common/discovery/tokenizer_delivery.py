"""Discovers models from the workers that serve them and fetches their tokenizers, so no shared volume is needed.

workers registered with a router (or listed) → for each model not configured: GetTokenizer → store → on_model
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from pathlib import Path
from weakref import WeakValueDictionary

import grpc

from services.common.budgets import CODE
from services.common.discovery.discovered_models import DiscoveredModel, RetainedModel
from services.common.discovery.tokenizer_fetch import fetch_tokenizer
from services.common.discovery.tokenizer_memory import TokenizerMemory
from services.common.discovery.tokenizer_store import TokenizerStore
from services.common.discovery.worker_watch import ServedModel, WorkerWatch
from services.common.errors import SluiceError, unavailable
from services.common.models import ENGINE_PROCESSORS, PROCESSORS, ModelSpec
from services.common.observability.instruments import Counter
from services.common.observability.process_metrics import FETCHES
from services.common.tasks import TaskOwner

log = logging.getLogger(__name__)

FETCHES_AT_ONCE = 16
HOLD_ATTEMPTS = 3
RETRY_S = (0.2, 10.0)
UNKNOWN_MODEL_S = 1.0
FAILED_S = 5.0
"""Maximum wait of a request for a model whose tokenizer failed to load moments ago, seconds."""
ROUTER_S = 3.0
CATCH_UP_S = 120.0


async def _ignore(_: DiscoveredModel) -> None:
    return


class TokenizerDelivery:
    """Follows the workers and discovers their models.

    Args:
        service: label of its metrics.
        watch: reports the workers.
        store: stores the tokenizers.
        configured: names of configured models, which are never discovered.
        on_model: called with each model that is discovered or whose tokenizer has changed.
        credentials: for the channels to workers.
        on_gone: called with a model whose grace period without workers has ended, or that is evicted for another.
        staying: limits the number of models and their grace period.
        by_use: names of models, least recently used first; models missing from it follow in discovery order.
    """

    def __init__(
        self,
        service: str,
        watch: WorkerWatch,
        store: TokenizerStore,
        configured: Collection[str],
        on_model: Callable[[DiscoveredModel], Awaitable[None]],
        credentials: grpc.ChannelCredentials | None = None,
        on_gone: Callable[[DiscoveredModel], Awaitable[None]] = _ignore,
        staying: RetainedModel | None = None,
        by_use: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._watch = watch
        self._store = store
        self._configured = frozenset(configured)
        self._on_model = on_model
        self._credentials = credentials
        self._on_gone = on_gone
        self._retention = staying or RetainedModel()
        self._by_use = by_use
        self._memory = TokenizerMemory(self._retention.memory, self._retention.model_bytes)
        self._requested: set[str] = set()  # models that requests wait for
        self._unaffordable: set[str] = set()  # models that do not fit until one is requested or another leaves
        self._learned: dict[str, DiscoveredModel] = {}
        self._failed: dict[str, DiscoveredModel] = {}  # may be partly loaded
        self._leaving: dict[str, asyncio.TimerHandle] = {}  # grace timers, in the order of losing the last worker
        self._given_up: dict[str, str] = {}  # reason by model; empty: too many models
        self._fetching: dict[str, asyncio.Task[None]] = {}  # being loaded or ended
        self._resting: set[str] = set()  # of those, the ones sleeping before a retry
        self._fetch_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by fingerprint
        self._fetches_at_once = asyncio.Semaphore(FETCHES_AT_ONCE)
        self._tasks = TaskOwner()
        self._changed = asyncio.Event()
        watch.on_change = self._on_workers_changed
        self._service = service
        self._fetches = Counter(FETCHES)

    async def run(self) -> None:
        """Follows until cancelled."""
        try:
            await self._watch.run()
        finally:
            for timer in self._leaving.values():
                timer.cancel()
            await self._tasks.close()

    async def wait_for(self, model: str, timeout_s: float) -> bool:
        """Waits until a model is loaded, evicting another if necessary; returns False when no known worker serves it.

        Raises:
            SluiceError: UNAVAILABLE for a model that is served but not loaded in time.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        unknown_deadline = min(deadline, loop.time() + UNKNOWN_MODEL_S)  # the caller may learn of a worker first
        while model not in self._learned:
            served = bool(self._watch.of_model(model))
            if served:
                self._requested.add(model)
            if served and model not in self._fetching:
                self._learn_for_request(model)
            if served and self._given_up.get(model):
                deadline = min(deadline, loop.time() + FAILED_S)
            remaining_s = (deadline if served or not self._watch.synced else unknown_deadline) - loop.time()
            if remaining_s <= 0:
                if served:
                    reason = self._given_up.get(model)
                    why = f": {reason}" if reason else " yet; retry shortly."
                    raise unavailable(f"The tokenizer of model {model!r} is not loaded{why}", code="model_loading")
                return False
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), remaining_s)
            except TimeoutError:
                continue
        return True

    async def catch_up(self) -> None:
        """Waits until every model served now is loaded or has failed, for at most `CATCH_UP_S`.

        Requests accepted earlier would wait for a tokenizer. A router that does not respond delays this by `ROUTER_S`.
        """
        try:
            async with asyncio.timeout(ROUTER_S):
                await self._until(lambda: self._watch.synced)
            async with asyncio.timeout(CATCH_UP_S):
                await self._until(lambda: self._watch.models() <= {*self._configured, *self._learned, *self._given_up})
        except TimeoutError:
            log.info("accepting requests before the models of all workers are loaded")

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _on_workers_changed(self) -> None:
        """Starts loading newly served models, and the grace period of those no longer served."""
        self._changed.set()
        served = self._watch.by_model()
        self._given_up = {model: reason for model, reason in self._given_up.items() if model in served}
        self._unaffordable &= served.keys()
        self._update_leaving(served.keys())
        for model, workers in served.items():
            if model in self._configured or model in self._fetching or self._is_current(model, workers):
                continue
            if model in self._unaffordable and model not in self._learned:
                continue
            if model in self._learned or not self._is_full():
                self._begin(model, self._learn(model))
            elif not self._end_first_leaving() and model not in self._given_up:
                log.info("too many models are loaded; this one is loaded on its first request", extra={"model": model})
                self._given_up[model] = ""

    def _learn_for_request(self, model: str) -> None:
        """Loads a served model now, after evicting the least recently used one if the limit is reached.

        Does nothing while every model is being loaded or ended.
        """
        if not self._is_full():
            self._begin(model, self._learn(model))
        elif (oldest := next(self._least_used(), None)) is not None:
            self._begin(oldest, self._end(oldest, self._learned.pop(oldest)))
            self._begin(model, self._learn(model, self._fetching[oldest]))

    def _least_used(self) -> Iterator[str]:
        """Yields the models that can be evicted, those without workers first."""
        for model in (*self._leaving, *self._by_use(), *self._learned):
            if model in self._learned and model not in self._fetching:
                yield model

    def _begin(self, model: str, work: Coroutine[None, None, None]) -> None:
        """Starts loading or ending a model; only one of the two runs at a time."""
        self._given_up.pop(model, None)
        task = self._fetching[model] = self._tasks.spawn(work, f"model-{model}")
        task.add_done_callback(lambda done: self._ended(model, done))

    def _update_leaving(self, served: Collection[str]) -> None:
        loop = asyncio.get_running_loop()
        for model in self._learned:
            timer = self._leaving.get(model)
            if model in served:
                if timer is not None:
                    self._leaving.pop(model).cancel()
            elif timer is None:
                self._leaving[model] = loop.call_later(self._retention.grace_s, self._end_grace, model)

    def _is_full(self) -> bool:
        """Whether the limit is reached, counting models being loaded or ended but not those sleeping before a retry."""
        return len(self._learned.keys() | (self._fetching.keys() - self._resting)) >= self._retention.models

    def _end_first_leaving(self) -> bool:
        """Ends the grace period of the model that has been without workers longest; False when all have workers.

        The workers are examined again once it has ended.
        """
        first = next((model for model in self._leaving if model not in self._fetching), None)
        if first is not None:
            self._end_grace(first)
        return first is not None

    def _end_grace(self, model: str) -> None:
        self._leaving.pop(model).cancel()
        if model not in self._fetching:  # else it is examined again once that task has ended
            self._begin(model, self._end_if_unserved(model))

    async def _end_if_unserved(self, model: str) -> None:
        """Ends a model that still has no workers."""
        if model in self._learned and not self._watch.of_model(model):
            self._unaffordable.clear()
            await self._end(model, self._learned.pop(model))

    async def _end(self, model: str, learned: DiscoveredModel) -> None:
        if (timer := self._leaving.pop(model, None)) is not None:
            timer.cancel()
        await self._on_gone(learned)
        self._memory.release(model)
        returns = bool(self._watch.of_model(model))  # it may be loaded again by its next request
        await asyncio.to_thread(self._store.release, learned.fingerprint, not returns)
        log.info("model is no longer served and was unloaded", extra={"model": model})

    def _ended(self, model: str, task: asyncio.Task[None]) -> None:
        self._fetching.pop(model, None)
        self._requested.discard(model)
        if not task.cancelled() and task.exception() is None:
            self._on_workers_changed()  # changes during the task were skipped

    def _is_current(self, model: str, workers: Sequence[ServedModel]) -> bool:
        known = self._learned.get(model)
        return known is not None and any(
            (served.fingerprint, served.declared) == (known.fingerprint, known.declared) for served in workers
        )

    async def _learn(self, model: str, after: asyncio.Task[None] | None = None) -> None:
        """Tries the model's workers at random until one delivers, none is left, or the limit is reached.

        Args:
            model: its name.
            after: the task that makes room for it.
        """
        if after is not None:
            await asyncio.wait([after])
        retry_s = RETRY_S[0]
        while workers := self._watch.of_model(model):
            served = random.choice(workers)
            try:
                await self._learn_from(served)
                self._fetches.add(1, {"service": self._service, "outcome": "ok"})
                self._given_up.pop(model, None)
                return
            except SluiceError as error:
                self._fetches.add(1, {"service": self._service, "outcome": error.kind.name.lower()})
                log.warning(
                    "a worker's tokenizer is unusable: %s", error.message,
                    extra={"model": model, "worker": served.address},
                )  # fmt: skip
                self._given_up[model] = error.message
                if error.code == CODE and model not in self._requested:
                    self._unaffordable.add(model)
                    break  # its next request retries
            self._changed.set()
            self._resting.add(model)
            try:
                await asyncio.sleep(retry_s * random.uniform(0.5, 1.5))
                if model not in self._learned and self._is_full():
                    break  # its next request retries
            finally:
                self._resting.discard(model)
            retry_s = min(2 * retry_s, RETRY_S[1])
        failed = self._failed.pop(model, None)
        if failed is not None and model not in self._learned:
            await self._on_gone(failed)

    async def _learn_from(self, served: ServedModel) -> None:
        path = await self._held_files(served)
        try:
            await self._make_room(served, await asyncio.to_thread(self._memory.estimate, path))
        except BaseException:
            self._store.release(served.fingerprint)
            raise
        known = served.processor in (*PROCESSORS, *ENGINE_PROCESSORS)  # a custom class would be code from outside
        spec = ModelSpec(served.model, str(path), served.processor if known else "", *served.declared, learned=True)
        learned = DiscoveredModel(spec, served.engine, served.fingerprint)
        try:
            await self._on_model(learned)
        except BaseException:
            self._store.release(served.fingerprint)
            if served.model not in self._learned:
                self._memory.release(served.model)
            self._failed[served.model] = learned
            raise
        self._failed.pop(served.model, None)
        before, self._learned[served.model] = self._learned.get(served.model), learned
        if before is not None:
            await asyncio.to_thread(self._store.release, before.fingerprint, True)
        self._changed.set()
        log.info("model was discovered from its worker", extra={"model": served.model, "worker": served.address})

    async def _make_room(self, served: ServedModel, size: int) -> None:
        """Reserves memory for a model's tokenizer, after ending the least recently used ones if requests wait for it.

        Raises:
            SluiceError: OVERLOADED when it does not fit.
        """
        key = served.fingerprint, served.chat_template
        while not self._memory.try_reserve(served.model, key, size):
            victims = self._least_used() if served.model in self._requested else iter(self._leaving)
            for model in victims if self._memory.fits(size) else ():
                if model not in (served.model, *self._fetching) and model in self._learned:
                    break
            else:
                raise self._memory.refuse(served.model, size)
            self._begin(model, self._end(model, self._learned.pop(model)))
            await asyncio.wait([self._fetching[model]])

    async def _held_files(self, served: ServedModel) -> Path:
        """Returns a worker's tokenizer files, fetched if necessary; retained until released from the store."""
        lock = self._fetch_locks.setdefault(served.fingerprint, asyncio.Lock())
        for _ in range(HOLD_ATTEMPTS):
            if self._store.hold(served.fingerprint):
                path = await asyncio.to_thread(self._store.find, served.fingerprint)
                if path is not None:
                    return path
                self._store.release(served.fingerprint)
            async with lock, self._fetches_at_once:
                if await asyncio.to_thread(self._store.find, served.fingerprint) is None:
                    await fetch_tokenizer(
                        served.address, served.fingerprint, self._store, self._credentials, served.callee
                    )
        raise unavailable("The worker's tokenizer is removed as soon as it is stored, because others fill the folder.")
