"""Compiles grammars from requests outside the event loop, with bounded concurrency and time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from services.common.base.errors import ErrorKind, SluiceError, internal, invalid, overloaded
from services.worker.contract.generation import StructuredOutput

T = TypeVar("T")

log = logging.getLogger(__name__)

MAX_GRAMMAR_S = 10.0
"""Seconds that a request waits for its grammar to be compiled or validated; then it is refused."""
THREADS = 2
"""Grammars compiled or validated at a time."""


class GrammarCompiler:
    """Thread pool of one engine for schemas, patterns and grammars from requests.

    A thread cannot be killed, so the work itself must be bounded in steps and memory. The time limit applies to the
    waiting request only; a thread that overruns it delays only other requests with grammars.

    Args:
        limit_s: maximum time a request waits for its grammar, seconds.
        threads: grammars compiled concurrently.
    """

    def __init__(self, limit_s: float = MAX_GRAMMAR_S, threads: int = THREADS) -> None:
        self._limit_s = limit_s
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="grammar")

    async def run(self, work: Callable[[], T]) -> T:
        """Runs `work` in a thread and returns its result.

        Raises:
            SluiceError: as raised by `work`; INVALID_ARGUMENT when it takes too long, OVERLOADED when no thread became
                free, INTERNAL when it fails otherwise.
        """
        running = self._threads.submit(_contained, work)
        try:
            async with asyncio.timeout(self._limit_s):
                return await asyncio.wrap_future(running)
        except TimeoutError:
            if running.cancel():
                raise overloaded("Too many grammars are being compiled; try again later.") from None
            raise invalid(
                f"The grammar in response_format took longer than {self._limit_s:g} s to compile; simplify it.",
                param="response_format",
                code="invalid_value",
            ) from None

    def close(self) -> None:
        """Cancels queued work without waiting for running work."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def refused_constraint() -> SluiceError:
    """Returns the error for an engine that failed before the first token of constrained output, and still runs.

    Engines compile a constraint when they schedule its request, and say nothing else of one that they refuse.
    """
    return invalid("The engine cannot compile the constraint on the output; change the schema or grammar.")


def naming_constraint(error: SluiceError, guided: StructuredOutput | None) -> SluiceError:
    """Attributes an engine's INVALID_ARGUMENT without `param` to `response_format`, if the request has a grammar.

    The worker has validated every other field before.
    """
    if guided is None or error.kind is not ErrorKind.INVALID_ARGUMENT or error.param:
        return error
    return SluiceError(error.kind, error.message, param="response_format", code=error.code or "invalid_value")


def _contained(work: Callable[[], T]) -> T:
    """Runs `work` and converts every failure, including BaseException from Rust panics, into a SluiceError."""
    try:
        return work()
    except SluiceError:
        raise
    except BaseException:
        log.exception("grammar compilation failed")
        raise internal("The engine failed to compile the grammar of this request.") from None
