"""How long an engine step would take on a real accelerator."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.common.errors import invalid


class StepTiming(ABC):
    """A model of step durations."""

    @abstractmethod
    def step_s(self, prefill_tokens: int, decoding: int, cache_use: float) -> float:
        """Seconds of one step.

        Args:
            prefill_tokens: prompt tokens computed in the step, over all sequences.
            decoding: sequences that compute one token each.
            cache_use: share of KV-cache blocks held by sequences, 0 to 1.
        """


class ModelledTiming(StepTiming):
    """Polynomials fitted to a GPU: quadratic in the prefilled tokens, and in the cache use while decoding."""

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
    """The same duration for every step, plus a constant per prompt token."""

    def __init__(self, step_ms: float, prefill_us: float, speedup: float = 1.0) -> None:
        self._step_s = step_ms * 1e-3 / speedup
        self._prefill_s = prefill_us * 1e-6 / speedup

    def step_s(self, prefill_tokens: int, decoding: int, cache_use: float) -> float:
        return self._step_s + prefill_tokens * self._prefill_s


Point = tuple[float, float]


class TableTiming(StepTiming):
    """Measured points with straight lines between them, and the last line beyond the last point.

    The file is a JSON object with two lists: `prefill` of [tokens, ms], and `decode` of [sequences, ms] or of
    [sequences, cache share, ms] where the share of the cache in use was measured too.

    Args:
        prefill: [tokens, ms] by ascending tokens, at least one.
        decode: by cache share, ascending: the share, and its [sequences, ms].
    """

    def __init__(
        self, prefill: Sequence[Point], decode: Sequence[tuple[float, Sequence[Point]]], speedup: float = 1.0
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._scale = 1e-3 / speedup

    @classmethod
    def read(cls, path: Path, speedup: float = 1.0) -> TableTiming:
        """SluiceError(INVALID_ARGUMENT) when the file cannot be read or holds no such table."""
        try:
            document = json.loads(path.read_text("utf-8"))
            prefill = sorted((float(tokens), float(ms)) for tokens, ms in document["prefill"])
            decode = _by_share(document["decode"])
            values = [value for _, points in (*decode, (0.0, prefill)) for point in points for value in point]
            if not prefill or not decode or not all(math.isfinite(value) and value >= 0 for value in values):
                raise ValueError("it needs at least one point of each, with numbers of at least 0")
        except OSError as error:
            raise invalid(f"Timing file {path} cannot be read: {error.strerror}.", param="timing-file") from error
        except (ValueError, TypeError, KeyError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise invalid(f"Timing file {path} is no timing table: {what}.", param="timing-file") from error
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
    found: dict[float, list[Point]] = {}
    for row in rows:
        sequences, *share, ms = map(float, row)
        found.setdefault(share[0] if share else 0.0, []).append((sequences, ms))
    return [(share, sorted(points)) for share, points in sorted(found.items())]


def _between(points: Sequence[Point], at: float) -> float:
    """Before the first point its value; beyond the last one the line goes on."""
    if len(points) == 1 or at <= points[0][0]:
        return points[0][1]
    right = min(bisect_right(points, (at, math.inf)), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 if x1 == x0 else y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def prefill_ms(tokens: int) -> float:
    """Milliseconds to compute this many prompt tokens in one batch."""
    return 4.209989e-7 * tokens * tokens + 1.518344e-2 * tokens + 16.50142


def decode_ms(cache_use: float) -> float:
    """Milliseconds to compute one token for each running sequence; the batch hardly matters, its cache does."""
    return max(1.0, -25.74 * cache_use * cache_use + 54.01 * cache_use + 5.74)
