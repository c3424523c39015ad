"""Maintains the links to all workers and postprocess replicas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import grpc

from services.common.base.budgets import Budget
from services.common.base.errors import ErrorKind, SluiceError, unavailable
from services.common.base.tasks import TaskOwner
from services.common.rpc.channels import open_channel
from services.common.rpc.frame_guard import PacedFrames
from services.common.rpc.replicas import ReplicaSet, idlest
from services.gateway.backends.rpc.postprocess_link import PostLink
from services.gateway.backends.rpc.worker_link import BATCH_TOKENS, MAX_START_BYTES, WorkerEvents, WorkerLink
from services.gateway.backends.workers.registry import WorkerEntry
from sluice.v1 import postprocess_pb2_grpc, worker_pb2

log = logging.getLogger(__name__)

SWEEP_S = 1.0
POLL_INTERVAL_S = 0.05


class PostprocessLinks(Protocol):
    """The links to postprocess replicas, and the streams on them."""

    @property
    def links(self) -> Mapping[str, PostLink]: ...

    def add_link(self, link: PostLink) -> None: ...

    def remove_link(self, link: PostLink) -> None: ...

    def least_loaded(self) -> PostLink | None:
        """Returns a link that takes new streams, if there is one."""

    def on_available(self) -> None:
        """Opens the streams that wait for a replica, if one takes new streams."""

    def sweep(self) -> None:
        """Ends the streams that have waited too long for a replica."""


class LinkedStreams(Protocol):
    """The streams on all links, and what handles the events of the links."""

    @property
    def events(self) -> WorkerEvents: ...

    @property
    def texts(self) -> PostprocessLinks: ...

    def sweep_overrun(self) -> None:
        """Ends the streams that have run too long."""


class ConnectionManager:
    """Opens a link when a worker or replica is added, and closes it after its last stream once it is removed.

    Args:
        makes_text: whether streams use the postprocess replicas.
        on_event: called with each incident of a call to a postprocess replica; see ReplicaSet.
        max_pause_s: longest pause between two messages of a session under load.
        on_media: called with the bytes of each media file sent to a worker, and whether it was sent before.

    Attributes:
        postprocess: the postprocess replicas.
    """

    def __init__(
        self,
        postprocess: Sequence[str],
        credentials: grpc.ChannelCredentials | None,
        connect_timeout_s: float,
        streams: LinkedStreams,
        tasks: TaskOwner,
        worker_message_bytes: int = MAX_START_BYTES,
        batch_tokens: Budget = BATCH_TOKENS,
        makes_text: bool = True,
        on_event: Callable[[str], None] = lambda event: None,
        max_pause_s: float = 0.0,
        on_media: Callable[[int, bool], None] = lambda size, again: None,
    ) -> None:
        self._credentials = credentials
        self._connect_timeout_s = connect_timeout_s
        self._streams = streams
        self._tasks = tasks
        self._worker_message_bytes = worker_message_bytes
        self._batch_tokens = batch_tokens
        self._makes_text = makes_text
        self._max_pause_s = max_pause_s
        self._on_media = on_media
        self._frames = PacedFrames(worker_pb2.TokenBatch)
        self._workers: dict[str, WorkerLink] = {}
        self._running: dict[WorkerLink | PostLink, asyncio.Task[None]] = {}
        self._channels: dict[WorkerLink, grpc.aio.Channel] = {}
        self.postprocess: ReplicaSet[postprocess_pb2_grpc.PostprocessAsyncStub] = ReplicaSet(
            "postprocess",
            postprocess,
            postprocess_pb2_grpc.PostprocessStub,
            credentials,
            self._on_post_change,
            on_event=on_event,
        )

    def worker_up(self, entry: WorkerEntry) -> None:
        """Opens the link to a worker that was added or changed."""
        existing = self._workers.get(entry.worker_id)
        if existing is not None and existing.address == entry.address:
            existing.retired = False
            return
        if existing is not None:
            existing.retired = True
        callee = f"worker/{entry.worker_id}"
        channel = open_channel(
            entry.address, self._credentials, callee=callee, keepalive_ms=entry.keepalive_ms, bounds_read_ahead=True
        )
        link = WorkerLink(
            entry.worker_id,
            entry.address,
            channel,
            self._connect_timeout_s,
            self._streams.events,
            self._worker_message_bytes,
            self._batch_tokens,
            self._max_pause_s,
            self._on_media,
            self._frames,
        )
        self._workers[entry.worker_id] = link
        self._channels[link] = channel
        self._running[link] = self._tasks.spawn(link.run(), f"link-{entry.worker_id}")

    def worker_down(self, worker_id: str) -> None:
        """Retires the link to a removed worker; its running requests may finish."""
        link = self._workers.pop(worker_id, None)
        if link is not None:
            link.retired = True

    @property
    def connected_workers(self) -> int:
        """Number of workers that can receive requests now."""
        return sum(link.connected for link in self._workers.values())

    @property
    def workers(self) -> list[WorkerLink]:
        """All links to workers, including retired ones."""
        return [link for link in self._running if isinstance(link, WorkerLink)]

    def worker(self, worker_id: str) -> WorkerLink:
        """Returns the link to a worker; raises SluiceError(CANNOT_CONNECT) if the worker is not registered here."""
        link = self._workers.get(worker_id)
        if link is None:
            raise SluiceError(ErrorKind.CANNOT_CONNECT, f"Worker {worker_id} is not registered with this gateway.")
        return link

    def find(self, worker_id: str) -> WorkerLink | None:
        """Returns the link to a worker, or None."""
        return self._workers.get(worker_id)

    def sound(self, worker_id: str) -> bool:
        """Returns whether the circuit breaker of a worker admits requests."""
        link = self._workers.get(worker_id)
        return link is None or link.breaker.passable

    def least_busy(self, worker_ids: Sequence[str]) -> WorkerLink | None:
        """Returns the connected worker with the fewest streams of this gateway among those given, or None."""
        links = [link for worker_id in worker_ids if (link := self._workers.get(worker_id)) and link.connected]
        return idlest(links, lambda link: link.live)

    async def text_ready(self, most_s: float) -> None:
        """Waits for a postprocess replica that accepts streams.

        Raises:
            SluiceError: UNAVAILABLE when none is available within `most_s` seconds.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + most_s
        while self._streams.texts.least_loaded() is None:
            if loop.time() >= give_up_at:
                raise unavailable("No postprocess replica is ready; try again later.", code="service_unavailable")
            await asyncio.sleep(POLL_INTERVAL_S)

    async def run_sweeps(self) -> None:
        """Closes retired links without streams and fails streams that wait too long, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self._streams.texts.sweep()
            self._streams.sweep_overrun()
            for link in [link for link in self._running if _is_closable(link)]:
                if not _is_closable(link):  # the peer returned while another link was closing
                    continue
                self._running.pop(link).cancel()
                if isinstance(link, WorkerLink):
                    await self._channels.pop(link).close()
                else:
                    self._streams.texts.remove_link(link)
                    link.replica.held = False

    def _on_post_change(self) -> None:
        if not self._makes_text:
            return
        links = self._streams.texts.links
        serving = {replica.address: replica for replica in self.postprocess.serving}
        for address, link in links.items():
            link.retired = address not in serving
        for address in serving.keys() - links.keys():
            link = PostLink(serving[address], self._connect_timeout_s, self._streams.events, self._max_pause_s)
            link.replica.held = True  # keep the channel, which carries the session, while the replica drains
            self._streams.texts.add_link(link)
            self._running[link] = self._tasks.spawn(link.run(), f"link-postprocess-{address}")
        self._streams.texts.on_available()  # a session may be open again before its replica is known to serve


def _is_closable(link: WorkerLink | PostLink) -> bool:
    return link.retired and (not link.live or not link.connected)
