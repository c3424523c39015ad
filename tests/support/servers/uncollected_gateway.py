"""A gateway whose garbage collector never runs by itself: what a request leaves in circles stays, and is counted.

On SIGUSR1 it says what there is in the file that UNCOLLECTED names, and forgets it.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import FrameType

from services.common.rpc import runner
from services.gateway.__main__ import main
from tests.support.oracles.circles import circles

TOLD_IN = "UNCOLLECTED"


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
