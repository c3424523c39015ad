"""Keeps the worker registered with a router: attaches, and attaches again when the stream is lost."""

from __future__ import annotations

import asyncio
import logging
import random

import grpc

from services.common.errors import SluiceError
from services.common.grpc_errors import from_rpc_error
from services.common.replicas import Replica, ReplicaSet
from services.common.telemetry import meter
from services.worker.attach import LEAVE_S, Attachment
from services.worker.cache_log import CacheLog
from services.worker.wire import write_card, write_role
from services.worker.worker import Worker
from sluice.v1 import router_pb2, router_pb2_grpc

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 3.0


class Registration:
    """Tells one router at a time what the worker serves, how it is doing, and what its cache holds.

    Args:
        worker: started; its epoch and card are registered.
        address: host:port where gateways reach it.
        routers: the replicas to choose from; started and closed by the caller.
    """

    def __init__(self, worker: Worker, address: str, routers: ReplicaSet[router_pb2_grpc.RouterAsyncStub]) -> None:
        self._worker = worker
        self._address = address
        self._routers = routers
        self._logs = [CacheLog(source.rank) for source in worker.engine.kv_event_sources()]
        for kv_log, source in zip(self._logs, worker.engine.kv_event_sources(), strict=True):
            source.subscribe(kv_log.record)
        self._attachment: Attachment | None = None
        self._lost_at = ""
        self._left = False
        self._done = asyncio.Event()
        self.attached = asyncio.Event()
        self._attaches = meter("worker").create_counter("sluice_worker_attaches", description="registrations accepted")

    async def run(self) -> None:
        """Runs until `leave`."""
        retry_s = FIRST_RETRY_S
        while not self._left:
            was_attached = await self._attach_once()
            if self._left:
                break
            retry_s = FIRST_RETRY_S if was_attached else min(retry_s * 2, LONGEST_RETRY_S)
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.5))
        self._done.set()

    async def leave(self, reason: str) -> None:
        """Disappears from the routers' answers at once; returns when the router has heard it, within seconds."""
        self._left = True
        self._worker.draining = True
        if self._attachment is None:
            return
        self._attachment.leave(reason)
        try:
            async with asyncio.timeout(2 * LEAVE_S):
                await self._done.wait()
        except TimeoutError:
            log.warning("the router did not take the goodbye in time")

    async def _attach_once(self) -> bool:
        """One attachment from beginning to end; True when the router had accepted it."""
        try:
            router = self._pick()
        except SluiceError:
            return False
        router.outstanding += 1
        self._attachment = Attachment(
            router.stub.Attach(), self._message(), self._logs, self._worker.load, lambda: self._accepted(router)
        )
        try:
            await self._attachment.run()
        except grpc.aio.AioRpcError as error:
            self._note_lost(router, from_rpc_error(error, "router"))
        except SluiceError as error:
            self._note_lost(router, error)
        finally:
            router.outstanding -= 1
            self._attachment = None
            was_attached = self.attached.is_set()
            self.attached.clear()
        return was_attached

    def _pick(self) -> Replica[router_pb2_grpc.RouterAsyncStub]:
        """Another router than the one that was lost last, while there is another."""
        others = frozenset({self._lost_at} if self._lost_at else ())
        alone = all(router.address in others for router in self._routers.serving)
        return self._routers.pick(frozenset() if alone else others)

    def _accepted(self, router: Replica[router_pb2_grpc.RouterAsyncStub]) -> None:
        self.attached.set()
        self._attaches.add(1)
        log.info("registered with the router", extra={"router": router.address, "worker": self._worker.worker_id})

    def _note_lost(self, router: Replica[router_pb2_grpc.RouterAsyncStub], error: SluiceError) -> None:
        self._lost_at = router.address
        if not self._left:
            log.warning("not registered: %s", error.message, extra={"router": router.address})

    def _message(self) -> router_pb2.Registration:
        config = self._worker.config
        return router_pb2.Registration(
            worker_id=self._worker.worker_id,
            address=self._address,
            epoch=self._worker.epoch,
            card=write_card(config, self._worker.loaded_unix_s),
            role=write_role(config.role),
            engine=config.engine,
            engine_version=config.engine_version,
        )
