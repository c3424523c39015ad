"""Subscribes to the KV events that each rank of vLLM publishes."""

from __future__ import annotations

from typing import Any

from services.common.base.tasks import TaskOwner
from services.worker.engines.inprocess.events import KvEventFeeds
from services.worker.engines.vllm.options import kv_events_config


class CacheEvents(KvEventFeeds):
    """Chooses private endpoints for vLLM's publishers, and subscribes to them."""

    def __init__(self) -> None:
        super().__init__(counts_copies=True)

    def endpoints(self, data_parallel_size: int) -> dict[str, Any]:
        """Returns a kv_events_config for vLLM with private endpoints in a folder that only this user can read."""
        return kv_events_config(self.make_folder(), data_parallel_size)

    def open(self, configured: str, publishers: dict[int, Any], block_size: int, tasks: TaskOwner) -> None:
        """Subscribes to every rank's publisher.

        Args:
            configured: The endpoint in vLLM's configuration.
            publishers: vLLM's resolved publisher configuration by rank.
            tasks: Owns the reader tasks.
        """
        for rank, publisher in sorted(publishers.items()):
            replay = publisher.replay_endpoint or ""
            binds = _connects(configured)
            self.subscribe(rank, block_size, publisher.endpoint, replay, tasks, topic=publisher.topic, binds=binds)


def _connects(endpoint: str) -> bool:
    """Returns whether vLLM's publisher connects to the endpoint instead of binding it."""
    return "*" not in endpoint and "::" not in endpoint and not endpoint.startswith(("ipc://", "inproc://"))
