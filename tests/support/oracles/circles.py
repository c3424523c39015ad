"""What only holds itself: objects that know each other in a circle wait for a garbage collector that comes late."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Awaitable, Callable

LOOKS = 3


def circles() -> Counter[str]:
    """Objects that nothing but themselves holds, by type; they are forgotten."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    found = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage)
    gc.set_debug(0)
    gc.garbage.clear()
    gc.collect()
    return found


async def circles_of(job: Callable[[], Awaitable[object]], times: int = 20) -> Counter[str]:
    """What `job` leaves in circles when it is done so many times, after it was done once for what it keeps for ever.

    Threads of other tests' libraries may leave some at the same time: of several looks the one that found least counts.
    """
    await job()
    looks: list[Counter[str]] = []
    while len(looks) < LOOKS and (not looks or looks[-1].total() >= times):
        gc.collect()
        gc.disable()
        try:
            for _ in range(times):
                await job()
            looks.append(circles())
        finally:
            gc.enable()
    return min(looks, key=Counter.total)
