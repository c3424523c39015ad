"""The mock engine: no weights, but the cache, the scheduler, the clock and the words of a real one."""

from services.worker.engines.mock.engine import MockEngine

__all__ = ["MockEngine"]
