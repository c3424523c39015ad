"""Which workers serve which models, as a router tells or as the workers themselves do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from services.common.discovery.worker_checks import check_worker
from services.common.errors import SluiceError
from services.common.rpc.channels import open_channel
from services.common.rpc.replicas import ReplicaSet
from services.common.security.identity import WORKER
from services.common.tasks import TaskOwner, asked_to_end
from sluice.v1 import common_pb2, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

AGAIN_S = 0.5
ASK_EVERY_S = 5.0
ASK_S = 5.0


@dataclass(frozen=True)
class ServedModel:
    """What a worker serves: where it is, and what the other services need of its model.

    `callee` selects the token that is shown to it: ``worker/ID``, or ``worker`` where only its address is known.
    """

    address: str
    model: str
    processor: str
    fingerprint: str
    engine: str
    chat_template: str = ""
    tool_parser: str = ""
    reasoning_parser: str = ""
    callee: str = WORKER

    @property
    def declared(self) -> tuple[str, str, str]:
        """What the card says of prompts and answers beside the tokenizer's files."""
        return self.chat_template, self.tool_parser, self.reasoning_parser


class WorkerWatch:
    """The workers now; the last known ones while no router answers.

    Args:
        routers: started and closed by the caller; None asks the workers themselves.
        addresses: workers that are asked themselves.
        credentials: for the channels to workers.

    Attributes:
        on_change: called after every change.
        synced: everything alive at the start is known.
    """

    def __init__(
        self,
        routers: ReplicaSet[router_pb2_grpc.RouterAsyncStub] | None,
        addresses: Sequence[str] = (),
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._routers = routers
        self._addresses = addresses
        self._credentials = credentials
        self._served: dict[str, ServedModel] = {}
        self._asked: set[str] = set()
        self._synced_router = routers is None
        self.on_change: Callable[[], None] = lambda: None

    @property
    def synced(self) -> bool:
        return self._synced_router and self._asked >= set(self._addresses)

    def models(self) -> set[str]:
        """Names of the models that are served."""
        return {served.model for served in self._served.values()}

    def of_model(self, model: str) -> list[ServedModel]:
        """The workers that serve a model."""
        return [served for served in self._served.values() if served.model == model]

    def by_model(self) -> dict[str, list[ServedModel]]:
        """The workers of every model that is served."""
        found: dict[str, list[ServedModel]] = {}
        for served in self._served.values():
            found.setdefault(served.model, []).append(served)
        return found

    async def run(self) -> None:
        """Follows until cancelled."""
        tasks = TaskOwner()
        try:
            asking = [tasks.spawn(self._keep_asking(address), f"ask-{address}") for address in self._addresses]
            if self._routers is not None:
                asking.append(tasks.spawn(self._keep_following(self._routers), "follow-router"))
            await asyncio.gather(*asking)
        finally:
            await tasks.close()

    async def _keep_following(self, routers: ReplicaSet[router_pb2_grpc.RouterAsyncStub]) -> None:
        while True:
            try:
                await self._follow(routers)
            except grpc.aio.AioRpcError as error:
                log.info("the router's worker list broke off", extra={"status": error.code().name})
            except asyncio.CancelledError:
                if asked_to_end():
                    raise  # else the channel to a router that left was closed
            except SluiceError:
                pass  # no router is up yet: what is known stays
            await asyncio.sleep(AGAIN_S)

    async def _follow(self, routers: ReplicaSet[router_pb2_grpc.RouterAsyncStub]) -> None:
        said: set[str] = set()
        first = True
        async for change in routers.pick().stub.WatchWorkers(router_pb2.WatchWorkersRequest()):
            worker = change.worker
            if change.kind == router_pb2.WorkerChange.KIND_UP:
                said.add(worker.worker_id)
                self._take(worker)
            elif change.kind == router_pb2.WorkerChange.KIND_DOWN:
                self._served.pop(worker.worker_id, None)
            elif change.kind == router_pb2.WorkerChange.KIND_SYNCED and first:
                first = False
                self._synced_router = True
                for gone in self._served.keys() - said - set(self._addresses):
                    del self._served[gone]
            self.on_change()

    def _take(self, worker: router_pb2.WorkerInfo) -> None:
        try:
            check_worker(worker.worker_id, worker.address, worker.card)
        except SluiceError as error:
            self._served.pop(worker.worker_id, None)  # what it was before
            log.warning("a worker is left out: %s", error.message)
            return
        callee = f"{WORKER}/{worker.worker_id}"
        self._served[worker.worker_id] = _served(worker.address, worker.card, worker.engine, callee)

    async def _keep_asking(self, address: str) -> None:
        channel = open_channel(address, self._credentials, callee=WORKER)
        stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
        try:
            while True:
                try:
                    info = await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=ASK_S)
                    if info.card.model:
                        check_worker(info.worker_id, address, info.card)
                        self._served[address] = _served(address, info.card, info.engine)
                    else:  # it is still starting
                        self._served.pop(address, None)
                except grpc.aio.AioRpcError as error:
                    self._served.pop(address, None)  # it may be back soon: a model outlives its workers for a while
                    log.debug("a worker does not answer", extra={"worker": address, "status": error.code().name})
                except SluiceError as error:
                    self._served.pop(address, None)
                    log.warning("a worker is left out: %s", error.message, extra={"worker": address})
                self._asked.add(address)
                self.on_change()
                await asyncio.sleep(ASK_EVERY_S if address in self._served else AGAIN_S)
        finally:
            await channel.close()


def _served(address: str, card: common_pb2.ModelCard, engine: str, callee: str = WORKER) -> ServedModel:
    tokenizer = card.tokenizer
    declared = (card.chat_template, card.tool_parser, card.reasoning_parser)
    return ServedModel(address, card.model, tokenizer.processor, tokenizer.fingerprint, engine, *declared, callee)
