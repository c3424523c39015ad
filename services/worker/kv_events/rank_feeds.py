"""Subscriptions to the KV events that each data-parallel rank of an engine publishes over ZMQ."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass

from services.common.tasks import TaskOwner
from services.worker.kv_events.source import EngineCacheSource
from services.worker.kv_events.zmq_feed import ZmqFeed


@dataclass(frozen=True, slots=True)
class RankEndpoint:
    """Where one rank publishes.

    Attributes:
        replay: endpoint that repeats past batches; empty: the engine cannot.
        binds: whether the worker binds the endpoint and the engine connects to it.
    """

    rank: int
    endpoint: str
    replay: str = ""
    topic: str = ""
    binds: bool = False


class RankFeeds:
    """Owns the subscriptions of one engine, and a folder for sockets that only this user can read.

    Args:
        counts_copies: as in `Translator`.

    Attributes:
        sources: event sources by rank; empty until `open`.
    """

    def __init__(self, *, counts_copies: bool) -> None:
        self._counts_copies = counts_copies
        self._folder = ""
        self._feeds: list[ZmqFeed] = []
        self.sources: tuple[EngineCacheSource, ...] = ()

    def make_folder(self) -> str:
        """Returns the folder, created at the first call."""
        self._folder = self._folder or tempfile.mkdtemp(prefix="sluice-kv-")
        return self._folder

    def open(self, endpoints: Iterable[RankEndpoint], block_size: int, tasks: TaskOwner) -> None:
        """Subscribes to every rank; `tasks` own the readers."""
        sources: list[EngineCacheSource] = []
        for at in endpoints:
            source = EngineCacheSource(
                at.rank, block_size, counts_copies=self._counts_copies, can_replay=bool(at.replay)
            )
            feed = ZmqFeed(source.sequencer, at.endpoint, at.replay, at.topic, binds=at.binds)
            feed.open()
            tasks.spawn(feed.run(), f"kv-events-{at.rank}")
            sources.append(source)
            self._feeds.append(feed)
        self.sources = tuple(sources)

    def cached_blocks(self, rank: int) -> int:
        """Returns the number of cached blocks on the device of a rank."""
        return self.sources[rank].translator.held() if rank < len(self.sources) else 0

    def forget(self) -> None:
        """Publishes the removal of all blocks after a cache reset, which engines report only in their next step."""
        for source in self.sources:
            source.publish(source.translator.forget())

    def close(self) -> None:
        """Closes the sockets and removes the folder; may be called twice."""
        for feed in self._feeds:
            feed.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
