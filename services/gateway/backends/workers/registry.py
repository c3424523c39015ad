"""The registered workers, received from a router, and the models they serve."""

from __future__ import annotations

import asyncio
import logging
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import grpc

from services.common.base.errors import MAX_NAME_LENGTH, SluiceError, not_found, quoted, unavailable
from services.common.base.tasks import asked_to_end
from services.common.discovery.handoff_forms import handoff_form_of
from services.common.discovery.tokenizer_agreement import differing_kinds
from services.common.discovery.worker_checks import check_worker
from services.common.rpc.channels import FOREIGN_KEEPALIVE_MS, keepalive_ms_of
from services.common.rpc.replicas import ReplicaSet
from services.gateway.core import context
from services.gateway.core.request import Role
from sluice.v1 import router_pb2, router_pb2_grpc

log = logging.getLogger(__name__)

RETRY_S = 0.5
MAX_REMEMBERED_MODELS = 1024
"""Models remembered after their last worker, for which requests get 503; those of older ones get 404."""
MAX_SET_ASIDE = 1024
"""Workers that are set aside of which the reason is shown; that of further ones is not."""
LOCAL_PREFILL = "local_prefill"
CONFIRM_S = 10.0
"""How long workers are kept while a restarted router receives their registrations again."""


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """A worker that accepts requests.

    Attributes:
        labels: classes of a model that classifies.
        media_differ: kinds of media items of which the worker's model makes other tokens than preprocess: it must get
            none of them.
        keepalive_ms: how long a connection to the worker may be silent before it is pinged.
        source: of the tokenizer's files, which `processor` reads.
        total_blocks: KV-cache blocks of each rank; 0: unknown. `max_sequences` and `max_batched_tokens` likewise.
        chat_template: replaces that of the files; empty: not replaced.
        tool_parser: the one that "auto" selects; empty: detected from the template. `reasoning_parser` likewise.
    """

    worker_id: str
    address: str
    epoch: int
    model: str
    block_size: int
    context_length: int
    vocab_size: int
    capabilities: frozenset[str]
    created_unix_s: int
    fingerprint: str = ""
    prompt_fingerprint: str = ""
    role: Role = Role.AGGREGATED
    eos_token_ids: bytes = b""  # packed u32
    adapters: tuple[str, ...] = ()
    ranks: int = 1  # data-parallel ranks
    labels: tuple[str, ...] = ()
    media_fingerprint: str = ""
    media_differ: frozenset[str] = frozenset()
    keepalive_ms: int = FOREIGN_KEEPALIVE_MS
    source: str = ""
    processor: str = ""
    engine: str = ""
    engine_version: str = ""
    total_blocks: int = 0
    max_sequences: int = 0
    max_batched_tokens: int = 0
    chat_template: str = ""
    tool_parser: str = ""
    reasoning_parser: str = ""

    @property
    def runs_alone(self) -> bool:
        """Whether the worker can run both prefill and decode of a request."""
        return self.role is Role.AGGREGATED or (self.role is Role.DECODE and LOCAL_PREFILL in self.capabilities)

    @property
    def handoff_form(self) -> str:
        """Form of what it hands over to, or takes from, the other half of a pair; empty: unknown."""
        return handoff_form_of(self.engine, self.engine_version)


class RegisteredWorkers(UserDict[str, WorkerEntry]):
    """The registered workers by id; those of one model cost one look-up, however many there are."""

    def __init__(self) -> None:
        self._of_name: dict[str, tuple[WorkerEntry, ...]] = {}  # of names with workers, since the last change
        super().__init__()

    def of_name(self, name: str) -> tuple[WorkerEntry, ...]:
        """Returns all workers of a model or, for the name of a LoRA adapter, those that have loaded it."""
        known = self._of_name.get(name)
        if known is not None:
            return known
        workers = self.values()
        named = [one for one in workers if one.model == name] or [one for one in workers if name in one.adapters]
        if named:
            self._of_name[name] = tuple(named)
        return tuple(named)

    def __setitem__(self, worker_id: str, entry: WorkerEntry) -> None:
        super().__setitem__(worker_id, entry)
        self._of_name.clear()

    def __delitem__(self, worker_id: str) -> None:
        super().__delitem__(worker_id)
        self._of_name.clear()


class WorkerRegistry:
    """Follows the worker list of one router replica, and keeps the last one while no router is available.

    Args:
        on_up: called with each worker that is added or changed.
        on_down: called with the id of each worker that is removed.
        owner: owner of the reservations whose lease is renewed while this runs; empty: none.

    Attributes:
        workers: the registered workers, by id.
        synced: whether a complete list has been received.
        set_aside: model and reason of each registered worker that receives no requests, by id.
    """

    def __init__(
        self,
        routers: ReplicaSet[router_pb2_grpc.RouterAsyncStub],
        on_up: Callable[[WorkerEntry], None],
        on_down: Callable[[str], None],
        owner: str = "",
    ) -> None:
        self._routers = routers
        self._on_up = on_up
        self._on_down = on_down
        self._owner = owner
        self.workers = RegisteredWorkers()
        self.set_aside: dict[str, tuple[str, str]] = {}
        self._remembered_models: dict[str, None] = {}  # ordered by the last change of a worker
        self.synced = False
        self._media_fingerprints: dict[str, str] = {}  # of preprocess, by model
        self._confirmed: set[str] | None = None  # ids of the workers listed by the current router

    @property
    def doubted(self) -> bool:
        """Whether the current router has not yet confirmed all workers."""
        return self._confirmed is not None and not self._confirmed.issuperset(self.workers)

    @property
    def models(self) -> dict[str, WorkerEntry]:
        """One worker of each model that can be served now, by model name; the same one that `model` returns."""
        by_name = {entry.model: entry for entry in reversed([*self.workers.values()])}
        return {name: by_name[name] for name in sorted(by_name)}

    def only_model(self) -> str:
        """Returns the name of the model that can be served now; empty if there are none or several."""
        names = {entry.model for entry in self.workers.values()}
        return names.pop() if len(names) == 1 else ""

    @property
    def adapters(self) -> dict[str, WorkerEntry]:
        """One worker of each LoRA adapter that requests can name as model; the same one that `model` returns."""
        by_name = {name: entry for entry in reversed([*self.workers.values()]) for name in entry.adapters}
        return {name: by_name[name] for name in sorted(by_name.keys() - self.models.keys())}

    def model(self, name: str) -> WorkerEntry:
        """Returns a worker of a model, or of the model of a LoRA adapter.

        Raises:
            SluiceError: NOT_FOUND for an unknown model, with the names of the models that the request's key may use;
                UNAVAILABLE when a known model has no workers.
        """
        if found := self.of_model(name):
            return found[0]
        if name in self._remembered_models or not self.synced:
            raise unavailable(f"No worker serves model {quoted(name)} now; try again later.", code="no_workers")
        if not self.workers and not self._remembered_models:
            raise unavailable("No worker has registered yet; try again later.", code="no_workers")
        names = sorted({entry.model for entry in self.workers.values()} | set(self._remembered_models))
        known = ", ".join(filter(context.current().permit.may_use, names))
        available = f"; available: {known}" if known else ""
        raise not_found(f"The model {quoted(name)} does not exist{available}.", param="model", code="model_not_found")

    def of_model(self, name: str) -> Sequence[WorkerEntry]:
        """Returns all workers of a model or, for the name of a LoRA adapter, those that have loaded it."""
        return self.workers.of_name(name)

    def has_capability(self, model: str, capability: str) -> bool:
        """Returns whether any worker that serves the model has a capability."""
        return any(capability in worker.capabilities for worker in self.of_model(model))

    def compare_media(self, fingerprints: Mapping[str, str]) -> None:
        """Excludes from media items the workers whose media fingerprint differs from that of preprocess.

        Args:
            fingerprints: those of preprocess, by model. Models that it lacks keep the last one known.
        """
        kept = {name: value for name, value in self._media_fingerprints.items() if name in self._remembered_models}
        self._media_fingerprints = {**kept, **fingerprints}
        self.workers.update({name: self._compared(entry) for name, entry in self.workers.items()})

    def _compared(self, entry: WorkerEntry) -> WorkerEntry:
        known = self.workers.get(entry.worker_id)
        differ = differing_kinds(self._media_fingerprints.get(entry.model, ""), entry.media_fingerprint)
        if differ and (known is None or known.media_differ != differ):
            log.warning(
                "preprocess and a worker make different tokens of media items; the worker gets none of these kinds",
                extra={"worker": entry.worker_id, "model": entry.model, "kinds": ",".join(sorted(differ))},
            )
        return entry if entry.media_differ == differ else replace(entry, media_differ=differ)

    async def run(self) -> None:
        """Follows the worker list until cancelled."""
        while True:
            try:
                await self._follow()
            except grpc.aio.AioRpcError as error:
                log.info("stream of the router's worker list failed", extra={"status": error.code().name})
            except asyncio.CancelledError:
                if asked_to_end():
                    raise  # otherwise the channel to a removed router was closed
            except SluiceError:
                pass  # no router is available, which `degraded` and /ready report
            await asyncio.sleep(RETRY_S)

    async def _follow(self) -> None:
        stub = self._routers.pick().stub
        confirmed: set[str] = set()
        self.set_aside.clear()
        loop, synced = asyncio.get_running_loop(), False
        async for change in stub.WatchWorkers(router_pb2.WatchWorkersRequest(owner=self._owner)):
            self._note_set_aside(change.worker)
            if change.kind == router_pb2.WorkerChange.KIND_UP:
                if self._add(change.worker):
                    confirmed.add(change.worker.worker_id)
            elif change.kind == router_pb2.WorkerChange.KIND_DOWN:
                self._down(change.worker.worker_id)
            elif change.kind == router_pb2.WorkerChange.KIND_SYNCED and not synced:
                synced = self.synced = True
                self._confirmed = confirmed
                if self.doubted:
                    loop.call_later(CONFIRM_S, self._drop_unconfirmed, confirmed)

    def _note_set_aside(self, worker: router_pb2.WorkerInfo) -> None:
        self.set_aside.pop(worker.worker_id, None)
        if worker.set_aside and len(self.set_aside) < MAX_SET_ASIDE:
            self.set_aside[worker.worker_id] = worker.card.model[:MAX_NAME_LENGTH], worker.set_aside[:MAX_NAME_LENGTH]

    def _drop_unconfirmed(self, confirmed: set[str]) -> None:
        if confirmed is self._confirmed:  # otherwise another router is followed by now
            for worker_id in self.workers.keys() - confirmed:
                self._down(worker_id)

    def _add(self, worker: router_pb2.WorkerInfo) -> bool:
        """Adds a worker; returns False and removes it if its role is unknown or its registration is invalid."""
        try:
            entry = _entry(worker)
        except (ValueError, SluiceError) as error:
            _warn_ignored(worker.worker_id[:MAX_NAME_LENGTH], worker.epoch, str(error))
            self._down(worker.worker_id)  # its previous registration
            return False
        self._up(entry)
        return True

    def _up(self, entry: WorkerEntry) -> None:
        entry = self._compared(entry)
        if self.workers.get(entry.worker_id) == entry:
            return
        self.workers[entry.worker_id] = entry
        self._remember(entry.model)
        log.info("worker is up", extra={"worker": entry.worker_id, "address": entry.address, "model": entry.model})
        self._on_up(entry)

    def _remember(self, model: str) -> None:
        """Remembers the name of a model, and evicts the least recently changed one beyond the limit."""
        self._remembered_models.pop(model, None)
        self._remembered_models[model] = None
        if len(self._remembered_models) > MAX_REMEMBERED_MODELS:
            del self._remembered_models[next(iter(self._remembered_models))]

    def _down(self, worker_id: str) -> None:
        entry = self.workers.pop(worker_id, None)
        if entry is not None:
            self._remember(entry.model)
            log.info("worker is down", extra={"worker": worker_id})
            self._on_down(worker_id)


@lru_cache(maxsize=1_024)  # logs once per worker, because every new stream of the router lists all workers again
def _warn_ignored(worker_id: str, epoch: int, reason: str) -> None:
    log.warning("worker ignored: %s", reason, extra={"worker": worker_id, "epoch": epoch})


def _entry(worker: router_pb2.WorkerInfo) -> WorkerEntry:
    card = worker.card
    check_worker(worker.worker_id, worker.address, card)
    return WorkerEntry(
        worker_id=worker.worker_id,
        address=worker.address,
        epoch=worker.epoch,
        model=card.model,
        block_size=card.block_size,
        context_length=card.context_length,
        vocab_size=card.vocab_size,
        capabilities=frozenset(card.capabilities),
        created_unix_s=card.created_unix_s,
        fingerprint=card.tokenizer.fingerprint,
        prompt_fingerprint=card.tokenizer.prompt_fingerprint,
        media_fingerprint=card.tokenizer.media_fingerprint,
        role=Role(worker.role or Role.AGGREGATED),
        eos_token_ids=card.eos_token_ids,
        adapters=tuple(card.adapters),
        ranks=max(card.data_parallel_size, 1),
        labels=tuple(card.labels),
        keepalive_ms=keepalive_ms_of(card.min_ping_interval_ms),
        source=card.tokenizer.source,
        processor=card.tokenizer.processor,
        engine=worker.engine,
        engine_version=worker.engine_version,
        total_blocks=card.total_blocks,
        max_sequences=card.max_sequences,
        max_batched_tokens=card.max_batched_tokens,
        chat_template=card.chat_template,
        tool_parser=card.tool_parser,
        reasoning_parser=card.reasoning_parser,
    )
