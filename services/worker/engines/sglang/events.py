"""Configures SGLang's KV event publishers and subscribes to them."""

from __future__ import annotations

import json

from services.common.base.tasks import TaskOwner
from services.common.net.ports import free_row
from services.worker.engines.inprocess.events import KvEventFeeds
from services.worker.kv_events.zmq_feed import endpoint_of_rank

REPLAY_BUFFER_BATCHES = 10_000


class EventFeeds(KvEventFeeds):
    """Owns the KV event endpoints and subscriptions of one engine, one per data-parallel rank, on this machine only.

    Args:
        ranks: Number of data-parallel ranks; 0 disables events.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__(counts_copies=False)
        self._ranks = ranks
        self._endpoint = self._replay = ""
        if ranks == 1:
            folder = self.make_folder()
            self._endpoint, self._replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        elif ranks:  # SGLang derives an endpoint per rank from TCP ports only
            base = free_row(2 * ranks)
            self._endpoint, self._replay = (f"tcp://127.0.0.1:{port}" for port in (base, base + ranks))

    @property
    def config(self) -> str:
        """Value of SGLang's --kv-events-config."""
        return json.dumps(
            {
                "publisher": "zmq",
                "endpoint": self._endpoint,
                "replay_endpoint": self._replay,
                "bind": True,
                "buffer_steps": REPLAY_BUFFER_BATCHES,
            }
        )

    def open(self, block_size: int, tasks: TaskOwner) -> None:
        """Subscribes to every rank's publisher; `tasks` own the readers."""
        for rank in range(self._ranks):
            endpoint, replay = endpoint_of_rank(self._endpoint, rank), endpoint_of_rank(self._replay, rank)
            self.subscribe(rank, block_size, endpoint, replay, tasks)
