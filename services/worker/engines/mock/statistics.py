"""The mock engine's own metrics, in Prometheus' text format as those of a real engine."""

from __future__ import annotations

from services.worker.engines.mock.scheduler import Step


class Statistics:
    """Counts steps; read from another thread."""

    def __init__(self) -> None:
        self.steps = 0
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.preemptions = 0
        self.cache_use = 0.0

    def count(self, step: Step, cache_use: float) -> None:
        """One step is over."""
        self.steps += 1
        self.prefill_tokens += step.prefill_tokens
        self.decode_tokens += len(step.rows)
        self.preemptions += step.preempted
        self.cache_use = cache_use

    def text(self) -> str:
        """Every metric with its help."""
        counters = {
            "mock_engine_steps": (self.steps, "engine steps"),
            "mock_engine_prefill_tokens": (self.prefill_tokens, "prompt tokens computed"),
            "mock_engine_output_tokens": (self.decode_tokens, "tokens generated"),
            "mock_engine_preemptions": (self.preemptions, "sequences that lost their blocks to others"),
        }
        lines = [
            f"# HELP {name} {what}\n# TYPE {name} counter\n{name}_total {value}\n"
            for name, (value, what) in counters.items()
        ]
        name = "mock_engine_cache_use"
        lines.append(f"# HELP {name} share of KV-cache blocks in use\n# TYPE {name} gauge\n{name} {self.cache_use:g}\n")
        return "".join(lines)
