"""A gateway whose garbage collector never runs by itself: what a request leaves in circles stays, and is counted.

On SIGUSR1 it says what there is in the file that UNCOLLECTED names, and forgets it.
"""

from __future__ import annotations

import gc
import json
import os
import signal
from collections import Counter
from pathlib import Path
from types import FrameType

from services.common import runner
from services.gateway.__main__ import main

TOLD_IN = "UNCOLLECTED"


def circles() -> Counter[str]:
    """Objects that nothing but themselves holds, by type."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    found = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage)
    gc.set_debug(0)
    gc.garbage.clear()
    gc.collect()
    return found


def tell(number: int, frame: FrameType | None) -> None:
    """The handler."""
    place = Path(os.environ[TOLD_IN])
    made = place.with_suffix(".new")
    made.write_text(json.dumps(circles()))
    made.replace(place)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, tell)
    runner.GARBAGE_EVERY = 0
    main()
