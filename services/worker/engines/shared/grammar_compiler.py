"""Runs what foreign grammars cost beside the event loop: a few at a time, each within a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from services.common.errors import ErrorKind, SluiceError, internal, invalid, overloaded
from services.worker.contract.generation import StructuredOutput

T = TypeVar("T")

log = logging.getLogger(__name__)


class GrammarCompiler:
    """Threads of one engine for schemas, patterns and grammars that callers sent.

    A thread cannot be ended: what runs in one needs bounds of its own, in steps and memory. The time here says when a
    request stops waiting for it; then only requests with grammars wait for a thread.

    Args:
        limit_s: longest that one request waits for its grammar, seconds.
        threads: grammars compiled at once.
    """

    def __init__(self, limit_s: float, threads: int) -> None:
        self._limit_s = limit_s
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="grammar")

    async def run(self, work: Callable[[], T]) -> T:
        """Returns what `work` returns.

        Raises:
            SluiceError: what `work` raises; INVALID_ARGUMENT when it takes too long, OVERLOADED when no thread became
                free, INTERNAL when it fails otherwise.
        """
        running = self._threads.submit(_contained, work)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(running), self._limit_s)
        except TimeoutError:
            if running.cancel():
                raise overloaded("The engine compiles too many grammars; try again later.") from None
            raise invalid(
                f"The grammar in response_format took longer than {self._limit_s:g} s to compile.",
                param="response_format",
                code="invalid_value",
            ) from None

    def close(self) -> None:
        """Starts nothing more; does not wait for what runs."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def naming_constraint(error: SluiceError, guided: StructuredOutput | None) -> SluiceError:
    """Returns an engine's refusal of a request with the constraint as the field at fault, where it names no field.

    What else can be wrong with a request the worker has checked before.
    """
    if guided is None or error.kind is not ErrorKind.INVALID_ARGUMENT or error.param:
        return error
    return SluiceError(error.kind, error.message, param="response_format", code=error.code or "invalid_value")


def _contained(work: Callable[[], T]) -> T:
    """Runs work whose failures must not end the engine, not even those that are no Exception: panics of Rust code."""
    try:
        return work()
    except SluiceError:
        raise
    except BaseException:
        log.exception("a grammar could not be compiled")
        raise internal("The engine failed on the grammar of this request.") from None
