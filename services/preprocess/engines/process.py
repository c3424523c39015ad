"""One process that runs an engine's tokenizer: started, fed, watched, and replaced when it dies.

Callers are threads; each waits for its own answer. One thread per process moves the bytes. Calls that are ready
together travel together. When the process dies its calls are sent again to the next one, so a death costs time and no
request; the call that was being computed is sent again only so often, because it may be what kills.
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
    """The error of a prompt that ends the processes of a tokenizer that the operator installed."""
    return SluiceError(ErrorKind.INTERNAL, "The tokenizer's process ends whenever it gets this prompt.")


class EngineProcess:
    """A process and the calls on their way to it.

    Args:
        command: starts the process, see `engines.host`.
        limit_s: longest that one call may compute, seconds; one that takes longer is given up and its process killed.
        wait_s: longest that a caller waits for its answer, queueing and restarts included.
        start_s: longest that the process may take until it has loaded its tokenizer.
        max_waiting: calls that may wait; more are shed.
        deadly: the error of a call that ends every process it is given to.
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
        self._sent: deque[_Call] = deque()  # in the order in which answers come
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
        """Calls without an answer."""
        return len(self._waiting) + len(self._sent)

    @property
    def over(self) -> bool:
        """Whether no call will ever be taken again: it was closed, or did not come up the first time."""
        return self._closed

    def facts(self) -> dict[str, Any]:
        """What the process said when it was ready; waits for the first start.

        Raises:
            SluiceError: what it said instead; UNAVAILABLE when it does not come up in time.
        """
        try:
            return self._facts.result(self._start_s + 1)
        except FutureTimeout:
            raise unavailable("The tokenizer's process does not start.", code="model_loading") from None

    def call(self, verb: str, argument: dict[str, Any]) -> Any:
        """The answer to one call.

        Raises:
            SluiceError: what the tokenizer raised; OVERLOADED, DEADLINE_EXCEEDED, or `deadly` for a call that kills.
        """
        call = _Call(next(self._numbers), b"")
        call.data = as_json([call.number, verb, argument])
        with self._lock:
            if self._closed:
                raise unavailable("The service is stopping.")
            if self.outstanding >= self._max_waiting:
                raise overloaded("Too many prompts are waiting to be tokenized; try again later.")
            self._waiting.append(call)
            self._wake()
        try:
            return call.future.result(self._wait_s)
        except FutureTimeout:
            call.future.cancel()
            raise _too_slow(self._wait_s) from None

    def close(self) -> None:
        """Ends the process; callers that still wait hear UNAVAILABLE."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._wake()
        self._thread.join(5.0)

    def _wake(self) -> None:
        """With the lock, because the pipe is closed with it."""
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:  # full: the thread will wake anyway
            return

    # --- the thread ---

    def _run(self) -> None:
        backoff = BACKOFF_S[0]
        while not self._closed:
            child = self._started()
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
                    log.warning("a tokenizer's process ended and is started again", extra={"pid": child.pid})
            elif self._refused():
                break
            else:
                self._pause(backoff)
                backoff = min(backoff * 2, BACKOFF_S[1])
        self._end()

    def _started(self) -> Child | None:
        """A child that has loaded its tokenizer; None when it did not come up."""
        try:
            child = Child(self._command)
        except OSError as error:
            self._never(unavailable(f"The tokenizer's process cannot be started: {error.strerror}."))
            return None
        try:
            hello = orjson.loads(child.receive(monotonic() + self._start_s))
        except (OSError, EOFError, TimeoutError, orjson.JSONDecodeError) as error:
            child.kill()
            log.warning("a tokenizer's process did not start", extra={"reason": type(error).__name__})
            self._never(unavailable("The tokenizer's process ended while it was starting.", code="model_loading"))
            return None
        if "error" in hello:
            child.kill()
            self._never(read_error(hello["error"]))
            return None
        if not self._facts.done():
            self._facts.set_result(hello["facts"])
        return child

    def _never(self, error: SluiceError) -> None:
        """A first start that fails is the end: the model's load fails with it. A later one is tried again."""
        if not self._facts.done():
            self._facts.set_exception(error)

    def _refused(self) -> bool:
        return self._facts.done() and self._facts.exception() is not None

    def _pause(self, seconds: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            deadline = monotonic() + seconds
            while not self._closed and (left := deadline - monotonic()) > 0:
                if selector.select(left):
                    self._drain_wake()

    def _drain_wake(self) -> None:
        try:
            os.read(self._wake_read, 4096)
        except BlockingIOError:
            return

    def _serve(self, child: Child) -> None:
        """Feeds one child until it dies, hangs, or the process is closed."""
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
                    for key, _ in selector.select(self._patience()):
                        if key.fd == self._wake_read:
                            self._drain_wake()
                        elif key.fd == child.stdin:
                            child.write()
                        else:
                            for frame in child.read():
                                self._answer(orjson.loads(frame))
                    if self._patience() == 0.0:
                        self._give_up_head()
                        return
            except (OSError, EOFError, orjson.JSONDecodeError):
                self._lost()

    def _take(self) -> bytes:
        """What waits, as one frame, within the window; empty when nothing does."""
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

    def _patience(self) -> float | None:
        """How long the call that is being computed may still take; None when none is."""
        if not self._sent:
            return None
        return max(0.0, self._head_since + self._limit_s - monotonic())

    def _answer(self, replies: list[tuple[int, Any, dict[str, Any] | None]]) -> None:
        for number, result, error in replies:
            with self._lock:
                call = self._sent.popleft()
                self._head_since = monotonic()
            if call.number != number:
                raise EOFError  # out of step: only a new process can be trusted
            if not call.future.set_running_or_notify_cancel():
                continue
            if error is None:
                call.future.set_result(result)
            else:
                call.future.set_exception(read_error(error))

    def _give_up_head(self) -> None:
        with self._lock:
            head = self._sent.popleft()
            self._waiting.extendleft(reversed(self._sent))
            self._sent.clear()
        _fail(head, _too_slow(self._limit_s))

    def _lost(self) -> None:
        """The child is gone: everything it had is sent again."""
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
            left = [*self._sent, *self._waiting]
            self._sent.clear()
            self._waiting.clear()
            os.close(self._wake_read)
            os.close(self._wake_write)
        for call in left:
            _fail(call, unavailable("The tokenizer's process is gone."))


def _fail(call: _Call, error: SluiceError) -> None:
    if call.future.set_running_or_notify_cancel():
        call.future.set_exception(error)


def _too_slow(limit_s: float) -> SluiceError:
    return SluiceError(
        ErrorKind.DEADLINE_EXCEEDED, f"The prompt could not be tokenized within {limit_s:g} s.", code="stage_timeout"
    )
