"""Tracks which workers serve which models, as reported by a router or by the workers themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from services.common.base.errors import SluiceError
from services.common.base.tasks import TaskOwner, asked_to_end
from services.common.discovery.worker_checks import check_worker
from services.common.rpc.channels import open_channel
from services.common.rpc.replicas import ReplicaSet
from services.common.security.identity import WORKER
from sluice.v1 import common_pb2, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

TOKEN_IDS, TEXT = "token_ids", "text"
RETRY_S = 0.5
POLL_EVERY_S = 5.0
POLL_S = 5.0


@dataclass(frozen=True)
class ServedModel:
    """A worker's model: the worker's address, and what the other services need to serve the model.

    `callee` selects the bearer token sent to the worker: ``worker/ID``, or ``worker`` when only its address is known.
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
        """The card's chat template, tool parser and reasoning parser."""
        return self.chat_template, self.tool_parser, self.reasoning_parser


class WorkerWatch:
    """Tracks the current workers; keeps the last known ones while no router responds.

    Args:
        routers: None to poll workers only.
        addresses: workers to poll directly.
        credentials: for the channels to workers.

    Attributes:
        synced: whether everything alive at the start has been reported.
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
        self._polled: set[str] = set()
        self._synced_router = routers is None

    @property
    def synced(self) -> bool:
        return self._synced_router and self._polled >= set(self._addresses)

    def models(self) -> set[str]:
        """Returns the names of the served models."""
        return {served.model for served in self._served.values()}

    def of_model(self, model: str) -> list[ServedModel]:
        """Returns the workers that serve a model."""
        return [served for served in self._served.values() if served.model == model]

    def by_model(self) -> dict[str, list[ServedModel]]:
        """Returns the workers of each served model."""
        workers: dict[str, list[ServedModel]] = {}
        for served in self._served.values():
            workers.setdefault(served.model, []).append(served)
        return workers

    async def run(self, on_change: Callable[[], None]) -> None:
        """Follows until cancelled; calls `on_change` after every change."""
        tasks = TaskOwner()
        try:
            polls = [tasks.spawn(self._poll(address, on_change), f"poll-{address}") for address in self._addresses]
            if self._routers is not None:
                await self._routers.start()
                polls.append(tasks.spawn(self._keep_following(self._routers, on_change), "follow-router"))
            await asyncio.gather(*polls)
        finally:
            await tasks.close()
            if self._routers is not None:
                await self._routers.close()

    async def _keep_following(
        self, routers: ReplicaSet[router_pb2_grpc.RouterAsyncStub], on_change: Callable[[], None]
    ) -> None:
        while True:
            try:
                await self._follow(routers, on_change)
            except grpc.aio.AioRpcError as error:
                log.info("the router's worker stream ended", extra={"status": error.code().name})
            except asyncio.CancelledError:
                if asked_to_end():
                    raise  # otherwise the channel of a removed router replica was closed
            except SluiceError:
                pass  # no router is up yet: keep the known workers
            await asyncio.sleep(RETRY_S)

    async def _follow(
        self, routers: ReplicaSet[router_pb2_grpc.RouterAsyncStub], on_change: Callable[[], None]
    ) -> None:
        reported: set[str] = set()
        first = True
        async for change in routers.pick().stub.WatchWorkers(router_pb2.WatchWorkersRequest()):
            worker = change.worker
            if change.kind == router_pb2.WorkerChange.KIND_UP:
                reported.add(worker.worker_id)
                self._add(worker)
            elif change.kind == router_pb2.WorkerChange.KIND_DOWN:
                self._served.pop(worker.worker_id, None)
            elif change.kind == router_pb2.WorkerChange.KIND_SYNCED and first:
                first = False
                self._synced_router = True
                for worker_id in self._served.keys() - reported - set(self._addresses):
                    del self._served[worker_id]
            on_change()

    def _add(self, worker: router_pb2.WorkerInfo) -> None:
        try:
            check_worker(worker.worker_id, worker.address, worker.card)
        except SluiceError as error:
            self._served.pop(worker.worker_id, None)  # its previous registration
            log.warning("ignoring an invalid worker: %s", error.message)
            return
        if not _has_tokenizer(worker.card):
            self._served.pop(worker.worker_id, None)
            return
        callee = f"{WORKER}/{worker.worker_id}"
        self._served[worker.worker_id] = _served(worker.address, worker.card, worker.engine, callee)

    async def _poll(self, address: str, on_change: Callable[[], None]) -> None:
        channel = open_channel(address, self._credentials, callee=WORKER)
        stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
        try:
            while True:
                try:
                    info = await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=POLL_S)
                    if info.card.model and _has_tokenizer(info.card):
                        check_worker(info.worker_id, address, info.card)
                        self._served[address] = _served(address, info.card, info.engine)
                    else:  # still starting, or an engine that processes text itself
                        self._served.pop(address, None)
                except grpc.aio.AioRpcError as error:
                    self._served.pop(address, None)  # a model stays loaded for a grace period
                    log.debug("a worker does not respond", extra={"worker": address, "status": error.code().name})
                except SluiceError as error:
                    self._served.pop(address, None)
                    log.warning("ignoring an invalid worker: %s", error.message, extra={"worker": address})
                self._polled.add(address)
                on_change()
                await asyncio.sleep(POLL_EVERY_S if address in self._served else RETRY_S)
        finally:
            await channel.close()


def _has_tokenizer(card: common_pb2.ModelCard) -> bool:
    """Whether the model can be served with a tokenizer; an engine with text in and text out has none."""
    return TOKEN_IDS in card.capabilities or TEXT not in card.capabilities


def _served(address: str, card: common_pb2.ModelCard, engine: str, callee: str = WORKER) -> ServedModel:
    tokenizer = card.tokenizer
    declared = (card.chat_template, card.tool_parser, card.reasoning_parser)
    return ServedModel(address, card.model, tokenizer.processor, tokenizer.fingerprint, engine, *declared, callee)
