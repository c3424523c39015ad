"""Where SGLang publishes what happens to its cache, and who reads it."""

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

REPLAYED_BATCHES = 10_000


class EventFeeds:
    """One publisher and one reader for each data-parallel rank, on this machine only.

    Args:
        ranks: data-parallel ranks; 0: nothing is published.

    Attributes:
        sources: in the order of ranks; empty until `open`.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._folder: Path | None = None
        self.sources: tuple[EngineCacheSource, ...] = ()
        self._endpoint = self._replay = ""
        if ranks == 1:
            self._folder = Path(tempfile.mkdtemp(prefix="sluice-sglang-"))
            self._endpoint, self._replay = (f"ipc://{self._folder / name}" for name in ("events", "replay"))
        elif ranks:  # SGLang counts ranks in port numbers only
            base = free_row(2 * ranks)
            self._endpoint, self._replay = (f"tcp://127.0.0.1:{port}" for port in (base, base + ranks))

    @property
    def config(self) -> str:
        """For SGLang's --kv-events-config."""
        return json.dumps(
            {
                "publisher": "zmq",
                "endpoint": self._endpoint,
                "replay_endpoint": self._replay,
                "bind": True,
                "buffer_steps": REPLAYED_BATCHES,
            }
        )

    def open(self, block_size: int, tasks: TaskOwner) -> None:
        """Starts reading; `tasks` own the readers."""
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
        """Blocks on the device by rank."""
        return [source.translator.held() for source in self.sources]

    def close(self) -> None:
        """Removes what lies on disk; may be called twice."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
