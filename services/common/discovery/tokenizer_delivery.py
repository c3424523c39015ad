"""Discovers models from the workers that serve them and fetches their tokenizers, so no shared volume is needed.

workers registered with a router (or listed) → for each model not configured: GetTokenizer → store → on_model
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from pydantic import Field
from pydantic_settings import BaseSettings

from services.common.discovery.tokenizer_store import IncomingTokenizer, TokenizerStore, default_folder
from services.common.discovery.worker_watch import ServedModel, WorkerWatch
from services.common.errors import ErrorKind, SluiceError, invalid, unavailable
from services.common.models import ENGINE_PROCESSORS, PROCESSORS, ModelSpec
from services.common.observability.instruments import Counter
from services.common.observability.process_metrics import FETCHES
from services.common.rpc.channels import open_channel
from services.common.rpc.errors import from_rpc_error
from services.common.security.identity import WORKER
from services.common.settings import AddressList
from services.common.tasks import TaskOwner
from sluice.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

FETCH_S = 120.0
FETCHES_AT_ONCE = 16
HOLD_ATTEMPTS = 3
RETRY_S = (0.2, 10.0)
UNKNOWN_MODEL_S = 1.0
FAILED_S = 5.0
"""Maximum wait of a request for a model whose tokenizer failed to load moments ago, seconds."""
ROUTER_S = 3.0
CATCH_UP_S = 120.0


class DeliverySettings(BaseSettings):
    """Where models that are not configured come from."""

    routers: AddressList = Field(
        [], description="host:port of routers; the models of their workers are served without being listed in --models"
    )
    workers: AddressList = Field(
        [], description="host:port of workers whose models are served; for use without a router"
    )
    tokenizer_cache: Path = Field(
        default_factory=default_folder,
        description="folder for tokenizers received from workers; may be shared and persistent",
    )
    tokenizer_cache_mb: int = Field(
        4096,
        ge=64,
        description="maximum size of the tokenizer cache folder, MiB; least recently used ones are removed first",
    )
    max_tokenizer_mb: int = Field(
        64, ge=1, le=4096, description="maximum total size of the tokenizer files sent by a worker, MiB"
    )
    max_learned_models: int = Field(
        1024,
        ge=1,
        description="maximum number of loaded models that were discovered from workers; a request for another one "
        "replaces the least recently used, those without workers first",
    )
    model_grace_s: float = Field(
        300.0,
        ge=0,
        description="seconds a model discovered from workers stays loaded after its last worker has left",
    )

    @property
    def learns(self) -> bool:
        """Whether models are discovered from workers."""
        return bool(self.routers or self.workers)


@dataclass(frozen=True)
class DiscoveredModel:
    """A model served by a worker, with its tokenizer on the local disk; `engine` is what the worker runs."""

    spec: ModelSpec
    engine: str
    fingerprint: str

    @property
    def declared(self) -> tuple[str, str, str]:
        """The chat template, tool parser and reasoning parser, as `ServedModel.declared`."""
        return self.spec.chat_template, self.spec.tool_parser, self.spec.reasoning_parser


@dataclass(frozen=True)
class RetainedModel:
    """Limits of discovered models: their number, and the seconds one stays without workers; see DeliverySettings."""

    models: int = 1024
    grace_s: float = 300.0


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
        self._learned: dict[str, DiscoveredModel] = {}
        self._failed: dict[str, DiscoveredModel] = {}  # may be partly loaded
        self._leaving: dict[str, asyncio.TimerHandle] = {}  # grace timers, in the order of losing the last worker
        self._given_up: dict[str, str] = {}  # reason by model; empty: too many models
        self._fetching: dict[str, asyncio.Task[None]] = {}  # being loaded or ended
        self._resting: set[str] = set()  # of those, the ones sleeping before a retry
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
            if served and model not in self._fetching:
                self._learn_for_request(model)
            if served and self._given_up.get(model):
                deadline = min(deadline, loop.time() + FAILED_S)
            remaining_s = (deadline if served or not self._watch.synced else unknown_deadline) - loop.time()
            if remaining_s <= 0:
                if served:
                    raise self._not_in_time(model)
                return False
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), remaining_s)
            except TimeoutError:
                continue
        return True

    def _not_in_time(self, model: str) -> SluiceError:
        reason = self._given_up.get(model)
        return unavailable(
            f"The tokenizer of model {model!r} is not loaded{f': {reason}' if reason else ' yet; retry shortly.'}",
            code="model_loading",
        )

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
        self._update_leaving(served.keys())
        for model, workers in served.items():
            if model in self._configured or model in self._fetching or self._is_current(model, workers):
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
            await self._end(model, self._learned.pop(model))

    async def _end(self, model: str, learned: DiscoveredModel) -> None:
        if (timer := self._leaving.pop(model, None)) is not None:
            timer.cancel()
        await self._on_gone(learned)
        returns = bool(self._watch.of_model(model))  # it may be loaded again by its next request
        await asyncio.to_thread(self._store.release, learned.fingerprint, not returns)
        log.info("model is no longer served and was unloaded", extra={"model": model})

    def _ended(self, model: str, task: asyncio.Task[None]) -> None:
        self._fetching.pop(model, None)
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
        known = served.processor in (*PROCESSORS, *ENGINE_PROCESSORS)  # a custom class would be code from outside
        spec = ModelSpec(served.model, str(path), served.processor if known else "", *served.declared, learned=True)
        learned = DiscoveredModel(spec, served.engine, served.fingerprint)
        try:
            await self._on_model(learned)
        except BaseException:
            self._store.release(served.fingerprint)
            self._failed[served.model] = learned
            raise
        self._failed.pop(served.model, None)
        before, self._learned[served.model] = self._learned.get(served.model), learned
        if before is not None:
            await asyncio.to_thread(self._store.release, before.fingerprint, True)
        self._changed.set()
        log.info("model was discovered from its worker", extra={"model": served.model, "worker": served.address})

    async def _held_files(self, served: ServedModel) -> Path:
        """Returns a worker's tokenizer files, fetched if necessary; retained until released from the store."""
        for _ in range(HOLD_ATTEMPTS):
            if self._store.hold(served.fingerprint):
                path = await asyncio.to_thread(self._store.find, served.fingerprint)
                if path is not None:
                    return path
                self._store.release(served.fingerprint)
            async with self._fetches_at_once:
                await fetch_tokenizer(served.address, served.fingerprint, self._store, self._credentials, served.callee)
        raise unavailable("The worker's tokenizer is removed as soon as it is stored; raise --tokenizer-cache-mb.")


async def fetch_tokenizer(
    address: str,
    fingerprint: str,
    store: TokenizerStore,
    credentials: grpc.ChannelCredentials | None = None,
    callee: str = WORKER,
) -> Path:
    """Streams a tokenizer's files from a worker, checks and stores them, and returns their path.

    Args:
        callee: selects the bearer token sent to the worker.

    Raises:
        SluiceError: the worker's error; INVALID_ARGUMENT when the content does not match its announcement;
            FAILED_PRECONDITION when it cannot be written to disk.
    """
    channel = open_channel(address, credentials, callee=callee)
    incoming: IncomingTokenizer | None = None
    try:
        stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
        incoming = await asyncio.to_thread(store.receive, fingerprint)
        first = True
        async for chunk in stub.GetTokenizer(worker_pb2.GetTokenizerRequest(), timeout=FETCH_S):
            if first and chunk.fingerprint != fingerprint:
                raise invalid(
                    "The worker sent a tokenizer with another fingerprint than its card has.", code="bad_tokenizer"
                )
            first = False
            await asyncio.to_thread(incoming.add, chunk.file_name, chunk.file_size, chunk.data)
        path = await asyncio.to_thread(incoming.keep)
        incoming = None
        return path
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, "worker") from error
    except OSError as error:
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION, f"The worker's tokenizer cannot be stored: {error.strerror or error}."
        ) from error
    finally:
        if incoming is not None:
            await asyncio.to_thread(incoming.drop)
        await channel.close()
