"""The table of streams that links keep, for fakes of workers and postprocess replicas in unit tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class FakeLink:
    """Carries streams as a link does; what a test gives it to send reaches only those.

    Attributes:
        streams: by slot.
        keep: what appends a token to its stream, by slot.
    """

    def __init__(self) -> None:
        self.streams: dict[int, Any] = {}
        self.keep: dict[int, Callable[[int], None]] = {}

    @property
    def live(self) -> int:
        """Streams carried now."""
        return len(self.streams)

    def adopt(self, stream: Any) -> None:
        """As Link.adopt."""
        self.streams[stream.slot] = stream
        self.keep[stream.slot] = stream.tokens.append

    def release(self, stream: Any) -> None:
        """As Link.release."""
        self.streams.pop(stream.slot, None)
        self.keep.pop(stream.slot, None)
