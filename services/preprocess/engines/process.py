"""One process that runs an engine's tokenizer: starts, feeds and monitors it, and restarts it when it exits.

Callers are threads, each waiting for its own result; an event loop on another thread transfers the bytes. When the
process exits, its calls are sent to the next one, so that no request is lost. The call that was being processed is only
retried a few times, because it may be the cause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from threading import Event
from typing import Any

import orjson

from services.common.child_rpc.call_queue import Call, CallQueue
from services.common.child_rpc.process import Child, background_loop
from services.common.errors import ErrorKind, SluiceError, overloaded, unavailable
from services.preprocess.engines.tokenizer import read_error
from services.preprocess.thread_pool import too_slow
from services.preprocess.validation import as_json

log = logging.getLogger(__name__)

ATTEMPTS = 3
WINDOW = 64
MAX_FRAME_BYTES = 256 << 20
"""Bytes of a message of an engine's tokenizer process; a process that sends a longer one is replaced."""
BACKOFF_S = (0.1, 5.0)
CLOSE_S = 5.0


def deadly_prompt() -> SluiceError:
    """Returns the error of a prompt that crashes an operator-installed tokenizer."""
    return SluiceError(ErrorKind.INTERNAL, "This prompt crashes the tokenizer; see the service's log.")


class EngineProcess(CallQueue[Any]):
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
        restarts: how often it was started again.
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
        super().__init__(limit_s, WINDOW)
        self._command = command
        self._wait_s = wait_s
        self._start_s = start_s
        self._max_waiting = max_waiting
        self._deadly = deadly
        self._facts: Future[dict[str, Any]] = Future()
        self.over = False
        self.restarts = 0
        self._failed = asyncio.Event()
        self._ended = Event()
        self._loop = background_loop()
        self._running = asyncio.run_coroutine_threadsafe(self._run(), self._loop)

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
        self._running.cancel()
        self._ended.wait(CLOSE_S)

    # --- on the event loop ---

    def _put(self, call: Call[Any]) -> None:
        if self.over:
            call.resolve(unavailable("The service is stopping."))
        elif self.outstanding >= self._max_waiting:
            call.resolve(overloaded("Too many prompts are waiting to be tokenized; retry shortly."))
        else:
            self.waiting.append(call)
            self.send_ready()

    async def _run(self) -> None:
        backoff = BACKOFF_S[0]
        child: Child | None = None
        try:
            while True:
                if (child := await self._start()) is None:
                    if self._facts.exception() is not None:
                        return
                    await asyncio.sleep(backoff)
                    backoff = min(backoff * 2, BACKOFF_S[1])
                    continue
                backoff = BACKOFF_S[0]
                self._failed.clear()
                self.use(child)
                await self._failed.wait()
                await child.end()
                self.restarts += 1
                log.warning("a tokenizer process exited and is being restarted", extra={"pid": child.pid})
        finally:
            self.over = True
            self.drop()
            for call in self.waiting:
                call.resolve(unavailable("The tokenizer process has ended."))
            self.waiting.clear()
            with suppress(asyncio.CancelledError):
                if child is not None:
                    await child.end()
            self._ended.set()

    async def _start(self) -> Child | None:
        """Starts a process and waits until it has loaded its tokenizer; returns None when that fails."""
        try:
            child = await Child.launch(self._command, MAX_FRAME_BYTES)
        except OSError as error:
            self._fail_first_start(unavailable(f"The tokenizer process could not be started: {error.strerror}."))
            return None
        try:
            hello = await child.receive_json(self._start_s)
        except BaseException as error:
            await child.end()
            if not isinstance(error, EOFError | TimeoutError | ValueError):
                raise
            log.warning("a tokenizer process did not start", extra={"reason": type(error).__name__})
            self._fail_first_start(unavailable("The tokenizer process exited during startup.", code="model_loading"))
            return None
        if "error" in hello:
            await child.end()
            self._fail_first_start(read_error(hello["error"]))
            return None
        if not self._facts.done():
            self._facts.set_result(hello["facts"])
        return child

    def _fail_first_start(self, error: SluiceError) -> None:
        """Fails the model's load if this is the first start; later starts are retried."""
        if not self._facts.done():
            self._facts.set_exception(error)

    def on_reply(self, call: Call[Any], reply: bytes) -> None:
        try:
            result, error = orjson.loads(reply)
            call.resolve(result if error is None else read_error(error))
        except (ValueError, TypeError, KeyError):
            self.sent.appendleft(call)
            self.on_failure(timed_out=False)

    def on_failure(self, timed_out: bool) -> None:
        """Fails the current call if it timed out or has ended too many processes; the others are sent again."""
        head = self.take_head()
        if head is not None:
            head.attempts += 1
            if timed_out:
                head.resolve(too_slow(self._limit_s))
            elif head.attempts >= ATTEMPTS:
                head.resolve(self._deadly())
            else:
                self.sent.appendleft(head)
        self.drop()
        self._failed.set()
