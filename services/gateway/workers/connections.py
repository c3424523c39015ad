"""The links to every worker and every postprocess replica, kept in step with who is there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

import grpc

from services.common.budgets import Budget
from services.common.errors import ErrorKind, SluiceError, unavailable
from services.common.rpc.channels import open_channel
from services.common.rpc.least_loaded import idlest
from services.common.rpc.replicas import ReplicaSet
from services.common.tasks import TaskOwner
from services.gateway.clients.postprocess_link import PostLink
from services.gateway.clients.worker_link import BATCH_TOKENS, MOST_START_BYTES, WorkerEvents, WorkerLink
from services.gateway.workers.registry import WorkerEntry
from sluice.v1 import postprocess_pb2_grpc

log = logging.getLogger(__name__)

SWEEP_S = 1.0
LOOK_AGAIN_S = 0.05


class PostprocessLinks(Protocol):
    """The links to postprocess replicas, and the streams on them."""

    links: dict[str, PostLink]

    def best(self) -> PostLink | None:
        """Returns a link that takes new streams, if there is one."""

    def sweep(self) -> None:
        """Ends the streams that have waited too long for a replica."""


class StreamEvents(WorkerEvents, Protocol):
    """Receives what the links deliver."""

    @property
    def texts(self) -> PostprocessLinks: ...

    def on_worker_lost(self, link: WorkerLink, error: SluiceError) -> None:
        """Recovers the streams of a link that was lost."""

    def sweep_overrun(self) -> None:
        """Ends the streams that have run too long."""


class ConnectionManager:
    """Opens a link when a worker or replica appears; a link whose peer left is closed after its last stream."""

    def __init__(
        self,
        postprocess: Sequence[str],
        credentials: grpc.ChannelCredentials | None,
        connect_timeout_s: float,
        streams: StreamEvents,
        tasks: TaskOwner,
        worker_message_bytes: int = MOST_START_BYTES,
        batch_tokens: Budget = BATCH_TOKENS,
    ) -> None:
        self._credentials = credentials
        self._connect_timeout_s = connect_timeout_s
        self._streams = streams
        self._tasks = tasks
        self._worker_message_bytes = worker_message_bytes
        self._batch_tokens = batch_tokens
        self.makes_text = True  # streams are opened on the postprocess replicas
        self._workers: dict[str, WorkerLink] = {}
        self._running: dict[WorkerLink | PostLink, asyncio.Task[None]] = {}
        self._channels: dict[WorkerLink, grpc.aio.Channel] = {}
        self.postprocess: ReplicaSet[postprocess_pb2_grpc.PostprocessAsyncStub] = ReplicaSet(
            "postprocess", postprocess, postprocess_pb2_grpc.PostprocessStub, credentials, self._on_post_change
        )

    def worker_up(self, entry: WorkerEntry) -> None:
        """A worker takes requests."""
        known = self._workers.get(entry.worker_id)
        if known is not None and known.address == entry.address:
            known.retired = False
            return
        if known is not None:
            known.retired = True
        channel = open_channel(entry.address, self._credentials, callee=f"worker/{entry.worker_id}")
        link = WorkerLink(
            entry.worker_id,
            entry.address,
            channel,
            self._connect_timeout_s,
            self._streams,
            self._streams.on_worker_lost,
            self._worker_message_bytes,
            self._batch_tokens,
        )
        self._workers[entry.worker_id] = link
        self._channels[link] = channel
        self._running[link] = self._tasks.spawn(link.run(), f"link-{entry.worker_id}")

    def worker_down(self, worker_id: str) -> None:
        """A worker takes no more requests; what it runs may finish."""
        link = self._workers.pop(worker_id, None)
        if link is not None:
            link.retired = True

    @property
    def connected_workers(self) -> int:
        """How many workers could be given a request now."""
        return sum(link.connected for link in self._workers.values())

    @property
    def workers(self) -> list[WorkerLink]:
        """Every link to a worker, also to those that take no more requests."""
        return [link for link in self._running if isinstance(link, WorkerLink)]

    def worker(self, worker_id: str) -> WorkerLink:
        """The link to a worker; SluiceError(CANNOT_CONNECT) when this gateway has not heard of it (yet)."""
        link = self._workers.get(worker_id)
        if link is None:
            raise SluiceError(ErrorKind.CANNOT_CONNECT, f"Worker {worker_id} is not known to this gateway.")
        return link

    def find(self, worker_id: str) -> WorkerLink | None:
        """The link to a worker, if there is one."""
        return self._workers.get(worker_id)

    def sound(self, worker_id: str) -> bool:
        """A worker did not fail its last requests, as far as this gateway knows."""
        link = self._workers.get(worker_id)
        return link is None or link.breaker.passable

    def least_busy(self, worker_ids: Sequence[str]) -> WorkerLink | None:
        """Of these workers, the connected one that runs fewest of this gateway's streams."""
        links = [link for worker_id in worker_ids if (link := self._workers.get(worker_id)) and link.connected]
        return idlest(links, lambda link: link.live)

    async def text_ready(self, most_s: float) -> None:
        """Waits for a postprocess replica that takes streams; SluiceError(UNAVAILABLE) when none comes in time."""
        loop = asyncio.get_running_loop()
        patience = loop.time() + most_s
        while self._streams.texts.best() is None:
            if loop.time() >= patience:
                raise unavailable("No postprocess replica is ready; try again soon.", code="service_unavailable")
            await asyncio.sleep(LOOK_AGAIN_S)

    async def run_sweeps(self) -> None:
        """Closes retired links that carry nothing any more, and ends what waits too long; until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self._streams.texts.sweep()
            self._streams.sweep_overrun()
            for link in [link for link in self._running if _is_done(link)]:
                if not _is_done(link):  # it came back while another one was closed
                    continue
                self._running.pop(link).cancel()
                if isinstance(link, WorkerLink):
                    await self._channels.pop(link).close()
                else:
                    del self._streams.texts.links[link.address]
                    link.replica.held = False

    def _on_post_change(self) -> None:
        if not self.makes_text:
            return
        links = self._streams.texts.links
        serving = {replica.address: replica for replica in self.postprocess.serving}
        for address, link in links.items():
            link.retired = address not in serving
        for address in serving.keys() - links.keys():
            link = PostLink(serving[address], self._connect_timeout_s, self._streams)
            link.replica.held = True  # its channel carries the session, also while it drains
            links[address] = link
            self._running[link] = self._tasks.spawn(link.run(), f"link-postprocess-{address}")


def _is_done(link: WorkerLink | PostLink) -> bool:
    return link.retired and (not link.live or not link.connected)
