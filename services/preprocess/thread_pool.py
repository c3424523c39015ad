"""Runs computations: small ones inline, large ones on a bounded number of threads with a bounded queue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from threading import Barrier, Lock
from typing import TypeVar

from services.common.base.errors import ErrorKind, SluiceError, overloaded

log = logging.getLogger(__name__)

T = TypeVar("T")


class ComputePool:
    """Runs jobs off the event loop, except those that finish faster than a thread switch.

    Args:
        threads: number of concurrent jobs.
        max_waiting: maximum number of waiting jobs; further ones are rejected.
        inline_bytes: jobs with at most this much input run on the event loop.
        limit_s: maximum time a job may wait and run, seconds.
    """

    def __init__(self, threads: int, max_waiting: int, inline_bytes: int, limit_s: float) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._threads = threads
        self._capacity = threads + max_waiting
        self._inline_bytes = inline_bytes
        self._limit_s = limit_s
        self._taken = 0
        self._lock = Lock()  # released on worker threads

    @property
    def taken(self) -> int:
        """Number of waiting and running jobs, without inline ones."""
        return self._taken

    async def run(self, job: Callable[[], T], size: int, may_block: bool = False) -> T:
        """Returns or raises the result of `job`.

        Args:
            job: the work.
            size: bytes of input, a measure of the work.
            may_block: whether the job waits for something, in which case it never runs on the event loop.

        Raises:
            SluiceError: OVERLOADED when too many wait; DEADLINE_EXCEEDED after the limit: a waiting job is then never
                started, a running one completes, its result is dropped, and it counts until then. INTERNAL on native
                panics.
        """
        if size <= self._inline_bytes and not may_block:
            return _without_panic(job)
        if self._taken >= self._capacity:
            raise overloaded("Too many large prompts are waiting to be tokenized; retry shortly.")
        with self._lock:
            self._taken += 1
        future = self._executor.submit(copy_context().run, _without_panic, job)
        future.add_done_callback(self._release)
        try:
            async with asyncio.timeout(self._limit_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise too_slow(self._limit_s) from None

    async def on_every_thread(self, job: Callable[[], object]) -> None:
        """Runs a job here and once on each thread of the idle pool, for per-thread state of libraries."""
        job()
        barrier = Barrier(self._threads)

        def once() -> None:
            barrier.wait(self._limit_s)
            job()

        await asyncio.gather(*(asyncio.wrap_future(self._executor.submit(once)) for _ in range(self._threads)))

    def _release(self, _: object) -> None:
        with self._lock:
            self._taken -= 1

    def close(self) -> None:
        """Drops waiting jobs; running ones end with the process."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def too_slow(limit_s: float) -> SluiceError:
    """Returns the error of a prompt that exceeded its time limit."""
    return SluiceError(
        ErrorKind.DEADLINE_EXCEEDED,
        f"Tokenizing the prompt took longer than {limit_s:g} s; shorten it or retry.",
        code="stage_timeout",
    )


def _without_panic(job: Callable[[], T]) -> T:
    """Converts native panics, which are not subclasses of Exception, into typed errors."""
    try:
        return job()
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        log.exception("native code failed on a prompt")
        raise SluiceError(
            ErrorKind.INTERNAL, "The prompt cannot be tokenized: the tokenizer fails on it; see the service's log."
        ) from error
