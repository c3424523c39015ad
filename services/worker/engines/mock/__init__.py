"""The mock engine: simulates the cache, the scheduler and the timing of a real engine, without weights."""

from services.worker.engines.mock.engine import MockEngine

__all__ = ["MockEngine"]
