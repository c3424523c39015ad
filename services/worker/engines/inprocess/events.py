"""Subscribes to the KV events that each rank of an engine publishes over ZMQ on this machine."""

from __future__ import annotations

import shutil
import tempfile

from services.common.base.tasks import TaskOwner
from services.worker.kv_events.source import EngineCacheSource
from services.worker.kv_events.zmq_feed import ZmqFeed


class KvEventFeeds:
    """Owns the subscriptions of one engine, and the folder of its sockets.

    Args:
        counts_copies: Whether the engine reports each copy of a block.

    Attributes:
        sources: Event sources by rank.
    """

    def __init__(self, *, counts_copies: bool) -> None:
        self.sources: tuple[EngineCacheSource, ...] = ()
        self._counts_copies = counts_copies
        self._folder = ""
        self._feeds: list[ZmqFeed] = []

    def make_folder(self) -> str:
        """Creates the folder of the sockets, which only this user can read."""
        self._folder = tempfile.mkdtemp(prefix="sluice-kv-")
        return self._folder

    def subscribe(
        self,
        rank: int,
        block_size: int,
        endpoint: str,
        replay: str,
        tasks: TaskOwner,
        *,
        topic: str = "",
        binds: bool = False,
    ) -> None:
        """Subscribes to the publisher of a rank.

        Args:
            replay: Endpoint for missing batches; empty if the engine has none.
            tasks: Owns the reader task.
            binds: Whether the publisher connects to the endpoint instead of binding it.
        """
        source = EngineCacheSource(rank, block_size, counts_copies=self._counts_copies, can_replay=bool(replay))
        feed = ZmqFeed(source.sequencer, endpoint, replay, topic, binds=binds)
        feed.open()
        tasks.spawn(feed.run(), f"kv-events-{rank}")
        self.sources = (*self.sources, source)
        self._feeds.append(feed)

    def cached_blocks(self, rank: int) -> int:
        """Returns the number of cached blocks on the device of a rank."""
        return self.sources[rank].translator.held() if rank < len(self.sources) else 0

    def forget(self) -> None:
        """Publishes the removal of all blocks after a cache reset, which an engine reports only in its next step."""
        for source in self.sources:
            source.publish(source.translator.forget())

    def close(self) -> None:
        """Closes the sockets and removes their folder; may be called twice."""
        for feed in self._feeds:
            feed.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
