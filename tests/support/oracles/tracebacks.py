"""Whether a process complained."""

from __future__ import annotations

import re

_GRPC_CANCELLED = re.compile(
    r'^(?:[\w-]+ +\| )?Traceback \(most recent call last\):\n(?:.*  File "src/python/grpcio/.*\n)+'
    r".*asyncio\.exceptions\.CancelledError\n",
    re.MULTILINE,
)


def complaints(text: str) -> list[str]:
    """Every line of a log that begins a traceback; but grpc's compiled code prints one of its own, with nothing else in
    it, when a stream is cut in the moment its server stops, and that one is none."""
    return [line for line in _GRPC_CANCELLED.sub("", text).splitlines() if "Traceback" in line]
