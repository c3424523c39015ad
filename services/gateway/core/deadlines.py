"""How long a request may take, and how much of that each of its stages gets.

The client says it in a header, `x-request-timeout-ms: 1500` or, as gRPC writes it, `grpc-timeout: 1500m`. The deadline
is a context variable: every stage of the request sees it and no signature has to carry it.
"""

from __future__ import annotations

import asyncio
import re
from contextvars import ContextVar
from dataclasses import dataclass
from math import inf

from services.common.errors import ErrorKind, SluiceError, invalid

TIMEOUT_MS_HEADER = "x-request-timeout-ms"
GRPC_TIMEOUT_HEADER = "grpc-timeout"
LONGEST_S = 86_400.0

_GRPC_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])")
_UNITS_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a request must be over, in seconds of the event loop's clock."""

    at: float = inf

    @property
    def left_s(self) -> float:
        """Seconds until then; infinite without a deadline, never negative."""
        return self.at if self.at == inf else max(self.at - asyncio.get_running_loop().time(), 0.0)

    def share(self, part: float, most_s: float) -> float:
        """Seconds that one stage may take.

        Args:
            part: of what is left, in (0, 1]: a stage that uses up its share leaves the next ones theirs.
            most_s: the stage's own limit.

        Raises:
            SluiceError: DEADLINE_EXCEEDED when nothing is left.
        """
        left_s = self.left_s
        if left_s <= 0:
            raise overdue()
        return min(most_s, left_s * part)


NO_DEADLINE = Deadline()

_current: ContextVar[Deadline] = ContextVar("deadline", default=NO_DEADLINE)


def current() -> Deadline:
    """The deadline of the request at hand."""
    return _current.get()


def begin(timeout_s: float) -> None:
    """The request at hand has this long from now on; infinite for no deadline."""
    _current.set(NO_DEADLINE if timeout_s == inf else Deadline(asyncio.get_running_loop().time() + timeout_s))


def overdue() -> SluiceError:
    """What a request hears whose time is up."""
    return SluiceError(
        ErrorKind.DEADLINE_EXCEEDED, "The request did not finish within the time it was given.", code="request_timeout"
    )


def parse_timeout_ms(value: str) -> float:
    """Seconds that `x-request-timeout-ms` gives; SluiceError(INVALID_ARGUMENT) unless 1 millisecond to 24 hours."""
    if not (value.isascii() and value.isdigit() and len(value) <= 9):
        raise _not_a_timeout(TIMEOUT_MS_HEADER, "a whole number of milliseconds")
    return _within_bounds(int(value) / 1000, TIMEOUT_MS_HEADER)


def parse_grpc_timeout(value: str) -> float:
    """Seconds that `grpc-timeout` gives; SluiceError(INVALID_ARGUMENT) unless more than nothing, up to 24 hours."""
    found = _GRPC_TIMEOUT.fullmatch(value)
    if found is None:
        raise _not_a_timeout(GRPC_TIMEOUT_HEADER, "digits and one of H, M, S, m, u, n, such as 1500m")
    return _within_bounds(int(found[1]) * _UNITS_S[found[2]], GRPC_TIMEOUT_HEADER)


def _within_bounds(seconds: float, header: str) -> float:
    if not 0 < seconds <= LONGEST_S:
        raise _not_a_timeout(header, "more than nothing and at most 24 hours")
    return seconds


def _not_a_timeout(header: str, wanted: str) -> SluiceError:
    return invalid(f"The header {header} must be {wanted}.", param=header, code="invalid_timeout")
