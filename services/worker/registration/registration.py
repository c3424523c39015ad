"""Keeps the worker registered with a router and reattaches when the stream is lost."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable, Coroutine, Mapping

import grpc

from services.common.base.errors import ErrorKind, SluiceError
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
MAX_RETRY_S = 3.0
"""Seconds between two attempts to register with a router."""
LEASE_KEY_BYTES = 32
TAKEN = frozenset({"worker_id_taken", "replaced", "stale_epoch"})
"""Error codes of routers which mean that another process holds this worker's id."""


class Registration:
    """Sends the worker's card, load and cache events to one router at a time.

    While another process holds the worker's id, the worker serves its running requests and keeps retrying.

    Args:
        worker: already started; its epoch and card are registered.
        address: host:port at which gateways reach the worker.
        routers: replicas to choose from; started and closed by the caller.
        http_address: host:port of the engine's own HTTP server; empty: none.
        labels: names and values given by the operator.

    Attributes:
        trouble: error code while another process holds the worker's id; otherwise empty.
        attached: set while a router has accepted the registration.
    """

    def __init__(
        self,
        worker: Worker,
        address: str,
        routers: ReplicaSet[router_pb2_grpc.RouterAsyncStub],
        http_address: str = "",
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._worker = worker
        self._http_address = http_address
        self._labels = labels or {}
        self._address = address
        self._routers = routers
        self._logs = [KvEventLog(source.rank) for source in worker.engine.kv_event_sources()]
        for kv_log, source in zip(self._logs, worker.engine.kv_event_sources(), strict=True):
            source.subscribe(kv_log.record)
        self._lease_key = secrets.token_bytes(LEASE_KEY_BYTES)  # proves to routers that messages are from this process
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
            retry_s = FIRST_RETRY_S if was_attached else min(retry_s * 2, MAX_RETRY_S)
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.5))
        self._done.set()

    async def leave(self, reason: str) -> None:
        """Deregisters the worker; returns when the router has confirmed, or after a few seconds."""
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
            log.warning("router did not confirm the deregistration in time")

    def pause(self, reason: str) -> None:
        """Deregisters the worker until `resume`."""
        self._paused = reason
        self._resumed.clear()
        if self._attachment is not None:
            self._attachment.leave(reason)

    def resume(self) -> None:
        """Registers again."""
        self._paused = ""
        self._resumed.set()

    def resync(self) -> bool:
        """Sends a cache snapshot to the router; returns False when the worker is not registered."""
        if self._attachment is None or not self.attached.is_set():
            return False
        self._attachment.resync()
        return True

    async def refresh(self) -> None:
        """Registers a changed card on a new stream before closing the old one, so that the worker stays registered.

        When that fails, `run` reattaches as after any lost stream.
        """
        old, router = self._attachment, self._router
        if old is None or router is None or not self.attached.is_set() or self._left or self._paused:
            return  # the next registration includes the new card
        accepted = asyncio.Event()
        new = self._attachment = self._attach(router, accepted.set)
        self._successor = asyncio.get_running_loop().create_task(self._run_attachment(new, router))
        accepting = asyncio.get_running_loop().create_task(accepted.wait())
        await asyncio.wait((self._successor, accepting), timeout=ATTACH_S, return_when=asyncio.FIRST_COMPLETED)
        accepting.cancel()
        old.drop()

    async def _attach_once(self) -> bool:
        """Runs one attachment and its successors to the end; returns True when the router had accepted it."""
        try:
            router = self._router = self._pick()
        except SluiceError:
            return False
        router.outstanding += 1
        self._attachment = self._attach(router, lambda: self._accepted(router))
        current: Coroutine[None, None, None] | asyncio.Task[None] = self._run_attachment(self._attachment, router)
        try:
            await current
            while self._successor is not None:
                current, self._successor = self._successor, None
                await current
        finally:
            router.outstanding -= 1
            self._attachment = self._router = None
            was_attached = self.attached.is_set()
            self.attached.clear()
        return was_attached

    def _attach(self, router: Replica[router_pb2_grpc.RouterAsyncStub], on_attached: Callable[[], None]) -> Attachment:
        return Attachment(router.stub.Attach(), self._message(), self._logs, self._worker.load, on_attached)

    async def _run_attachment(self, attachment: Attachment, router: Replica[router_pb2_grpc.RouterAsyncStub]) -> None:
        try:
            await attachment.run()
        except grpc.aio.AioRpcError as error:
            self._note_lost(attachment, router, from_rpc_error(error, "router"))
        except SluiceError as error:
            self._note_lost(attachment, router, error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The call was cancelled, not this task: a channel is closed when its router's name no longer resolves.
            closed = SluiceError(ErrorKind.DISCONNECTED, "The stream to the router was closed.")
            self._note_lost(attachment, router, closed)

    def _pick(self) -> Replica[router_pb2_grpc.RouterAsyncStub]:
        """Picks a router other than the one lost last, if there is another."""
        excluded = frozenset({self._lost_at} if self._lost_at else ())
        only_excluded = all(router.address in excluded for router in self._routers.serving)
        return self._routers.pick(frozenset() if only_excluded else excluded)

    def _accepted(self, router: Replica[router_pb2_grpc.RouterAsyncStub]) -> None:
        self.attached.set()
        self._attaches.add(1)
        self._set_trouble("")
        log.info("registered with the router", extra={"router": router.address, "worker": self._worker.worker_id})

    def _note_lost(
        self, attachment: Attachment, router: Replica[router_pb2_grpc.RouterAsyncStub], error: SluiceError
    ) -> None:
        if attachment is not self._attachment:
            return  # a successor has replaced it
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
        self._worker.phases.warning = "worker id taken" if code else ""
        worker_id = self._worker.worker_id
        if code:
            log.error(
                "another process holds worker id %s; this worker receives no new requests and keeps retrying; "
                "give every worker a unique --worker-id",
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
            http_address=self._http_address,
            labels=self._labels,
            named_by_server=config.named_by_server,
        )
