"""One process that runs an engine's tokenizer: starts, feeds it, and restarts it when it exits.

Callers are threads, each waiting for its own result; an event loop on another thread transfers the bytes. When the
process exits, its calls are sent to the next one, so that no request is lost. The call that was being processed is only
retried a few times, because it may be the cause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import Any

import orjson

from services.common.base.errors import ErrorKind, SluiceError, overloaded, unavailable
from services.common.base.tasks import TaskOwner
from services.common.child_rpc.lane import Call, Lane
from services.common.child_rpc.process import Child, background_loop
from services.preprocess.contract.validation import as_json
from services.preprocess.engines.tokenizer import read_error
from services.preprocess.thread_pool import too_slow

ATTEMPTS = 3
WINDOW = 64
MAX_FRAME_BYTES = 256 << 20
"""Bytes of a message of an engine's tokenizer process; a process that sends a longer one is replaced."""
CLOSE_S = 5.0


def deadly_prompt() -> SluiceError:
    """Returns the error of a prompt that crashes an operator-installed tokenizer."""
    return SluiceError(ErrorKind.INTERNAL, "This prompt crashes the tokenizer; see the service's log.")


class EngineProcess(Lane[Any]):
    """A process and the calls queued for it.

    Args:
        command: starts the process, see `engines.host`.
        limit_s: maximum duration of one call, seconds; on timeout the call fails and its process is killed.
        wait_s: maximum wait of a caller, seconds, including queueing and restarts.
        start_s: maximum time for the process to load its tokenizer, seconds.
        max_waiting: maximum number of outstanding calls; further ones are rejected.
        deadly: returns the error of a call that crashes every process that processes it.

    Attributes:
        over: whether it accepts no more calls: it was closed, or failed to start the first time.
    """

    def __init__(
        self,
        command: Sequence[str],
        limit_s: float,
        wait_s: float,
        start_s: float,
        max_waiting: int = 1024,
        deadly: Callable[[], SluiceError] = deadly_prompt,
    ) -> None:
        super().__init__(TaskOwner(), limit_s, WINDOW)
        self._command = command
        self._wait_s = wait_s
        self._start_s = start_s
        self._max_waiting = max_waiting
        self._deadly = deadly
        self._facts: Future[dict[str, Any]] = Future()
        self.over = False
        self._loop = background_loop()
        self._loop.call_soon_threadsafe(self._open_first)

    @property
    def pid(self) -> int:
        """Id of the running process; 0 for none."""
        child = self.child
        return child.pid if child is not None else 0

    @property
    def up(self) -> bool:
        """Whether the process is ready."""
        return self.child is not None

    def facts(self) -> dict[str, Any]:
        """Returns the facts the process reported when ready; waits for the first start.

        Raises:
            SluiceError: the error reported instead; UNAVAILABLE when it does not start in time.
        """
        try:
            return self._facts.result(self._start_s + 1)
        except FutureTimeout:
            raise unavailable(
                "The tokenizer process did not start in time; retry shortly.", code="model_loading"
            ) from None

    def call(self, verb: str, argument: dict[str, Any]) -> Any:
        """Returns the result of one call.

        Raises:
            SluiceError: the tokenizer's error; OVERLOADED, DEADLINE_EXCEEDED, or `deadly` for a call that crashes.
        """
        future: Future[Any] = Future()
        self._loop.call_soon_threadsafe(self._put, Call[Any](as_json([verb, argument]), future))
        try:
            return future.result(self._wait_s)
        except FutureTimeout:
            self._loop.call_soon_threadsafe(future.cancel)
            raise too_slow(self._wait_s) from None

    def close(self) -> None:
        """Ends the process; callers still waiting receive UNAVAILABLE."""
        self.over = True
        with suppress(FutureTimeout):
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(CLOSE_S)

    # --- on the event loop ---

    def _put(self, call: Call[Any]) -> None:
        if self.outstanding < self._max_waiting or self.over:
            self.add(call)
        else:
            call.resolve(overloaded("Too many prompts are waiting to be tokenized; retry shortly."))

    def _open_first(self) -> None:
        """Takes the lane to opening before any call is added, which would open another process."""
        self._opening = self.tasks.spawn(self._begin(), "child process")

    async def _begin(self) -> None:
        """Starts the first process; its failure fails the model's load, while later starts are retried."""
        try:
            await self.start()
        except SluiceError as error:
            self._facts.set_exception(error)
            self.over = True  # before calls fail, whose callers may call again at once
            failed = error
            self.fail_all(failed.copy)
            self.stop()

    async def _end(self) -> None:
        child, opening = self.child, self._opening
        self.stop()
        if opening is not None:
            await asyncio.gather(opening, return_exceptions=True)
        if child is not None:
            await child.end()

    async def open(self) -> Child:
        try:
            child, hello = await Child.start(self._command, MAX_FRAME_BYTES, self._start_s)
        except (EOFError, TimeoutError, ValueError):
            raise unavailable("The tokenizer process exited during startup.", code="model_loading") from None
        except OSError as error:
            raise unavailable(f"The tokenizer process could not be started: {error.strerror}.") from None
        if "error" in hello:
            await child.end()
            raise read_error(hello["error"])
        if not self._facts.done():
            self._facts.set_result(hello["facts"])
        return child

    def read(self, reply: bytes) -> Any:
        result, error = orjson.loads(reply)
        return result if error is None else read_error(error)

    def failed(self, timed_out: bool) -> SluiceError:
        return too_slow(self._call_s) if timed_out else self._deadly()

    def repeats(self, call: Call[Any]) -> bool:
        """Whether a call is repeated: it may be innocent, unless it has ended too many processes."""
        return call.attempts + 1 < ATTEMPTS
