"""Where the computing happens: small jobs at once, big ones on a bounded number of threads behind a bounded queue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Lock
from typing import TypeVar

from services.common.errors import ErrorKind, SluiceError, overloaded

log = logging.getLogger(__name__)

T = TypeVar("T")


class ComputePool:
    """Runs jobs off the event loop, except those that are done before a thread would have started.

    Args:
        threads: jobs that compute at once.
        max_waiting: jobs that may wait for a thread; more are shed.
        inline_bytes: jobs over at most this much input run on the event loop.
        limit_s: longest that a job may wait and compute, seconds.
    """

    def __init__(self, threads: int, max_waiting: int, inline_bytes: int, limit_s: float) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._threads = threads
        self._room = threads + max_waiting
        self._inline_bytes = inline_bytes
        self._limit_s = limit_s
        self._taken = 0
        self._lock = Lock()  # jobs leave on their threads

    @property
    def taken(self) -> int:
        """Jobs that wait or compute, inline ones aside."""
        return self._taken

    async def run(self, job: Callable[[], T], size: int, may_block: bool = False) -> T:
        """What `job` returns or raises.

        Args:
            job: the work.
            size: bytes of input, a measure of the work.
            may_block: the job waits for something, so it never runs on the event loop.

        Raises:
            SluiceError: OVERLOADED when too many wait; DEADLINE_EXCEEDED after the limit. A job that waits is then
                never started; one that computes finishes unheard, and keeps its place until then. INTERNAL when native
                code panics.
        """
        if size <= self._inline_bytes and not may_block:
            return _without_panic(job)
        if self._taken >= self._room:
            raise overloaded("Too many large prompts are waiting to be tokenized; try again later.")
        with self._lock:
            self._taken += 1
        future = self._executor.submit(_without_panic, job)
        future.add_done_callback(self._leave)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._limit_s)
        except TimeoutError:
            raise SluiceError(
                ErrorKind.DEADLINE_EXCEEDED,
                f"The prompt could not be tokenized within {self._limit_s:g} s.",
                code="stage_timeout",
            ) from None

    async def on_every_thread(self, job: Callable[[], object]) -> None:
        """Runs a job once here and once on each thread of the idle pool, for what libraries set up thread by thread."""
        job()
        together = Barrier(self._threads)

        def once() -> None:
            together.wait(self._limit_s)
            job()

        await asyncio.gather(*(asyncio.wrap_future(self._executor.submit(once)) for _ in range(self._threads)))

    def _leave(self, _: object) -> None:
        with self._lock:
            self._taken -= 1

    def close(self) -> None:
        """Drops what waits; what computes ends with the process."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _without_panic(job: Callable[[], T]) -> T:
    """Native code panics with what is no Exception, and so is answered by nobody."""
    try:
        return job()
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        log.exception("native code failed on a prompt")
        raise SluiceError(ErrorKind.INTERNAL, "The prompt cannot be tokenized: the tokenizer fails on it.") from error
