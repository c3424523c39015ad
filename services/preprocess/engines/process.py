"""One process that runs an engine's tokenizer: starts, feeds and monitors it, and restarts it when it exits.

Callers are threads, each waiting for its own result; one thread per process transfers the bytes, batching calls that
are ready. When the process exits, its calls are sent to the next one, so that no request is lost. The call that was
being processed is only retried a few times, because it may be the cause.
"""

from __future__ import annotations

import logging
import os
import selectors
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from itertools import count
from threading import Lock, Thread
from time import monotonic
from typing import Any

import orjson

from services.common.errors import ErrorKind, SluiceError, overloaded, unavailable
from services.preprocess.engines.frames import Child
from services.preprocess.engines.tokenizer import read_error
from services.preprocess.validation import as_json

log = logging.getLogger(__name__)

ATTEMPTS = 3
WINDOW = 64
FRAME_BYTES = 4 << 20
BACKOFF_S = (0.1, 5.0)


@dataclass
class _Call:
    number: int
    data: bytes
    future: Future[Any] = field(default_factory=Future)
    attempts: int = 0


def deadly_prompt() -> SluiceError:
    """Returns the error of a prompt that crashes an operator-installed tokenizer."""
    return SluiceError(ErrorKind.INTERNAL, "This prompt crashes the tokenizer; see the service's log.")


class EngineProcess:
    """A process and the calls queued for it.

    Args:
        command: starts the process, see `engines.host`.
        limit_s: maximum duration of one call, seconds; on timeout the call fails and its process is killed.
        wait_s: maximum wait of a caller, seconds, including queueing and restarts.
        start_s: maximum time for the process to load its tokenizer, seconds.
        max_waiting: maximum number of outstanding calls; further ones are rejected.
        deadly: returns the error of a call that crashes every process that processes it.
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
        self._command = command
        self._limit_s = limit_s
        self._wait_s = wait_s
        self._start_s = start_s
        self._max_waiting = max_waiting
        self._deadly = deadly
        self._numbers = count()
        self._lock = Lock()
        self._waiting: deque[_Call] = deque()
        self._sent: deque[_Call] = deque()  # in the order of their replies
        self._head_since = 0.0
        self._closed = False
        self._facts: Future[dict[str, Any]] = Future()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.pid = 0
        self.restarts = 0
        self.up = False
        self._thread = Thread(target=self._run, name="engine-process", daemon=True)
        self._thread.start()

    @property
    def outstanding(self) -> int:
        """Number of calls without a reply."""
        return len(self._waiting) + len(self._sent)

    @property
    def over(self) -> bool:
        """Whether it accepts no more calls: it was closed, or failed to start the first time."""
        return self._closed

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
        call = _Call(next(self._numbers), b"")
        call.data = as_json([call.number, verb, argument])
        with self._lock:
            if self._closed:
                raise unavailable("The service is stopping.")
            if self.outstanding >= self._max_waiting:
                raise overloaded("Too many prompts are waiting to be tokenized; retry shortly.")
            self._waiting.append(call)
            self._wake()
        try:
            return call.future.result(self._wait_s)
        except FutureTimeout:
            call.future.cancel()
            raise _too_slow(self._wait_s) from None

    def close(self) -> None:
        """Ends the process; callers still waiting receive UNAVAILABLE."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._wake()
        self._thread.join(5.0)

    def _wake(self) -> None:
        """Wakes the thread; called with the lock held, because the pipe is closed with it held."""
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:  # the pipe is full: the thread wakes anyway
            return

    # --- the thread ---

    def _run(self) -> None:
        backoff = BACKOFF_S[0]
        while not self._closed:
            child = self._start_child()
            if child is not None:
                backoff = BACKOFF_S[0]
                self.pid, self.up = child.pid, True
                try:
                    self._serve(child)
                finally:
                    self.up = False
                    child.kill()
                if not self._closed:
                    self.restarts += 1
                    log.warning("a tokenizer process exited and is being restarted", extra={"pid": child.pid})
            elif self._failed_to_start():
                break
            else:
                self._pause(backoff)
                backoff = min(backoff * 2, BACKOFF_S[1])
        self._end()

    def _start_child(self) -> Child | None:
        """Starts a child and waits until it has loaded its tokenizer; returns None when that fails."""
        try:
            child = Child(self._command)
        except OSError as error:
            self._fail_first_start(unavailable(f"The tokenizer process could not be started: {error.strerror}."))
            return None
        try:
            hello = orjson.loads(child.receive(monotonic() + self._start_s))
        except (OSError, EOFError, TimeoutError, orjson.JSONDecodeError) as error:
            child.kill()
            log.warning("a tokenizer process did not start", extra={"reason": type(error).__name__})
            self._fail_first_start(unavailable("The tokenizer process exited during startup.", code="model_loading"))
            return None
        if "error" in hello:
            child.kill()
            self._fail_first_start(read_error(hello["error"]))
            return None
        if not self._facts.done():
            self._facts.set_result(hello["facts"])
        return child

    def _fail_first_start(self, error: SluiceError) -> None:
        """Fails the model's load if this is the first start; later starts are retried."""
        if not self._facts.done():
            self._facts.set_exception(error)

    def _failed_to_start(self) -> bool:
        return self._facts.done() and self._facts.exception() is not None

    def _pause(self, seconds: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            deadline = monotonic() + seconds
            while not self._closed and (remaining := deadline - monotonic()) > 0:
                if selector.select(remaining):
                    self._drain_wake()

    def _drain_wake(self) -> None:
        try:
            os.read(self._wake_read, 4096)
        except BlockingIOError:
            return

    def _serve(self, child: Child) -> None:
        """Feeds one child until it exits, hangs, or the process is closed."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            selector.register(child.stdout, selectors.EVENT_READ)
            writing = False
            try:
                while not self._closed:
                    if not child.unsent:
                        child.put(self._take())
                    if bool(child.unsent) != writing:
                        writing = not writing
                        if writing:
                            selector.register(child.stdin, selectors.EVENT_WRITE)
                        else:
                            selector.unregister(child.stdin)
                    for key, _ in selector.select(self._remaining_s()):
                        if key.fd == self._wake_read:
                            self._drain_wake()
                        elif key.fd == child.stdin:
                            child.write()
                        else:
                            for frame in child.read():
                                self._resolve(orjson.loads(frame))
                    if self._remaining_s() == 0.0:
                        self._time_out_head()
                        return
            except (OSError, EOFError, orjson.JSONDecodeError):
                self._requeue()

    def _take(self) -> bytes:
        """Returns waiting calls as one frame, within the window; empty when there are none."""
        batch: list[bytes] = []
        size = 0
        with self._lock:
            while self._waiting and len(self._sent) < WINDOW and size < FRAME_BYTES:
                call = self._waiting.popleft()
                if not call.future.cancelled():
                    if not self._sent:
                        self._head_since = monotonic()
                    self._sent.append(call)
                    batch.append(call.data)
                    size += len(call.data)
        return b"[" + b",".join(batch) + b"]" if batch else b""

    def _remaining_s(self) -> float | None:
        """Seconds the current call may still take; None when there is none."""
        if not self._sent:
            return None
        return max(0.0, self._head_since + self._limit_s - monotonic())

    def _resolve(self, replies: list[tuple[int, Any, dict[str, Any] | None]]) -> None:
        for number, result, error in replies:
            with self._lock:
                call = self._sent.popleft()
                self._head_since = monotonic()
            if call.number != number:
                raise EOFError  # replies are out of order: restart the process
            if not call.future.set_running_or_notify_cancel():
                continue
            if error is None:
                call.future.set_result(result)
            else:
                call.future.set_exception(read_error(error))

    def _time_out_head(self) -> None:
        with self._lock:
            head = self._sent.popleft()
            self._waiting.extendleft(reversed(self._sent))
            self._sent.clear()
        _fail(head, _too_slow(self._limit_s))

    def _requeue(self) -> None:
        """Requeues the calls of a child that exited."""
        with self._lock:
            head = self._sent[0] if self._sent else None
            if head is not None:
                head.attempts += 1
                if head.attempts >= ATTEMPTS:
                    self._sent.popleft()
            self._waiting.extendleft(reversed(self._sent))
            self._sent.clear()
        if head is not None and head.attempts >= ATTEMPTS:
            _fail(head, self._deadly())

    def _end(self) -> None:
        with self._lock:
            self._closed = True
            remaining = [*self._sent, *self._waiting]
            self._sent.clear()
            self._waiting.clear()
            os.close(self._wake_read)
            os.close(self._wake_write)
        for call in remaining:
            _fail(call, unavailable("The tokenizer process has ended."))


def _fail(call: _Call, error: SluiceError) -> None:
    if call.future.set_running_or_notify_cancel():
        call.future.set_exception(error)


def _too_slow(limit_s: float) -> SluiceError:
    return SluiceError(
        ErrorKind.DEADLINE_EXCEEDED,
        f"Tokenizing the prompt took longer than {limit_s:g} s; shorten it or retry.",
        code="stage_timeout",
    )
