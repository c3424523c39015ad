"""Simulates the duration of engine steps on a real accelerator, and paces them."""

from __future__ import annotations

import asyncio
import json
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Awaitable, Iterator, Sequence
from pathlib import Path
from types import coroutine
from typing import Any

from services.common.base.errors import invalid

MIN_SLEEP_S = 0.001
"""Seconds of the shortest sleep, the resolution of the event loop's timers: shorter waits accumulate."""
MAX_LAG_S = 0.05
"""Seconds that simulated time may lag behind on a busy machine: a longer delay is not made up for."""


class StepTiming(ABC):
    """A model of step durations."""

    @abstractmethod
    def step_s(self, prefill_tokens: int, decoding: int, cache_use: float) -> float:
        """Returns the duration of one step in seconds.

        Args:
            prefill_tokens: Prompt tokens computed in the step, over all sequences.
            decoding: Number of sequences that decode one token each.
            cache_use: Share of KV-cache blocks used by sequences, 0 to 1.
        """


class ModelledTiming(StepTiming):
    """Polynomials fitted to a GPU: quadratic in the prefill tokens and, for decode, in the cache use."""

    def __init__(self, speedup: float = 1.0) -> None:
        self._scale = 1e-3 / speedup

    def step_s(self, prefill_tokens: int, decoding: int, cache_use: float) -> float:
        milliseconds = 0.0
        if prefill_tokens:
            milliseconds += prefill_ms(prefill_tokens)
        if decoding:
            milliseconds += decode_ms(cache_use)
        return milliseconds * self._scale


class FixedTiming(StepTiming):
    """A constant duration per step, plus a constant per prompt token."""

    def __init__(self, step_ms: float, prefill_us: float, speedup: float = 1.0) -> None:
        self._step_s = step_ms * 1e-3 / speedup
        self._prefill_s = prefill_us * 1e-6 / speedup

    def step_s(self, prefill_tokens: int, decoding: int, cache_use: float) -> float:
        return self._step_s + prefill_tokens * self._prefill_s


Point = tuple[float, float]


class TableTiming(StepTiming):
    """Interpolates measured points linearly, and extrapolates beyond the last one.

    The file is a JSON object with two lists: `prefill` of [tokens, ms], and `decode` of [sequences, ms] or
    [sequences, cache share, ms].

    Args:
        prefill: At least one (tokens, ms), sorted by tokens.
        decode: Cache shares in ascending order, each with its (sequences, ms).
    """

    def __init__(
        self, prefill: Sequence[Point], decode: Sequence[tuple[float, Sequence[Point]]], speedup: float = 1.0
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._scale = 1e-3 / speedup

    @classmethod
    def read(cls, path: Path, speedup: float = 1.0) -> TableTiming:
        """Reads a timing file; raises SluiceError(INVALID_ARGUMENT) when it is missing or invalid."""
        try:
            document = json.loads(path.read_text("utf-8"))
            prefill = sorted((float(tokens), float(ms)) for tokens, ms in document["prefill"])
            decode = _by_share(document["decode"])
            values = [value for _, points in (*decode, (0.0, prefill)) for point in points for value in point]
            if not prefill or not decode or not all(math.isfinite(value) and value >= 0 for value in values):
                raise ValueError("both lists need at least one point, with non-negative numbers")
        except OSError as error:
            raise invalid(f"Timing file {path} cannot be read: {error.strerror}.", param="timing-file") from error
        except (ValueError, TypeError, KeyError) as error:
            problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise invalid(f"Timing file {path} is not a valid timing table: {problem}.", param="timing-file") from error
        return cls(prefill, decode, speedup)

    def step_s(self, prefill_tokens: int, decoding: int, cache_use: float) -> float:
        milliseconds = 0.0
        if prefill_tokens:
            milliseconds += _between(self._prefill, prefill_tokens)
        if decoding:
            shares = [(share, _between(points, decoding)) for share, points in self._decode]
            milliseconds += _between(shares, cache_use)
        return max(milliseconds, 0.0) * self._scale


def _by_share(rows: Any) -> list[tuple[float, list[Point]]]:
    by_share: dict[float, list[Point]] = {}
    for row in rows:
        sequences, *share, ms = map(float, row)
        by_share.setdefault(share[0] if share else 0.0, []).append((sequences, ms))
    return [(share, sorted(points)) for share, points in sorted(by_share.items())]


def _between(points: Sequence[Point], at: float) -> float:
    """Interpolates linearly; constant before the first point, and extrapolated beyond the last one."""
    if len(points) == 1 or at <= points[0][0]:
        return points[0][1]
    right = min(bisect_right(points, (at, math.inf)), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 if x1 == x0 else y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def prefill_ms(tokens: int) -> float:
    """Returns the milliseconds to prefill this many tokens in one batch."""
    return 4.209989e-7 * tokens * tokens + 1.518344e-2 * tokens + 16.50142


def decode_ms(cache_use: float) -> float:
    """Returns the milliseconds of a decode step, which depend on the cache use rather than the batch size."""
    fitted = -25.74 * cache_use * cache_use + 54.01 * cache_use + 5.74
    return fitted if fitted > 1.0 else 1.0


class StepPacer:
    """Synchronises simulated time with the real clock; deadlines are absolute, so rounding errors do not add up.

    Steps shorter than a millisecond run without sleeping; simulated time is then ahead by at most a millisecond.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time()

    def resume(self) -> None:
        """Advances to the real time after a pause, so that idle time is not made up for."""
        self.now = max(self.now, self._loop.time())

    def spend(self, duration_s: float) -> Awaitable[None]:
        """Returns what waits until a step that started at `now` has ended; it always yields to other tasks."""
        real = self._loop.time()
        end, earliest = self.now + duration_s, real - MAX_LAG_S
        self.now = end if end > earliest else earliest
        ahead = self.now - real
        return asyncio.sleep(ahead) if ahead >= MIN_SLEEP_S else _other_tasks()


@coroutine
def _other_tasks() -> Iterator[None]:
    """Yields to other tasks once, as `asyncio.sleep(0)` does; it runs after every short step."""
    yield
