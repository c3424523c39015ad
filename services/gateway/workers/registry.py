"""The workers alive, as the router tells them, and which models they serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import grpc

from services.common.discovery.worker_checks import check_worker
from services.common.errors import LONGEST_NAME, SluiceError, not_found, quoted, unavailable
from services.common.rpc.replicas import ReplicaSet
from services.common.tasks import asked_to_end
from services.gateway.admission import permit as permits
from services.gateway.core.request import Role
from sluice.v1 import router_pb2, router_pb2_grpc

log = logging.getLogger(__name__)

REWATCH_S = 0.5
KNOWN_MODELS = 1024
"""Names of models without workers that are remembered, so that they are unavailable (503) and not unknown (404)."""
LOCAL_PREFILL = "local_prefill"
DOUBT_S = 10.0
"""A router that was started anew hears of its workers one after the other; until then they are believed to be there."""


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """A worker that takes requests."""

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
    ranks: int = 1  # data-parallel

    @property
    def runs_alone(self) -> bool:
        """It can compute prompt and answer both."""
        return self.role is Role.AGGREGATED or (self.role is Role.DECODE and LOCAL_PREFILL in self.capabilities)


class WorkerRegistry:
    """Follows one router replica's worker list; keeps the last known one while no router answers.

    Args:
        on_up: called with each worker that appears or changes.
        on_down: called with the id of each worker that is gone.
        owner: whose reservations live as long as this follows; empty for nobody's.
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
        self.workers: dict[str, WorkerEntry] = {}
        self._known_models: dict[str, None] = {}  # the one whose worker came or left last is the last
        self.synced = False
        self._said: set[str] | None = None  # by the router that is followed now

    @property
    def doubted(self) -> bool:
        """Some workers are only believed to be there: the router that is followed now has not spoken of them."""
        return self._said is not None and not self._said.issuperset(self.workers)

    @property
    def models(self) -> dict[str, WorkerEntry]:
        """One worker of each model that can be served now, by model name; the same one as `model` gives."""
        by_name = {entry.model: entry for entry in reversed(self.workers.values())}
        return {name: by_name[name] for name in sorted(by_name)}

    @property
    def adapters(self) -> dict[str, WorkerEntry]:
        """One worker of each LoRA adapter that can be named as the model, by name; the same one as `model` gives."""
        by_name = {name: entry for entry in reversed(self.workers.values()) for name in entry.adapters}
        return {name: by_name[name] for name in sorted(by_name.keys() - self.models.keys())}

    def model(self, name: str) -> WorkerEntry:
        """A worker of this model, or of the model that this LoRA adapter belongs to.

        Raises:
            SluiceError: NOT_FOUND for a model that no worker served lately, with the names of those that the request's
                key may use; UNAVAILABLE when its workers are gone.
        """
        if found := self.of_model(name):
            return found[0]
        if name in self._known_models or not self.synced:
            raise unavailable(f"No worker serves model {quoted(name)} now; try again soon.", code="no_workers")
        if not self.workers and not self._known_models:
            raise unavailable("No worker has registered yet; try again soon.", code="no_workers")
        names = sorted({entry.model for entry in self.workers.values()} | set(self._known_models))
        known = ", ".join(filter(permits.current().may_use, names))
        choice = f"; there is: {known}" if known else ""
        raise not_found(f"The model {quoted(name)} does not exist{choice}.", param="model", code="model_not_found")

    def of_model(self, name: str) -> list[WorkerEntry]:
        """Every worker of a model; where the name is a LoRA adapter's, those that hold it."""
        workers = self.workers.values()
        return [one for one in workers if one.model == name] or [one for one in workers if name in one.adapters]

    async def run(self) -> None:
        """Follows until cancelled."""
        while True:
            try:
                await self._follow()
            except grpc.aio.AioRpcError as error:
                log.info("the router's worker list broke off", extra={"status": error.code().name})
            except asyncio.CancelledError:
                if asked_to_end():
                    raise  # else the channel to a router that left was closed
            except SluiceError:
                pass  # no router is up: `degraded` answers and /ready tell
            await asyncio.sleep(REWATCH_S)

    async def _follow(self) -> None:
        stub = self._routers.pick().stub
        said: set[str] = set()
        loop, synced = asyncio.get_running_loop(), False
        async for change in stub.WatchWorkers(router_pb2.WatchWorkersRequest(owner=self._owner)):
            if change.kind == router_pb2.WorkerChange.KIND_UP:
                if self._take(change.worker):
                    said.add(change.worker.worker_id)
            elif change.kind == router_pb2.WorkerChange.KIND_DOWN:
                self._down(change.worker.worker_id)
            elif change.kind == router_pb2.WorkerChange.KIND_SYNCED and not synced:
                synced = self.synced = True
                self._said = said
                if self.doubted:
                    loop.call_later(DOUBT_S, self._drop_doubted, said)

    def _drop_doubted(self, said: set[str]) -> None:
        if said is self._said:  # else another router is followed since
            for worker_id in self.workers.keys() - said:
                self._down(worker_id)

    def _take(self, worker: router_pb2.WorkerInfo) -> bool:
        """Takes a registered worker; one of an unknown role, or with names that cannot be, gets no requests."""
        try:
            entry = _entry(worker)
        except (ValueError, SluiceError) as error:
            _say_left_out(worker.worker_id[:LONGEST_NAME], worker.epoch, str(error))
            self._down(worker.worker_id)  # what it was before
            return False
        self._up(entry)
        return True

    def _up(self, entry: WorkerEntry) -> None:
        if self.workers.get(entry.worker_id) == entry:
            return
        self.workers[entry.worker_id] = entry
        self._remember(entry.model)
        log.info("worker is up", extra={"worker": entry.worker_id, "address": entry.address, "model": entry.model})
        self._on_up(entry)

    def _remember(self, model: str) -> None:
        """Keeps a model's name; the one that was seen least recently is forgotten for it."""
        self._known_models.pop(model, None)
        self._known_models[model] = None
        if len(self._known_models) > KNOWN_MODELS:
            del self._known_models[next(iter(self._known_models))]

    def _down(self, worker_id: str) -> None:
        entry = self.workers.pop(worker_id, None)
        if entry is not None:
            self._remember(entry.model)
            log.info("worker is down", extra={"worker": worker_id})
            self._on_down(worker_id)


@lru_cache(maxsize=1_024)  # remembering it says it once: whenever a router is followed anew, it tells of every worker
def _say_left_out(worker_id: str, epoch: int, reason: str) -> None:
    log.warning("a worker is left out: %s", reason, extra={"worker": worker_id, "epoch": epoch})


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
        role=Role(worker.role or Role.AGGREGATED),
        eos_token_ids=card.eos_token_ids,
        adapters=tuple(card.adapters),
        ranks=max(card.data_parallel_size, 1),
    )
