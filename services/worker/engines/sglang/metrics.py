"""SGLang's own metrics: its schedulers leave them in files, which are read now and then so that no scrape waits."""

from __future__ import annotations

import asyncio
import os

REFRESH_S = 5.0


class SchedulerMetrics:
    """Attributes: text: Prometheus' text format as of the last refresh; empty while the engine makes none."""

    def __init__(self) -> None:
        self.text = ""

    async def run(self) -> None:
        """Refreshes until cancelled."""
        while True:
            self.text = await asyncio.to_thread(_read)
            await asyncio.sleep(REFRESH_S)


def _read() -> str:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        return ""
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry).decode()
