"""vLLM's KV events: where each rank publishes them, and the feeds that read them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from typing import Any

from services.common.tasks import TaskOwner
from services.worker.contract.cache_events import KvEvent
from services.worker.engines.vllm.options import kv_events_config
from services.worker.kv_events.source import EngineCacheSource
from services.worker.kv_events.zmq_feed import ZmqFeed


class CacheEvents:
    """The event sources of one engine, from the choice of the endpoints to the end."""

    def __init__(self) -> None:
        self.sources: tuple[EngineCacheSource, ...] = ()
        self._folder = ""
        self._feeds: list[ZmqFeed] = []

    def endpoints(self, data_parallel_size: int) -> dict[str, Any]:
        """vLLM's kv_events_config for endpoints of our own; in a folder that only this user can read."""
        self._folder = tempfile.mkdtemp(prefix="sluice-kv-")
        return kv_events_config(self._folder, data_parallel_size)

    def open(self, configured: str, publishers: dict[int, Any], block_size: int, tasks: TaskOwner) -> None:
        """Follows every rank's publisher.

        Args:
            configured: the endpoint as vLLM was given it.
            publishers: vLLM's resolved configuration by rank.
            tasks: owns the readers.
        """
        sources: list[EngineCacheSource] = []
        for rank, publisher in sorted(publishers.items()):
            replay = publisher.replay_endpoint or ""
            source = EngineCacheSource(rank, block_size, counts_copies=True, can_replay=bool(replay))
            feed = ZmqFeed(source.sequencer, publisher.endpoint, replay, publisher.topic, binds=_connects(configured))
            feed.open()
            tasks.spawn(feed.run(), f"kv-events-{rank}")
            sources.append(source)
            self._feeds.append(feed)
        self.sources = tuple(sources)

    def cached_blocks(self, rank: int) -> int:
        """Blocks on the device that can be reused."""
        return self.sources[rank].translator.held() if rank < len(self.sources) else 0

    def forget(self) -> None:
        """The engine was told to drop its cache; it says so itself only when it runs again."""
        for source in self.sources:
            events: Sequence[KvEvent] = source.translator.forget()
            source.publish(events)

    def close(self) -> None:
        """Closes sockets and removes the folder; may be called twice."""
        for feed in self._feeds:
            feed.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _connects(endpoint: str) -> bool:
    """Whether vLLM's publisher connects to an endpoint, so that somebody else has to open it."""
    return "*" not in endpoint and "::" not in endpoint and not endpoint.startswith(("ipc://", "inproc://"))
