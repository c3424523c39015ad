"""The event loop of children whose callers are threads."""

from __future__ import annotations

import asyncio
from threading import Lock, Thread

_lock = Lock()
_loop: asyncio.AbstractEventLoop | None = None


def background_loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop that all such children of this process share, on a thread of its own."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            Thread(target=_loop.run_forever, name="child-rpc", daemon=True).start()
        return _loop
