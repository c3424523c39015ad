"""Keeps the worker registered with a router: attaches, and attaches again when the stream is lost."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable, Coroutine

import grpc

from services.common.errors import ErrorKind, SluiceError
from services.common.observability.instruments import Counter, Gauge
from services.common.rpc.errors import from_rpc_error
from services.common.rpc.replicas import Replica, ReplicaSet
from services.worker.kv_events.event_log import KvEventLog
from services.worker.metrics import ATTACHES, ID_TAKEN
from services.worker.registration.attachment import ATTACH_S, LEAVE_S, Attachment
from services.worker.serving.wire import write_card, write_role
from services.worker.serving.worker import Worker
from sluice.v1 import router_pb2, router_pb2_grpc

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 3.0
LEASE_KEY_BYTES = 32
TAKEN = frozenset({"worker_id_taken", "replaced", "stale_epoch"})
"""Codes of routers' errors that mean: another process holds this worker's id."""


class Registration:
    """Tells one router at a time what the worker serves, how it is doing, and what its cache holds.

    While another process holds the worker's id, the worker goes on with what it runs and tries again and again.

    Args:
        worker: started; its epoch and card are registered.
        address: host:port where gateways reach it.
        routers: the replicas to choose from; started and closed by the caller.

    Attributes:
        trouble: code of the error because of which another process has this worker's place; empty: there is none.
    """

    def __init__(
        self,
        worker: Worker,
        address: str,
        routers: ReplicaSet[router_pb2_grpc.RouterAsyncStub],
    ) -> None:
        self._worker = worker
        self._address = address
        self._routers = routers
        self._logs = [KvEventLog(source.rank) for source in worker.engine.kv_event_sources()]
        for kv_log, source in zip(self._logs, worker.engine.kv_event_sources(), strict=True):
            source.subscribe(kv_log.record)
        self._lease_key = secrets.token_bytes(LEASE_KEY_BYTES)  # identifies this process to routers
        self.trouble = ""
        self._attachment: Attachment | None = None
        self._router: Replica[router_pb2_grpc.RouterAsyncStub] | None = None
        self._successor: asyncio.Task[None] | None = None
        self._lost_at = ""
        self._paused = ""
        self._resumed = asyncio.Event()
        self._left = False
        self._done = asyncio.Event()
        self.attached = asyncio.Event()
        self._attaches = Counter(ATTACHES)
        self._taken = Gauge(ID_TAKEN)

    async def run(self) -> None:
        """Runs until `leave`."""
        retry_s = FIRST_RETRY_S
        while not self._left:
            if self._paused:
                await self._resumed.wait()
                continue
            was_attached = await self._attach_once()
            if self._left:
                break
            if self._paused:
                continue
            retry_s = FIRST_RETRY_S if was_attached else min(retry_s * 2, LONGEST_RETRY_S)
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.5))
        self._done.set()

    async def leave(self, reason: str) -> None:
        """Disappears from the routers' answers at once; returns when the router has heard it, within seconds."""
        self._left = True
        self._worker.draining = True
        self._resumed.set()
        if self._attachment is None:
            return
        self._attachment.leave(reason)
        try:
            async with asyncio.timeout(2 * LEAVE_S):
                await self._done.wait()
        except TimeoutError:
            log.warning("the router did not take the goodbye in time")

    def pause(self, reason: str) -> None:
        """Disappears from the routers' answers until `resume`."""
        self._paused = reason
        self._resumed.clear()
        if self._attachment is not None:
            self._attachment.leave(reason)

    def resume(self) -> None:
        """Registers again."""
        self._paused = ""
        self._resumed.set()

    def resync(self) -> bool:
        """Tells the router the whole cache again; False when there is none to tell."""
        if self._attachment is None or not self.attached.is_set():
            return False
        self._attachment.resync()
        return True

    async def refresh(self) -> None:
        """The card changed: registers it on a stream of its own, then gives the old stream up, so that the worker is
        in the routers' answers all the time. When that fails, the ordinary way to attach again follows.
        """
        old, router = self._attachment, self._router
        if old is None or router is None or not self.attached.is_set() or self._left or self._paused:
            return  # the next registration says it anyway
        accepted = asyncio.Event()
        new = self._attachment = self._attach(router, accepted.set)
        self._successor = asyncio.get_running_loop().create_task(self._carry(new, router))
        hearing = asyncio.get_running_loop().create_task(accepted.wait())
        await asyncio.wait((self._successor, hearing), timeout=ATTACH_S, return_when=asyncio.FIRST_COMPLETED)
        hearing.cancel()
        old.drop()

    async def _attach_once(self) -> bool:
        """One attachment from beginning to end, successors included; True when the router had accepted it."""
        try:
            router = self._router = self._pick()
        except SluiceError:
            return False
        router.outstanding += 1
        self._attachment = self._attach(router, lambda: self._accepted(router))
        carrying: Coroutine[None, None, None] | asyncio.Task[None] = self._carry(self._attachment, router)
        try:
            await carrying
            while self._successor is not None:
                carrying, self._successor = self._successor, None
                await carrying
        finally:
            router.outstanding -= 1
            self._attachment = self._router = None
            was_attached = self.attached.is_set()
            self.attached.clear()
        return was_attached

    def _attach(self, router: Replica[router_pb2_grpc.RouterAsyncStub], on_attached: Callable[[], None]) -> Attachment:
        return Attachment(router.stub.Attach(), self._message(), self._logs, self._worker.load, on_attached)

    async def _carry(self, attachment: Attachment, router: Replica[router_pb2_grpc.RouterAsyncStub]) -> None:
        try:
            await attachment.run()
        except grpc.aio.AioRpcError as error:
            self._note_lost(attachment, router, from_rpc_error(error, "router"))
        except SluiceError as error:
            self._note_lost(attachment, router, error)
        except asyncio.CancelledError:
            carrier = asyncio.current_task()
            if carrier is not None and carrier.cancelling():
                raise
            # Not this task but the call was cancelled: its channel is closed once the name of a router is gone.
            gone = SluiceError(ErrorKind.DISCONNECTED, "The stream to the router is gone.")
            self._note_lost(attachment, router, gone)

    def _pick(self) -> Replica[router_pb2_grpc.RouterAsyncStub]:
        """Another router than the one that was lost last, while there is another."""
        others = frozenset({self._lost_at} if self._lost_at else ())
        alone = all(router.address in others for router in self._routers.serving)
        return self._routers.pick(frozenset() if alone else others)

    def _accepted(self, router: Replica[router_pb2_grpc.RouterAsyncStub]) -> None:
        self.attached.set()
        self._attaches.add(1)
        self._set_trouble("")
        log.info("registered with the router", extra={"router": router.address, "worker": self._worker.worker_id})

    def _note_lost(
        self, attachment: Attachment, router: Replica[router_pb2_grpc.RouterAsyncStub], error: SluiceError
    ) -> None:
        if attachment is not self._attachment:
            return  # its successor speaks for the worker now
        self._lost_at = router.address
        if self._left:
            return
        if error.code in TAKEN:
            self._set_trouble(error.code)
        else:
            log.warning("not registered: %s", error.message, extra={"router": router.address})

    def _set_trouble(self, code: str) -> None:
        if bool(code) == bool(self.trouble):
            self.trouble = code
            return
        self.trouble = code
        self._taken.add(1 if code else -1)
        self._worker.phases.aside = "worker id taken" if code else ""
        worker_id = self._worker.worker_id
        if code:
            log.error(
                "another process holds worker id %s: this worker gets no new requests and goes on trying to register; "
                "give each its own --worker-id",
                worker_id,
                extra={"code": code},
            )
        else:
            log.info("this worker holds its id again", extra={"worker": worker_id})

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
            lease_key=self._lease_key,
        )
