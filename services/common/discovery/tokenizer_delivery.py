"""Models learned from the workers that serve them, their tokenizers fetched from there: nobody needs a shared volume.

workers a router knows (or addresses) → for each model nobody configured: GetTokenizer → store → on_model
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
HEARSAY_S = 1.0
FAILED_S = 5.0
"""Longest that a request waits for a model whose tokenizer could not be used a moment ago."""
ROUTER_S = 3.0
CATCH_UP_S = 120.0


class DeliverySettings(BaseSettings):
    """Where models come from that are not configured."""

    routers: AddressList = Field(
        [], description="host:port of routers whose workers' models are served without --models"
    )
    workers: AddressList = Field(
        [], description="host:port of workers whose models are served, where there is no router"
    )
    tokenizer_cache: Path = Field(
        default_factory=default_folder, description="folder for tokenizers that workers sent; may be shared and kept"
    )
    tokenizer_cache_mb: int = Field(
        4096, ge=64, description="most that the tokenizers in that folder take, MiB; the least recently used go first"
    )
    max_tokenizer_mb: int = Field(
        64, ge=1, le=4096, description="largest tokenizer that a worker may send, all its files together, MiB"
    )
    max_learned_models: int = Field(
        1024,
        ge=1,
        description="models learned from workers that are loaded at a time; a request for one more has it loaded in "
        "place of the one least recently used, those without workers first",
    )
    model_grace_s: float = Field(
        300.0,
        ge=0,
        description="how long a model learned from workers stays loaded after the last of them has left, seconds",
    )

    @property
    def learns(self) -> bool:
        """Whether models are learned from workers."""
        return bool(self.routers or self.workers)


@dataclass(frozen=True)
class DiscoveredModel:
    """A model of a worker's, with its tokenizer on this machine's disk. `engine` is what the worker runs."""

    spec: ModelSpec
    engine: str
    fingerprint: str

    @property
    def declared(self) -> tuple[str, str, str]:
        """As `ServedModel.declared`."""
        return self.spec.chat_template, self.spec.tool_parser, self.spec.reasoning_parser


@dataclass(frozen=True)
class RetainedModel:
    """How many learned models there may be and how long one stays without workers, see DeliverySettings."""

    models: int = 1024
    grace_s: float = 300.0


async def _nothing_to_end(_: DiscoveredModel) -> None:
    return


class TokenizerDelivery:
    """Follows the workers and learns their models.

    Args:
        service: whose metrics count it.
        watch: says which workers there are.
        store: keeps the tokenizers.
        configured: models that are not learned.
        on_model: takes a model that was learned, or whose tokenizer has changed.
        credentials: for the channels to workers.
        on_gone: ends a model whose workers have been gone for the whole grace period, or which makes room for another.
        staying: bounds the models and their grace period.
        by_use: names of models, the least recently used first; those that it does not name come in the order in which
            they were learned.
    """

    def __init__(
        self,
        service: str,
        watch: WorkerWatch,
        store: TokenizerStore,
        configured: Collection[str],
        on_model: Callable[[DiscoveredModel], Awaitable[None]],
        credentials: grpc.ChannelCredentials | None = None,
        on_gone: Callable[[DiscoveredModel], Awaitable[None]] = _nothing_to_end,
        staying: RetainedModel | None = None,
        by_use: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._watch = watch
        self._store = store
        self._configured = frozenset(configured)
        self._on_model = on_model
        self._credentials = credentials
        self._on_gone = on_gone
        self._staying = staying or RetainedModel()
        self._by_use = by_use
        self._learned: dict[str, DiscoveredModel] = {}
        self._failed: dict[str, DiscoveredModel] = {}  # of which something may be loaded all the same
        self._leaving: dict[str, asyncio.TimerHandle] = {}  # without workers, in the order in which they lost the last
        self._given_up: dict[str, str] = {}  # not learned so far, and what is wrong; empty where there are too many
        self._fetching: dict[str, asyncio.Task[None]] = {}  # learned or ended now
        self._resting: set[str] = set()  # of those, what failed and is tried again later
        self._fetches_at_once = asyncio.Semaphore(FETCHES_AT_ONCE)
        self._tasks = TaskOwner()
        self._news = asyncio.Event()
        watch.on_change = self._look
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
        """Waits until a model is learned, if need be in place of another; False when no worker is known to serve it.

        Raises:
            SluiceError: UNAVAILABLE for a model that is served but not learned in time.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        hearsay = min(deadline, loop.time() + HEARSAY_S)  # the caller may have heard of a worker before we do
        while model not in self._learned:
            served = bool(self._watch.of_model(model))
            if served and model not in self._fetching:
                self._learn_for_request(model)
            if served and self._given_up.get(model):
                deadline = min(deadline, loop.time() + FAILED_S)
            left = (deadline if served or not self._watch.synced else hearsay) - loop.time()
            if left <= 0:
                if served:
                    raise self._not_in_time(model)
                return False
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), left)
            except TimeoutError:
                continue
        return True

    def _not_in_time(self, model: str) -> SluiceError:
        reason = self._given_up.get(model)
        return unavailable(
            f"The tokenizer of model {model!r} is not loaded{f': {reason}' if reason else ' yet; try again soon.'}",
            code="model_loading",
        )

    async def catch_up(self) -> None:
        """Waits until every model that workers serve by now is learned or could not be, `CATCH_UP_S` at most: who takes
        requests earlier has them wait for a tokenizer. A router that does not answer is waited for `ROUTER_S`."""
        try:
            async with asyncio.timeout(ROUTER_S):
                await self._until(lambda: self._watch.synced)
            async with asyncio.timeout(CATCH_UP_S):
                await self._until(lambda: self._watch.models() <= {*self._configured, *self._learned, *self._given_up})
        except TimeoutError:
            log.info("requests are taken before the models of all workers are known")

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._news.clear()
            await self._news.wait()

    def _look(self) -> None:
        """Starts to learn what is new among the workers, and to end what none of them serves any more."""
        self._news.set()
        served = self._watch.by_model()
        self._given_up = {model: reason for model, reason in self._given_up.items() if model in served}
        self._look_who_left(served.keys())
        for model, workers in served.items():
            if model in self._configured or model in self._fetching or self._is_current(model, workers):
                continue
            if model in self._learned or not self._is_full():
                self._begin(model, self._learn(model))
            elif not self._end_first_leaving() and model not in self._given_up:
                log.info("there are too many models; this one is learned when it is used", extra={"model": model})
                self._given_up[model] = ""

    def _learn_for_request(self, model: str) -> None:
        """Learns a served model now; where too many are loaded, once the one least recently used has ended.

        Does nothing while all of them are learned or ended now.
        """
        if not self._is_full():
            self._begin(model, self._learn(model))
        elif (oldest := next(self._least_used(), None)) is not None:
            self._begin(oldest, self._end(oldest, self._learned.pop(oldest)))
            self._begin(model, self._learn(model, self._fetching[oldest]))

    def _least_used(self) -> Iterator[str]:
        """The models that can make room, those without workers first."""
        for model in (*self._leaving, *self._by_use(), *self._learned):
            if model in self._learned and model not in self._fetching:
                yield model

    def _begin(self, model: str, work: Coroutine[None, None, None]) -> None:
        """Learns or ends a model; one of the two at a time."""
        self._given_up.pop(model, None)
        task = self._fetching[model] = self._tasks.spawn(work, f"model-{model}")
        task.add_done_callback(lambda done: self._ended(model, done))

    def _look_who_left(self, served: Collection[str]) -> None:
        loop = asyncio.get_running_loop()
        for model in self._learned:
            timer = self._leaving.get(model)
            if model in served:
                if timer is not None:
                    self._leaving.pop(model).cancel()
            elif timer is None:
                self._leaving[model] = loop.call_later(self._staying.grace_s, self._end_grace, model)

    def _is_full(self) -> bool:
        """Whether no more models may be learned; those that are learned or ended now count as well, those that failed
        and wait for their next try do not."""
        return len(self._learned.keys() | (self._fetching.keys() - self._resting)) >= self._staying.models

    def _end_first_leaving(self) -> bool:
        """Ends the grace of the model that has been without workers longest: another one is looked at when it has gone.
        False where all have workers."""
        first = next((model for model in self._leaving if model not in self._fetching), None)
        if first is not None:
            self._end_grace(first)
        return first is not None

    def _end_grace(self, model: str) -> None:
        self._leaving.pop(model).cancel()
        if model not in self._fetching:  # else it is looked at again when that has ended
            self._begin(model, self._forget(model))

    async def _forget(self, model: str) -> None:
        """Ends a model if it has no workers any more."""
        if model in self._learned and not self._watch.of_model(model):
            await self._end(model, self._learned.pop(model))

    async def _end(self, model: str, learned: DiscoveredModel) -> None:
        if (timer := self._leaving.pop(model, None)) is not None:
            timer.cancel()
        await self._on_gone(learned)
        returns = bool(self._watch.of_model(model))  # with its next request
        await asyncio.to_thread(self._store.release, learned.fingerprint, not returns)
        log.info("a model is not used any more and is ended", extra={"model": model})

    def _ended(self, model: str, task: asyncio.Task[None]) -> None:
        self._fetching.pop(model, None)
        if not task.cancelled() and task.exception() is None:
            self._look()  # what changed meanwhile was passed over

    def _is_current(self, model: str, workers: Sequence[ServedModel]) -> bool:
        known = self._learned.get(model)
        return known is not None and any(
            (served.fingerprint, served.declared) == (known.fingerprint, known.declared) for served in workers
        )

    async def _learn(self, model: str, after: asyncio.Task[None] | None = None) -> None:
        """Tries the model's workers in turn until one has delivered, or none is left, or there are too many models.

        Args:
            model: its name.
            after: makes room for it.
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
                    "a worker's tokenizer cannot be used: %s", error.message,
                    extra={"model": model, "worker": served.address},
                )  # fmt: skip
                self._given_up[model] = error.message
            self._news.set()
            self._resting.add(model)
            try:
                await asyncio.sleep(retry_s * random.uniform(0.5, 1.5))
                if model not in self._learned and self._is_full():
                    break  # the next request for it has it tried again
            finally:
                self._resting.discard(model)
            retry_s = min(2 * retry_s, RETRY_S[1])
        failed = self._failed.pop(model, None)
        if failed is not None and model not in self._learned:
            await self._on_gone(failed)

    async def _learn_from(self, served: ServedModel) -> None:
        path = await self._held_files(served)
        known = served.processor in (*PROCESSORS, *ENGINE_PROCESSORS)  # a class of its own would be code from outside
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
        self._news.set()
        log.info("model is learned from its worker", extra={"model": served.model, "worker": served.address})

    async def _held_files(self, served: ServedModel) -> Path:
        """The files of a worker's tokenizer, fetched if need be. They stay until the store releases them."""
        for _ in range(HOLD_ATTEMPTS):
            if self._store.hold(served.fingerprint):
                path = await asyncio.to_thread(self._store.find, served.fingerprint)
                if path is not None:
                    return path
                self._store.release(served.fingerprint)
            async with self._fetches_at_once:
                await fetch_tokenizer(served.address, served.fingerprint, self._store, self._credentials, served.callee)
        raise unavailable("The worker's tokenizer is removed as soon as it is stored.")


async def fetch_tokenizer(
    address: str,
    fingerprint: str,
    store: TokenizerStore,
    credentials: grpc.ChannelCredentials | None = None,
    callee: str = WORKER,
) -> Path:
    """A tokenizer's files, streamed from a worker, checked and stored.

    Args:
        callee: selects the token that is shown to the worker.

    Raises:
        SluiceError: as the worker said; INVALID_ARGUMENT when what came is not what was announced;
            FAILED_PRECONDITION when the disk does not take it.
    """
    channel = open_channel(address, credentials, callee=callee)
    incoming: IncomingTokenizer | None = None
    try:
        stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
        incoming = await asyncio.to_thread(store.receive, fingerprint)
        first = True
        async for chunk in stub.GetTokenizer(worker_pb2.GetTokenizerRequest(), timeout=FETCH_S):
            if first and chunk.fingerprint != fingerprint:
                raise invalid("The worker sends another tokenizer than its card says.", code="bad_tokenizer")
            first = False
            await asyncio.to_thread(incoming.add, chunk.file_name, chunk.file_size, chunk.data)
        path = await asyncio.to_thread(incoming.keep)
        incoming = None
        return path
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, "worker") from error
    except OSError as error:
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION, f"The worker's tokenizer cannot be kept: {error.strerror or error}."
        ) from error
    finally:
        if incoming is not None:
            await asyncio.to_thread(incoming.drop)
        await channel.close()
