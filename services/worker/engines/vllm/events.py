"""Subscribes to the KV events that each rank of vLLM publishes."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

from services.common.tasks import TaskOwner
from services.worker.engines.vllm.options import kv_events_config
from services.worker.kv_events.source import EngineCacheSource
from services.worker.kv_events.zmq_feed import ZmqFeed


class CacheEvents:
    """Owns the KV event endpoints and subscriptions of one engine."""

    def __init__(self) -> None:
        self.sources: tuple[EngineCacheSource, ...] = ()
        self._folder = ""
        self._feeds: list[ZmqFeed] = []

    def endpoints(self, data_parallel_size: int) -> dict[str, Any]:
        """Returns a kv_events_config for vLLM with private endpoints in a folder that only this user can read."""
        self._folder = tempfile.mkdtemp(prefix="sluice-kv-")
        return kv_events_config(self._folder, data_parallel_size)

    def open(self, configured: str, publishers: dict[int, Any], block_size: int, tasks: TaskOwner) -> None:
        """Subscribes to every rank's publisher.

        Args:
            configured: The endpoint in vLLM's configuration.
            publishers: vLLM's resolved publisher configuration by rank.
            tasks: Owns the reader tasks.
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
        """Returns the number of cached blocks on the device of a rank."""
        return self.sources[rank].translator.held() if rank < len(self.sources) else 0

    def forget(self) -> None:
        """Publishes the removal of all blocks after a cache reset; vLLM reports a reset only in its next step."""
        for source in self.sources:
            source.publish(source.translator.forget())

    def close(self) -> None:
        """Closes the sockets and removes the folder; may be called twice."""
        for feed in self._feeds:
            feed.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _connects(endpoint: str) -> bool:
    """Returns whether vLLM's publisher connects to the endpoint instead of binding it."""
    return "*" not in endpoint and "::" not in endpoint and not endpoint.startswith(("ipc://", "inproc://"))
