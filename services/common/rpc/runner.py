"""Runs one service process: uvloop, signals, logging, telemetry and the exit code."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress

import uvloop

from services.common.base import logs
from services.common.base.errors import SluiceError
from services.common.base.tasks import Stop
from services.common.observability import telemetry
from services.common.observability.process_metrics import ProcessMetrics
from services.common.settings.service import ServiceSettings

log = logging.getLogger(__name__)

GARBAGE_EVERY = 20_000
"""Net allocations between two runs of the garbage collector."""
LARGE_BYTES = 1 << 20
"""Buffers from this size on are returned to the system when they are freed."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def run(name: str, settings: ServiceSettings, serve: Callable[[Stop], Awaitable[None]]) -> None:
    """Runs `serve` until it returns. SIGTERM and SIGINT set the event passed to it; a second signal exits immediately.

    A SluiceError is logged as one line, with exit code 1. Does not return.
    """
    logs.configure(name, settings.log_level, settings.log_format)
    _return_large_buffers()
    for problem in settings.misspelt(os.environ):
        log.warning("%s", problem)
    try:
        telemetry.configure(name, settings)
        failed = uvloop.run(_main(name, serve))
    except SluiceError as error:
        log.error("%s", error.message)
        failed = True
    except OSError as error:
        log.error("cannot start: %s", error.strerror or error)
        failed = True
    telemetry.shutdown()
    sys.stderr.flush()
    os._exit(1 if failed else 0)  # do not wait for threads of libraries


def _return_large_buffers() -> None:
    """Keeps glibc from raising the size from which it maps buffers: freed bodies of 8 MiB would stay in its arenas."""
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 8 * LARGE_BYTES)


async def _main(name: str, serve: Callable[[Stop], Awaitable[None]]) -> bool:
    stop = Stop()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(130)
        log.info("stopping")
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    process_metrics = ProcessMetrics(name, loop) if telemetry.measuring() else None
    if process_metrics is not None:
        process_metrics.start()
    # Start-up objects live as long as the process: exclude them from collections. Request objects live as long as their
    # request: the default threshold of 700 allocations would traverse them many times.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_EVERY)
    await serve(stop)
    return stop.failed
