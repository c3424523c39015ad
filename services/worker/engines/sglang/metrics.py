"""Caches SGLang's own metrics, read periodically from its schedulers' files so that no scrape waits for the disk."""

from __future__ import annotations

import asyncio
import logging
import os

log = logging.getLogger(__name__)

REFRESH_INTERVAL_S = 5.0


class SchedulerMetrics:
    """Holds the engine's metrics in `text`, in the Prometheus text format; empty until the engine reports metrics."""

    def __init__(self) -> None:
        self.text = ""
        self._failed = False

    async def run(self) -> None:
        """Refreshes until cancelled."""
        while True:
            await self._refresh()
            await asyncio.sleep(REFRESH_INTERVAL_S)

    async def _refresh(self) -> None:
        """Reads the metrics; keeps the previous ones on errors, because other processes may be writing the files."""
        try:
            self.text = await asyncio.to_thread(_read)
            self._failed = False
        except Exception:
            if not self._failed:  # log once, not at every refresh
                log.warning("failed to read SGLang's metrics; keeping the previous ones", exc_info=True)
            self._failed = True


def _read() -> str:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        return ""
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry).decode()
