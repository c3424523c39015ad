"""The waiting calls of a lane, in an order that is fair between origins."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from contextvars import ContextVar

from services.common.child_rpc.lane import Call
from services.preprocess.templates.templates import RenderedText

MAX_KNOWN_ORIGINS = 1024
"""Origins of templates whose used time is remembered; the least recently used is forgotten."""

origin: ContextVar[str] = ContextVar("template_origin", default="")
"""Whose template the current call renders, such as a tenant; empty: unknown."""


class FairCalls(deque[Call[RenderedText]]):
    """Calls of which those whose origin has used least time leave first, in their order of arrival per origin.

    An origin that has been idle, or is new, has used as much as the one that last had its turn: it is served next, and
    has saved up nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._used_s: OrderedDict[str, float] = OrderedDict()  # by origin; the least recently charged first
        self._level_s = 0.0

    def popleft(self) -> Call[RenderedText]:
        """Removes and returns the next call; raises IndexError without one."""
        chosen = min(self, key=self._used, default=None)
        if chosen is None:
            raise IndexError("no call waits")
        self._level_s = max(self._level_s, self._used(chosen))
        self.remove(chosen)
        return chosen

    def charge(self, call: Call[RenderedText], seconds: float) -> None:
        """Adds the time for which a call ran to what its origin has used."""
        self._used_s[call.origin] = max(self._used(call), self._level_s) + seconds
        self._used_s.move_to_end(call.origin)
        if len(self._used_s) > MAX_KNOWN_ORIGINS:
            self._used_s.popitem(last=False)

    def pop_of_busiest(self) -> Call[RenderedText]:
        """Removes and returns the last call of the origin with the most waiting calls."""
        busiest, _ = Counter(call.origin for call in self).most_common(1)[0]
        last = next(call for call in reversed(self) if call.origin == busiest)
        self.remove(last)
        return last

    def _used(self, call: Call[RenderedText]) -> float:
        return self._used_s.get(call.origin, 0.0)
