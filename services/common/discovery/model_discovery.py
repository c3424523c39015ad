"""Serves models that are not configured: discovered from the workers that serve them, which deliver their tokenizers.

workers registered with a router, or listed → for each model not configured: GetTokenizer → store → `ModelHost.add`
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from typing import Protocol

from services.common.base.budgets import CODE, Budget
from services.common.base.errors import SluiceError, unavailable
from services.common.base.tasks import TaskOwner
from services.common.discovery.discovered_models import DeliverySettings, DiscoveredModel, RetainedModel
from services.common.discovery.model_state import DiscoveryState
from services.common.discovery.tokenizer_check import check_tokenizer
from services.common.discovery.tokenizer_fetch import HeldTokenizers
from services.common.discovery.tokenizer_memory import TokenizerMemory
from services.common.discovery.tokenizer_store import TokenizerStore
from services.common.discovery.worker_watch import ServedModel, WorkerWatch
from services.common.observability.instruments import Counter
from services.common.observability.process_metrics import FETCHES
from services.common.packages.model_files import ENGINE_PROCESSORS, PROCESSORS, ModelSpec
from services.common.rpc.replicas import ReplicaSet
from services.common.security.tls import channel_credentials
from services.common.settings.service import ServiceSettings
from sluice.v1 import router_pb2_grpc

log = logging.getLogger(__name__)

RETRY_S = (0.2, 10.0)
UNKNOWN_MODEL_S = 1.0
FAILED_S = 5.0
"""Maximum wait of a request for a model whose tokenizer failed to load moments ago, seconds."""
ROUTER_S = 3.0
CATCH_UP_S = 120.0
TOO_MANY = ""
"""The problem of a model that is not loaded because too many are."""


class ModelDiscoverySettings(DeliverySettings, ServiceSettings):
    """Settings of a service that discovers models."""


class ModelHost(Protocol):
    """The service that loads discovered models."""

    async def add(self, model: DiscoveredModel) -> None:
        """Loads a model that was discovered or whose tokenizer has changed."""
        ...

    async def remove(self, model: DiscoveredModel) -> None:
        """Unloads a model, which may be partly loaded."""
        ...

    def by_use(self) -> Sequence[str]:
        """Returns the names of the loaded models, least recently used first."""
        ...


class ModelDiscovery:
    """Follows the workers and discovers their models.

    Args:
        service: label of its metrics.
        watch: reports the workers.
        files: the tokenizers.
        host: receives the models.
        configured: names of configured models, which are never discovered.
        retained: limits the number of models, their grace period and their memory.
        on_death: called if following fails.
    """

    def __init__(
        self,
        service: str,
        watch: WorkerWatch,
        files: HeldTokenizers,
        host: ModelHost,
        configured: Collection[str] = (),
        retained: RetainedModel | None = None,
        on_death: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self._service = service
        self._watch = watch
        self._files = files
        self._host = host
        self._configured = frozenset(configured)
        self._retained = retained or RetainedModel()
        self._memory = TokenizerMemory(self._retained.memory, self._retained.model_bytes)
        self._models: dict[str, DiscoveryState] = {}
        self._tasks = TaskOwner()
        self._following = TaskOwner(on_death)
        self._changed = asyncio.Event()
        self._fetches = Counter(FETCHES)

    @classmethod
    def of_settings(
        cls,
        service: str,
        settings: ModelDiscoverySettings,
        host: ModelHost,
        configured: Collection[str],
        on_death: Callable[[str, BaseException], None],
        model_bytes: int = 0,
    ) -> ModelDiscovery:
        """Returns that of a service.

        Args:
            settings: with `routers` or `workers`.
            model_bytes: memory that each model may take beside its tokenizer, such as a cache.
        """
        credentials = channel_credentials(settings)
        routers: ReplicaSet[router_pb2_grpc.RouterAsyncStub] | None = None
        if settings.routers:
            routers = ReplicaSet("router", settings.routers, router_pb2_grpc.RouterStub, credentials)
        memory = Budget("tokenizer_memory", settings.max_discovered_mb << 20, "--max-discovered-mb")
        return cls(
            service,
            WorkerWatch(routers, settings.workers, credentials),
            HeldTokenizers(TokenizerStore(settings.tokenizer_cache, check=check_tokenizer), credentials),
            host,
            configured,
            RetainedModel(memory=memory, model_bytes=model_bytes),
            on_death,
        )

    def start(self) -> None:
        """Starts following."""
        self._following.spawn(self._watch.run(self.refresh), "model-discovery")

    async def close(self) -> None:
        """Stops following."""
        await self._following.close()
        for model in self._models.values():
            model.stay()
        await self._tasks.close()

    async def wait_for(self, name: str, timeout_s: float) -> bool:
        """Waits until a model is loaded, evicting another if necessary; returns False when no known worker serves it.

        Raises:
            SluiceError: UNAVAILABLE for a model that is served but not loaded in time.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        unknown_deadline = min(deadline, loop.time() + UNKNOWN_MODEL_S)  # the caller may learn of a worker first
        while (model := self._models.get(name)) is None or model.loaded is None:
            served = bool(self._watch.of_model(name))
            if served:
                model = self._state(name)
                model.requested = True
                if model.task is None:
                    self._load_for_request(model)
                if model.problem:
                    deadline = min(deadline, loop.time() + FAILED_S)
            remaining_s = (deadline if served or not self._watch.synced else unknown_deadline) - loop.time()
            if remaining_s <= 0:
                if not served:
                    return False
                why = f": {model.problem}" if model is not None and model.problem else " yet; retry shortly."
                raise unavailable(f"The tokenizer of model {name!r} is not loaded{why}", code="model_loading")
            self._changed.clear()
            try:
                async with asyncio.timeout(remaining_s):
                    await self._changed.wait()
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
                await self._until(lambda: all(map(self._is_settled, self._watch.models())))
        except TimeoutError:
            log.info("accepting requests before the models of all workers are loaded")

    def _is_settled(self, name: str) -> bool:
        model = self._models.get(name)
        return name in self._configured or (model is not None and bool(model.loaded or model.problem is not None))

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _state(self, name: str) -> DiscoveryState:
        model = self._models.get(name)
        if model is None:
            model = self._models[name] = DiscoveryState(name)
        return model

    def refresh(self) -> None:
        """Starts loading newly served models, and the grace period of those no longer served."""
        self._changed.set()
        served = self._watch.by_model()
        loop = asyncio.get_running_loop()
        for name, model in list(self._models.items()):
            if name in served:
                model.stay()
                continue
            model.problem, model.unaffordable = None, False
            if model.loaded is not None and model.grace is None:
                model.left_at = loop.time()
                model.grace = loop.call_later(self._retained.grace_s, self._end_grace, model)
            elif model.loaded is None and model.task is None:
                del self._models[name]
        for name, workers in served.items():
            if name in self._configured:
                continue
            model = self._state(name)
            if model.task is not None or model.is_current(workers) or (model.unaffordable and model.loaded is None):
                continue
            if model.loaded is not None or not self._is_full():
                self._begin(model, self._load(model))
            elif not self._end_first_leaving() and model.problem is None:
                log.info("too many models are loaded; this one is loaded on its first request", extra={"model": name})
                model.problem = TOO_MANY

    def _load_for_request(self, model: DiscoveryState) -> None:
        """Loads a served model now, after evicting the least recently used one if the limit is reached.

        Does nothing while every model is being loaded or unloaded.
        """
        if not self._is_full():
            self._begin(model, self._load(model))
        elif (oldest := next(self._least_used(), None)) is not None:
            self._begin(model, self._load(model, self._unload(oldest)))

    def _leaving(self) -> list[DiscoveryState]:
        """Returns the models without workers, the one that lost them first first."""
        return sorted((model for model in self._models.values() if model.grace), key=lambda model: model.left_at)

    def _least_used(self) -> Iterator[DiscoveryState]:
        """Yields the models that can be evicted, those without workers first."""
        used = filter(None, map(self._models.get, self._host.by_use()))
        for model in (*self._leaving(), *used, *self._models.values()):
            if model.idle:
                yield model

    def _begin(self, model: DiscoveryState, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Starts loading or unloading a model; only one of the two runs at a time."""
        model.problem = None
        task = model.task = self._tasks.spawn(work, f"model-{model.name}")
        task.add_done_callback(lambda done: self._ended(model, done))
        return task

    def _ended(self, model: DiscoveryState, task: asyncio.Task[None]) -> None:
        model.task, model.requested = None, False
        if not task.cancelled() and task.exception() is None:
            self.refresh()  # changes during the task were skipped

    def _is_full(self) -> bool:
        """Whether the limit is reached, counting models being loaded or unloaded but not those that rest."""
        return sum(model.counts for model in self._models.values()) >= self._retained.models

    def _end_first_leaving(self) -> bool:
        """Ends the grace period of the model that has been without workers longest; False when all have workers.

        The workers are examined again once it has ended.
        """
        first = next((model for model in self._leaving() if model.task is None), None)
        if first is not None:
            self._end_grace(first)
        return first is not None

    def _end_grace(self, model: DiscoveryState) -> None:
        model.stay()
        if model.task is None:  # else it is examined again once that task has ended
            self._begin(model, self._unload_if_unserved(model))

    async def _unload_if_unserved(self, model: DiscoveryState) -> None:
        """Unloads a model that still has no workers."""
        if model.loaded is not None and not self._watch.of_model(model.name):
            for other in self._models.values():
                other.unaffordable = False
            loaded, model.loaded = model.loaded, None
            await self._end(model, loaded)

    def _unload(self, model: DiscoveryState) -> asyncio.Task[None]:
        """Starts unloading a loaded model."""
        loaded, model.loaded = model.loaded, None
        assert loaded is not None
        return self._begin(model, self._end(model, loaded))

    async def _end(self, model: DiscoveryState, loaded: DiscoveredModel) -> None:
        model.stay()
        await self._host.remove(loaded)
        self._memory.release(model.name)
        returns = bool(self._watch.of_model(model.name))  # it may be loaded again by its next request
        await self._files.release(loaded.fingerprint, not returns)
        log.info("model is no longer served and was unloaded", extra={"model": model.name})

    async def _load(self, model: DiscoveryState, after: asyncio.Task[None] | None = None) -> None:
        """Tries the model's workers at random until one delivers, none is left, or the limit is reached.

        Args:
            after: the task that makes room for it.
        """
        if after is not None:
            await asyncio.wait([after])
        retry_s = RETRY_S[0]
        while workers := self._watch.of_model(model.name):
            served = random.choice(workers)
            try:
                await self._load_from(model, served)
                self._fetches.add(1, {"service": self._service, "outcome": "ok"})
                model.problem = None
                return
            except SluiceError as error:
                self._fetches.add(1, {"service": self._service, "outcome": error.kind.name.lower()})
                log.warning(
                    "a worker's tokenizer is unusable: %s", error.message,
                    extra={"model": model.name, "worker": served.address},
                )  # fmt: skip
                model.problem = error.message
                if error.code == CODE and not model.requested:
                    model.unaffordable = True
                    break  # its next request retries
            self._changed.set()
            model.resting = True
            try:
                await asyncio.sleep(retry_s * random.uniform(0.5, 1.5))
                if model.loaded is None and self._is_full():
                    break  # its next request retries
            finally:
                model.resting = False
            retry_s = min(2 * retry_s, RETRY_S[1])
        partly, model.partly = model.partly, None
        if partly is not None and model.loaded is None:
            await self._host.remove(partly)

    async def _load_from(self, model: DiscoveryState, served: ServedModel) -> None:
        path = await self._files.hold(served)
        known = served.processor in (*PROCESSORS, *ENGINE_PROCESSORS)  # a custom class would be code from outside
        spec = ModelSpec(model.name, str(path), served.processor if known else "", *served.declared, learned=True)
        loading = DiscoveredModel(spec, served.engine, served.fingerprint)
        try:
            await self._make_room(model, served, await asyncio.to_thread(self._memory.estimate, path))
            model.partly = loading
            await self._host.add(loading)
        except BaseException:
            if model.loaded is None:
                self._memory.release(model.name)
            await self._files.release(served.fingerprint)
            raise
        model.partly = None
        before, model.loaded = model.loaded, loading
        if before is not None:
            await self._files.release(before.fingerprint, True)
        self._changed.set()
        log.info("model was discovered from its worker", extra={"model": model.name, "worker": served.address})

    async def _make_room(self, model: DiscoveryState, served: ServedModel, size: int) -> None:
        """Reserves memory for a model's tokenizer, after ending the least recently used ones if requests wait for it.

        Raises:
            SluiceError: OVERLOADED when it does not fit.
        """
        key = served.fingerprint, served.chat_template
        while not self._memory.try_reserve(model.name, key, size):
            candidates = self._least_used() if model.requested else iter(self._leaving())
            victim = next((other for other in candidates if other is not model and other.idle), None)
            if victim is None or not self._memory.fits(size):
                raise self._memory.refuse(model.name, size)
            await asyncio.wait([self._unload(victim)])
