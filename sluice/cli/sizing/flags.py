"""The flags of `sluice advise`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from sluice.cli.errors import BadFlag
from sluice.cli.flags import flag
from sluice.cli.live.endpoint import Endpoint

DEFAULT_MAX_WORKERS = 16
"""Most workers of a replay, if the flag does not say."""


@dataclass(frozen=True)
class AdviseFlags:
    """Holds what to advise on: a running suite or, with `replay`, a trace; the flags of a replay need one."""

    seconds: float = flag(5.0, "seconds over which the load of a running suite is averaged")
    min_workers: int = flag(1, "fewest workers of a tier")
    max_workers: int = flag(0, f"most workers of a tier; 0: no bound, and {DEFAULT_MAX_WORKERS} in a replay")
    replay: Path | None = flag(
        None,
        "replay this trace in virtual time instead: JSON lines with timestamp, input_length, output_length",
        metavar="TRACE",
    )
    copies: int = flag(1, "how often each request of the trace is sent")
    startup_s: float = flag(120.0, "of a replay: seconds from the start of a worker until it receives requests")
    ttft_s: float = flag(2.0, "of a replay: seconds to the first token of a request in time")
    inter_token_ms: float = flag(50.0, "of a replay: milliseconds from one token to the next of a request in time")
    cpu_target: float = flag(0.8, "of a replay: share of a core that HPA on CPU aims at")
    queue_target: float = flag(5.0, "of a replay: waiting requests for each worker that HPA on the queue aims at")
    max_sequences: int = flag(256, "of a replay: requests that a worker runs at once")
    max_batched_tokens: int = flag(8_192, "of a replay: tokens of an engine step")
    cache_tokens: int = flag(1_048_576, "of a replay: tokens of a worker's KV cache")
    speed: float = flag(1.0, "of a replay: how much faster a worker is than the mock engine")
    svg: Path | None = flag(None, "of a replay: draw workers and waiting requests into this file", metavar="FILE")
    endpoint: Endpoint = field(default_factory=Endpoint)

    def run(self, as_json: bool, console: Console) -> int:
        """Advises, and returns the exit code; raises BadFlag for numbers that make no sense."""
        if self.replay is None:
            from sluice.cli.sizing import advise

            if self.svg is not None:
                raise BadFlag("--svg draws a replay; pass its trace with --replay")
            return advise.run(
                self.endpoint.located(), self.seconds, self.min_workers, self.max_workers, as_json, console
            )
        from sluice.cli.sizing import replay
        from sluice.cli.sizing.virtual_worker import WorkerShape

        shape = WorkerShape(self.max_sequences, self.max_batched_tokens, self.cache_tokens, self.speed)
        question = replay.Replay(
            self.replay,
            startup_s=self.startup_s,
            ttft_s=self.ttft_s,
            inter_token_ms=self.inter_token_ms,
            min_workers=self.min_workers,
            max_workers=self.max_workers or max(DEFAULT_MAX_WORKERS, self.min_workers),
            cpu_target=self.cpu_target,
            queue_target=self.queue_target,
            copies=self.copies,
            shape=shape,
        )
        return replay.run(question, self.svg, as_json, console)
