"""Traces of requests: JSON lines with the time of arrival and the lengths of prompt and answer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sluice.cli.errors import BadFlag

MAX_REQUESTS = 1_000_000
"""Requests of a trace, its copies included; a longer one is refused."""
COPY_OFFSET_S = 0.1
"""Seconds by which a copy of a request arrives after the one before."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace; the answer has at least one token."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


def read_trace(path: Path, copies: int = 1) -> Sequence[TracedRequest]:
    """Returns the requests in order of arrival, the first one at 0 s.

    A line is an object with `timestamp` in ms, `input_length` and `output_length`; other members are ignored.

    Args:
        copies: how often each request is sent.

    Raises:
        BadFlag: the file cannot be read, has no request or too many of them, or a line is no request.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            requests = list(_requests(path, lines, MAX_REQUESTS // copies))
    except (OSError, UnicodeDecodeError) as error:
        raise BadFlag(f"--replay {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not requests:
        raise BadFlag(
            f"--replay {path} has no requests; a line is an object with timestamp, input_length, output_length"
        )
    first = min(request.at_s for request in requests)
    shifted = [
        TracedRequest(request.at_s - first + copy * COPY_OFFSET_S, request.prompt_tokens, request.output_tokens)
        for request in requests
        for copy in range(copies)
    ]
    return sorted(shifted, key=lambda request: request.at_s)


def _requests(path: Path, lines: Iterator[str], most: int) -> Iterator[TracedRequest]:
    count = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        count += 1
        if count > most:
            raise BadFlag(f"--replay {path} has more than {MAX_REQUESTS:,} requests, copies included; send fewer")
        try:
            entry = json.loads(line)
            at_ms, prompt, output = float(entry["timestamp"]), entry["input_length"], entry["output_length"]
            valid = math.isfinite(at_ms) and isinstance(prompt, int) and isinstance(output, int)
        except (ValueError, KeyError, TypeError, RecursionError):
            valid = False
        if not valid or prompt < 1 or output < 0:
            raise BadFlag(
                f"--replay {path}, line {number}, is no request: an object with timestamp in ms, input_length of at "
                "least 1 and output_length"
            )
        yield TracedRequest(at_ms / 1e3, prompt, max(output, 1))
