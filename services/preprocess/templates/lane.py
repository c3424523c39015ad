"""A lane: the templates of one origin (a model, or the clients), run sequentially in one limited process.

Calls that are ready are sent together, and the process has the next request before it has answered the previous one.
When it must be killed, the running template is blamed; the other calls are sent again to the next process.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from math import inf
from typing import Protocol

import orjson

from services.common.budgets import Budget
from services.common.errors import ErrorKind, SluiceError, invalid, unavailable
from services.common.tasks import TaskOwner
from services.preprocess.templates import templates
from services.preprocess.templates.child import ENDS, REQUEST, TEXT, UNKNOWN
from services.preprocess.templates.child_starter import START_S, Child

WINDOW = 32
GRACE_S = 1.0
MAX_KNOWN = 1024
MAX_ERROR_CHARS = 1000
KILLS_FORGIVEN = 2
PAUSE_S = (1.0, 60.0)
COMPILE_ONLY = b""


@dataclass(eq=False)
class Call:
    """A template to render, or to compile if `variables` is COMPILE_ONLY."""

    source: str
    digest: bytes
    variables: bytes
    future: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    retried: bool = False


class Home(Protocol):
    """Starts the processes of lanes."""

    limit_s: float
    wait_s: float
    tasks: TaskOwner

    async def open(self, lane: Lane) -> Child:
        """Starts a process for a lane; waits while too many run."""
        ...

    def ended(self, lane: Lane) -> None:
        """Called when the lane's process has ended."""
        ...

    def rests(self, lane: Lane) -> None:
        """Called when the lane is idle."""
        ...


class Lane:
    """The calls of one origin and the process that runs them. Belongs to one event loop.

    Args:
        home: starts processes.
        blame: converts a template's error into the one its callers receive.
        waiting: limits the waiting calls.
        patient: do not reject calls for a while after templates were killed several times in a row.
    """

    def __init__(
        self, home: Home, blame: Callable[[SluiceError], SluiceError], waiting: Budget, patient: bool = False
    ) -> None:
        self._home = home
        self._blame = blame
        self._waiting_budget = waiting
        self._patient = patient
        self._waiting: deque[Call] = deque()
        self._sent: deque[Call] = deque()  # in the order of their replies
        self._child: Child | None = None
        self._opening: asyncio.Task[None] | None = None
        self._known: set[bytes] = set()  # digests of the templates sent to this process
        self._replies = 0  # of this process
        self._head_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._kills = 0
        self._refused_until = -inf
        self._closed = False
        self.used_at = 0.0

    @property
    def outstanding(self) -> int:
        """Number of calls without a reply."""
        return len(self._waiting) + len(self._sent)

    @property
    def running(self) -> bool:
        """Whether there is a process."""
        return self._child is not None

    async def call(self, source: str, variables: bytes) -> str:
        """Returns the prompt.

        Raises:
            SluiceError: as `templates.render`, or as converted by `blame`; OVERLOADED when too many calls wait or
                this one was not rendered in time; UNAVAILABLE when the lane was closed.
        """
        if self._closed:
            raise _stopping()
        if asyncio.get_running_loop().time() < self._refused_until:
            raise self._blame(_exhausted())
        if self.outstanding >= self._waiting_budget.limit:
            raise self._overloaded()
        call = Call(source, _digest(source), variables)
        self._waiting.append(call)
        self._send_ready()
        try:
            async with asyncio.timeout(self._home.wait_s if self.running else self._home.wait_s + START_S):
                return await call.future
        except TimeoutError:
            raise self._overloaded() from None

    def _overloaded(self) -> SluiceError:
        return self._waiting_budget.refuse(
            "Too many chat templates are running; retry shortly",
            kind=ErrorKind.OVERLOADED,
            code="overloaded",
            retry_after_ms=1000,
        )

    def end(self) -> None:
        """Ends the process; a later call starts another."""
        self._drop()

    def close(self) -> None:
        """Ends the process, and fails the remaining calls with UNAVAILABLE."""
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
        self._drop()
        self._fail_all(_stopping)

    # --- one process after the other ---

    def _send_ready(self) -> None:
        """Sends as many calls as the window allows."""
        if self._child is None:
            if self._opening is None and self._waiting:
                self._opening = self._home.tasks.spawn(self._open(), "template process")
            return
        frames: list[bytes] = []
        while self._waiting and len(self._sent) < WINDOW:
            call = self._waiting.popleft()
            if call.future.done():
                continue
            if not self._sent:
                self._start_timer()
            self._sent.append(call)
            frames.append(self._frame(call))
        if frames:
            self._child.send(b"".join(frames))
        elif not self._sent:
            self.used_at = asyncio.get_running_loop().time()
            self._home.rests(self)

    def _frame(self, call: Call) -> bytes:
        source = b""
        if call.digest not in self._known:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known.add(call.digest)
            source = call.source.encode("utf-8", "replace")
        header = REQUEST.pack(len(source), len(call.variables), call.variables == COMPILE_ONLY, call.digest)
        return header + source + call.variables

    async def _open(self) -> None:
        try:
            child = await self._home.open(self)
        except SluiceError as error:
            failed = error
            self._fail_all(lambda: _copy(failed))
            return
        finally:
            self._opening = None
        child.on_reply, child.on_lost = self._on_reply, self._on_lost
        self._child, self._replies = child, 0
        self._send_ready()

    def _start_timer(self) -> None:
        """Records that the first sent call starts running now."""
        loop = asyncio.get_running_loop()
        self._head_since = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(self._home.limit_s + GRACE_S, self._check_deadline)

    def _check_deadline(self) -> None:
        self._timer = None
        if not self._sent:
            return
        loop = asyncio.get_running_loop()
        end = self._head_since + self._home.limit_s + GRACE_S
        if loop.time() < end:
            self._timer = loop.call_at(end, self._check_deadline)
        else:
            self._abandon(templates.took_too_long(self._home.limit_s), certain=True)

    def _on_reply(self, kind: int, content: bytes) -> None:
        if not self._sent:
            self._abandon(_exhausted(), certain=True)  # an unsolicited reply
            return
        call = self._sent.popleft()
        self._replies += 1
        if self._sent:
            self._start_timer()
        if kind == UNKNOWN and not call.retried:
            call.retried = True
            self._known.discard(call.digest)
            self._waiting.appendleft(call)
        elif kind == TEXT:
            self._kills = 0
            _resolve(call, content.decode("utf-8", "replace"))
        else:
            _resolve(call, self._blame(_read_error(content)))
        if kind == ENDS:
            self._drop()
        self._send_ready()

    def _on_lost(self) -> None:
        self._child = None
        self._abandon(_exhausted(), certain=False)

    def _abandon(self, error: SluiceError, certain: bool) -> None:
        """Ends a process that is unusable.

        Args:
            error: the error of the template that ran.
            certain: whether this template is at fault; otherwise an earlier one may have used up the memory, and it is
                retried once in a fresh process.
        """
        head = self._sent.popleft() if self._sent else None
        tainted = self._replies > 0
        self._drop()
        if head is not None:
            if not certain and tainted and not head.retried:
                head.retried = True
                self._waiting.appendleft(head)
            else:
                _resolve(head, self._blame(error))
                self._count_kill(error)
        self._send_ready()

    def _count_kill(self, error: SluiceError) -> None:
        self._kills += 1
        if self._patient or self._kills <= KILLS_FORGIVEN:
            return
        pause_s = min(PAUSE_S[0] * 2 ** (self._kills - KILLS_FORGIVEN - 1), PAUSE_S[1])
        self._refused_until = asyncio.get_running_loop().time() + pause_s
        self._fail_all(lambda: self._blame(error))

    def _drop(self) -> None:
        """Ends the process and requeues the calls it was sent."""
        self._waiting.extendleft(reversed(self._sent))
        self._sent.clear()
        self._known.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        child, self._child = self._child, None
        if child is not None:
            child.kill()
        self._home.ended(self)

    def _fail_all(self, error: Callable[[], SluiceError]) -> None:
        """Fails each call with its own error: a shared one would retain the frames of all."""
        while self._waiting:
            _resolve(self._waiting.popleft(), error())


def _resolve(call: Call, result: str | SluiceError) -> None:
    if call.future.done():
        return
    if isinstance(result, SluiceError):
        call.future.set_exception(result)
    else:
        call.future.set_result(result)


def _stopping() -> SluiceError:
    return unavailable("The service is stopping.")


def _exhausted() -> SluiceError:
    return invalid("The chat template requires too much time or memory.", param="chat_template")


def _copy(error: SluiceError) -> SluiceError:
    return SluiceError(
        error.kind, error.message, param=error.param, code=error.code, retry_after_ms=error.retry_after_ms
    )


def _read_error(content: bytes) -> SluiceError:
    """Returns the error in a reply; a process compromised by a template may send anything."""
    try:
        form = orjson.loads(content)
        message, param, code = (str(form[name])[:MAX_ERROR_CHARS] for name in ("message", "param", "code"))
    except (ValueError, KeyError, TypeError):
        return _exhausted()
    return invalid(message, param="messages" if param == "messages" else "chat_template", code=code)


@lru_cache(maxsize=256)
def _digest(source: str) -> bytes:
    return blake2b(source.encode("utf-8", "replace"), digest_size=16).digest()
