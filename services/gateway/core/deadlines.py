"""The deadline of a request, and the share of the remaining time that each of its stages may use.

Clients set it with a header: `x-request-timeout-ms: 1500`, or gRPC's own form, `grpc-timeout: 1500m`.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from math import inf

from services.common.base.errors import ErrorKind, SluiceError, invalid

TIMEOUT_MS_HEADER = "x-request-timeout-ms"
GRPC_TIMEOUT_HEADER = "grpc-timeout"
MAX_S = 86_400.0
"""Seconds of a timeout in a header; a longer one is refused with INVALID_ARGUMENT."""

_GRPC_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])")
_UNITS_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


@dataclass(frozen=True, slots=True)
class Deadline:
    """The time by which a request must finish, in seconds of the event loop's clock."""

    at: float = inf

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        """Returns the deadline `timeout_s` seconds from now; an infinite timeout means no deadline."""
        return NO_DEADLINE if timeout_s == inf else cls(asyncio.get_running_loop().time() + timeout_s)

    @property
    def left_s(self) -> float:
        """Seconds left; infinite without a deadline, never negative."""
        return self.at if self.at == inf else max(self.at - asyncio.get_running_loop().time(), 0.0)

    def share(self, part: float, most_s: float) -> float:
        """Returns the seconds that one stage may take.

        Args:
            part: fraction of the remaining time in (0, 1]; the rest is reserved for later stages.
            most_s: upper limit of the stage itself, seconds.

        Raises:
            SluiceError: DEADLINE_EXCEEDED when no time is left.
        """
        left_s = self.left_s
        if left_s <= 0:
            raise overdue()
        return min(most_s, left_s * part)


NO_DEADLINE = Deadline()


def overdue() -> SluiceError:
    """Returns the error for a request whose deadline has passed."""
    return SluiceError(
        ErrorKind.DEADLINE_EXCEEDED, "The request did not finish before its deadline.", code="request_timeout"
    )


def parse_timeout_ms(value: str) -> float:
    """Parses `x-request-timeout-ms` into seconds.

    Raises:
        SluiceError: INVALID_ARGUMENT unless the value is between 1 millisecond and 24 hours.
    """
    if not (value.isascii() and value.isdigit() and len(value) <= 9):
        raise _not_a_timeout(TIMEOUT_MS_HEADER, "a whole number of milliseconds")
    return _within_bounds(int(value) / 1000, TIMEOUT_MS_HEADER)


def parse_grpc_timeout(value: str) -> float:
    """Parses `grpc-timeout` into seconds.

    Raises:
        SluiceError: INVALID_ARGUMENT unless the value is above 0 and at most 24 hours.
    """
    match = _GRPC_TIMEOUT.fullmatch(value)
    if match is None:
        raise _not_a_timeout(GRPC_TIMEOUT_HEADER, "digits followed by one of H, M, S, m, u, n, such as 1500m")
    return _within_bounds(int(match[1]) * _UNITS_S[match[2]], GRPC_TIMEOUT_HEADER)


def _within_bounds(seconds: float, header: str) -> float:
    if not 0 < seconds <= MAX_S:
        raise _not_a_timeout(header, "above 0 and at most 24 hours")
    return seconds


def _not_a_timeout(header: str, expected: str) -> SluiceError:
    return invalid(f"The header {header} must be {expected}.", param=header, code="invalid_timeout")
