"""Runs one service process: uvloop, signals, logs, telemetry, and an exit code that means something."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable

import uvloop

from services.common import logs
from services.common.errors import SluiceError
from services.common.observability import telemetry
from services.common.observability.process_metrics import ProcessMetrics
from services.common.settings import ServiceSettings
from services.common.tasks import Stop

log = logging.getLogger(__name__)

GARBAGE_EVERY = 20_000
"""Objects that are made, less those that are freed, between two runs of the garbage collector."""


def run(name: str, settings: ServiceSettings, serve: Callable[[Stop], Awaitable[None]]) -> None:
    """Runs `serve` until it returns; SIGTERM and SIGINT set the event it was given, a second one ends at once.

    A SluiceError is one line on standard error and exit code 1. Does not return.
    """
    logs.configure(name, settings.log_level, settings.log_format)
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
    os._exit(1 if failed else 0)  # threads of libraries must not delay the end


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
    measured = ProcessMetrics(name, loop) if telemetry.measuring() else None
    if measured is not None:
        measured.start()
    # What start-up made lives as long as the process: keep the collector from walking it again and again. And what a
    # request makes lives as long as the request: looked at every 700 objects, all of it would be walked many times.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_EVERY)
    await serve(stop)
    return stop.failed
