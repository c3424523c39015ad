"""Finds the usage that an engine reports in its response, whatever its API, without parsing the response.

Usage is a handful of numbers among megabytes of text. Their names cannot occur in generated text, because there the
quotation marks are escaped. Of several values, the last one counts: usage comes at the end, and Messages streams send
the prompt's in the first event and the output's in the last.
"""

from __future__ import annotations

import re

from services.router.scheduling.decisions import Outcome

_NUMBERS = re.compile(
    rb'(?<!\\)"(prompt_tokens|input_tokens|completion_tokens|output_tokens|cached_tokens|cache_read_input_tokens)"'
    rb"\s*:\s*(\d{1,9})(?=[^\d.eE])"
)
_MARK = b'_tokens"'
_LONGEST = 64  # bytes of a name, its colon and its number


class UsageReader:
    """Reads usage from a response, chunk by chunk."""

    def __init__(self) -> None:
        self._found: dict[bytes, int] = {}
        self._tail = b""

    def feed(self, chunk: bytes) -> None:
        """Reads a chunk of the body."""
        text = self._tail + chunk if self._tail else chunk
        if _MARK in text:
            for name, number in _NUMBERS.findall(text):
                self._found[name] = int(number)
        self._tail = text[-_LONGEST:]

    def outcome(self, reservation: str) -> Outcome | None:
        """Returns the outcome of a request; None without usage."""
        found = self._found.get
        output = found(b"completion_tokens", found(b"output_tokens"))
        prompt = found(b"prompt_tokens", found(b"input_tokens"))
        if output is None and prompt is None:
            return None
        cached = found(b"cached_tokens", found(b"cache_read_input_tokens"))
        return Outcome(reservation, cached, output or 0)
