"""SGLang's own metrics: its schedulers leave them in files, which are read now and then so that no scrape waits."""

from __future__ import annotations

import asyncio
import logging
import os

log = logging.getLogger(__name__)

REFRESH_S = 5.0


class SchedulerMetrics:
    """Attributes: text: Prometheus' text format as of the last refresh; empty while the engine makes none."""

    def __init__(self) -> None:
        self.text = ""
        self._failed = False

    async def run(self) -> None:
        """Refreshes until cancelled."""
        while True:
            await self._refresh()
            await asyncio.sleep(REFRESH_S)

    async def _refresh(self) -> None:
        """The files are others', who may write or remove them in this moment: no reason to end a worker."""
        try:
            self.text = await asyncio.to_thread(_read)
            self._failed = False
        except Exception:
            if not self._failed:  # once, not every few seconds
                log.warning("SGLang's metrics cannot be read; the last ones are kept", exc_info=True)
            self._failed = True


def _read() -> str:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        return ""
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry).decode()
