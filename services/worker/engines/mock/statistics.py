"""Metrics of the mock engine in the Prometheus text format."""

from __future__ import annotations

from services.worker.engines.mock.scheduler import MockStep


class Statistics:
    """Counts steps; may be read from another thread."""

    def __init__(self) -> None:
        self.steps = 0
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.preemptions = 0
        self.cache_use = 0.0

    def count(self, step: MockStep, cache_use: float) -> None:
        """Counts one completed step."""
        self.steps += 1
        self.prefill_tokens += step.prefill_tokens
        self.decode_tokens += len(step.rows)
        self.preemptions += step.preempted
        self.cache_use = cache_use

    def text(self) -> str:
        """Returns all metrics in the Prometheus text format."""
        counters = {
            "mock_engine_steps": (self.steps, "engine steps"),
            "mock_engine_prefill_tokens": (self.prefill_tokens, "prompt tokens computed"),
            "mock_engine_output_tokens": (self.decode_tokens, "tokens generated"),
            "mock_engine_preemptions": (self.preemptions, "sequences preempted"),
        }
        lines = [
            f"# HELP {name} {what}\n# TYPE {name} counter\n{name}_total {value}\n"
            for name, (value, what) in counters.items()
        ]
        name = "mock_engine_cache_use"
        lines.append(f"# HELP {name} share of KV-cache blocks in use\n# TYPE {name} gauge\n{name} {self.cache_use:g}\n")
        return "".join(lines)
