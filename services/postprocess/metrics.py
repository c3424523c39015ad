"""What the service counts; made after telemetry is configured, recorded per message and per stream."""

from __future__ import annotations

from services.common import telemetry
from services.postprocess.stream import Finish


class Metrics:
    """Instruments of one process."""

    def __init__(self) -> None:
        meter = telemetry.meter("postprocess")
        self._tokens = meter.create_counter("sluice_postprocess_tokens", description="tokens taken")
        self._streams = meter.create_up_down_counter("sluice_postprocess_streams", description="streams alive")
        self._finished = meter.create_counter(
            "sluice_postprocess_finished_streams", description="streams ended, by reason and by what was found"
        )
        self._degraded = meter.create_counter(
            "sluice_postprocess_degraded_streams", description="fallbacks taken by parsed streams, by reason"
        )

    def degraded(self, reason: str) -> None:
        """A stream took a fallback."""
        self._degraded.add(1, {"reason": reason})

    def took(self, tokens: int) -> None:
        """A message with tokens."""
        self._tokens.add(tokens)

    def lives(self, change: int) -> None:
        """Streams came or went."""
        self._streams.add(change)

    def finished(self, finish: Finish) -> None:
        """A stream ended with an answer."""
        found = "stop_string" if finish.stop_string else "stop_token" if finish.stop_token_id is not None else "none"
        self._finished.add(1, {"reason": finish.reason.name.lower(), "found": found})
