"""Configures SGLang's KV event publishers and subscribes to them."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from services.common.net.ports import free_row
from services.common.tasks import TaskOwner
from services.worker.kv_events.source import EngineCacheSource
from services.worker.kv_events.zmq_feed import ZmqFeed, endpoint_of_rank

REPLAY_BUFFER_BATCHES = 10_000


class EventFeeds:
    """Owns the KV event endpoints and subscriptions of one engine, one per data-parallel rank, on this machine only.

    Args:
        ranks: Number of data-parallel ranks; 0 disables events.

    Attributes:
        sources: Event sources by rank; empty until `open`.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._folder: Path | None = None
        self.sources: tuple[EngineCacheSource, ...] = ()
        self._endpoint = self._replay = ""
        if ranks == 1:
            self._folder = Path(tempfile.mkdtemp(prefix="sluice-sglang-"))
            self._endpoint, self._replay = (f"ipc://{self._folder / name}" for name in ("events", "replay"))
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
        self.sources = tuple(
            EngineCacheSource(rank, block_size, counts_copies=False, can_replay=True) for rank in range(self._ranks)
        )
        for source in self.sources:
            feed = ZmqFeed(
                source.sequencer,
                endpoint_of_rank(self._endpoint, source.rank),
                endpoint_of_rank(self._replay, source.rank),
            )
            tasks.spawn(feed.run(), f"sglang-kv-events-{source.rank}")

    def cached_blocks(self) -> Sequence[int]:
        """Returns the number of cached blocks on the device by rank."""
        return [source.translator.held() for source in self.sources]

    def close(self) -> None:
        """Removes the sockets' folder; may be called twice."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
