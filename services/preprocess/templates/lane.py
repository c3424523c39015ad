"""A lane: the templates of one origin (a model, or the clients), run sequentially in one limited process.

When the process must be killed, the running template is blamed; the other calls are sent again to the next process.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from math import inf
from typing import Protocol

import orjson

from services.common.budgets import Budget
from services.common.child_rpc.call_queue import Call, CallQueue
from services.common.child_rpc.process import Child
from services.common.errors import ErrorKind, SluiceError, invalid, unavailable
from services.common.tasks import TaskOwner
from services.preprocess.templates import templates
from services.preprocess.templates.child import ENDS, SOURCE_SIZE, TEXT, read_text
from services.preprocess.templates.fair_calls import FairCalls
from services.preprocess.templates.templates import RenderedText

START_S = 30.0
"""Maximum time for the first process to load Jinja; generous, for busy machines."""
WINDOW = 32
FAIR_WINDOW = 2
"""Calls that a process of several origins has at once: their order is fixed."""
GRACE_S = 1.0
MAX_ERROR_CHARS = 1000
"""Characters of each part of an error of the templates' process; the rest is left out."""
KILLS_FORGIVEN = 2
PAUSE_S = (1.0, 60.0)
COMPILE_ONLY = b""
_MESSAGES = re.compile(r"messages(\[\d{1,9}\])?").fullmatch


class LaneHome(Protocol):
    """What lanes share; implemented by `TemplateProcesses`."""

    limit_s: float
    wait_s: float
    tasks: TaskOwner

    async def open(self, lane: Lane) -> Child:
        """Starts a process for a lane."""

    def ended(self, lane: Lane) -> None:
        """Called when the lane's process has ended."""

    def rests(self, lane: Lane) -> None:
        """Called when the lane is idle."""


class Lane(CallQueue[RenderedText]):
    """The calls of one origin and the process that runs them.

    Args:
        home: starts processes.
        blame: converts a template's error into the one its callers receive.
        waiting: limits the waiting calls.
        patient: several origins share the lane: none are rejected for a while after templates were killed several times
            in a row.
    """

    def __init__(
        self,
        home: LaneHome,
        blame: Callable[[SluiceError], SluiceError],
        waiting: Budget,
        patient: bool = False,
    ) -> None:
        super().__init__(home.limit_s + GRACE_S, FAIR_WINDOW if patient else WINDOW)
        self.waiting: FairCalls = FairCalls()
        self._home = home
        self._blame = blame
        self._waiting_budget = waiting
        self._patient = patient
        self._opening: asyncio.Task[None] | None = None
        self._kills = 0
        self._refused_until = -inf
        self._closed = False
        self.used_at = 0.0

    async def call(self, source: str, job: bytes, origin: str = "") -> RenderedText:
        """Returns the prompt; only compiles the template if `job` is COMPILE_ONLY.

        Args:
            origin: whose template it is.

        Raises:
            SluiceError: as `templates.render`, or as converted by `blame`; OVERLOADED when too many calls wait or
                this one was not rendered in time; UNAVAILABLE when the lane was closed.
        """
        if self._closed:
            raise stopping()
        if len(source) > templates.MAX_TEMPLATE_CHARS:
            raise self._blame(templates.too_long_a_template())
        loop = asyncio.get_running_loop()
        if loop.time() < self._refused_until:
            raise self._blame(_exhausted())
        template = source.encode("utf-8", "replace")
        call = Call[RenderedText](SOURCE_SIZE.pack(len(template)) + template + job, loop.create_future(), origin=origin)
        self.waiting.append(call)
        if self.outstanding > self._waiting_budget.limit:
            self.waiting.pop_of_busiest().resolve(self._overloaded())
        self.send_ready()
        assert isinstance(call.future, asyncio.Future)
        try:
            async with asyncio.timeout(self._home.wait_s if self.child is not None else self._home.wait_s + START_S):
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

    def close(self) -> None:
        """Ends the process, and fails the remaining calls with UNAVAILABLE."""
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
        self.drop()
        self._fail_all(stopping)

    def drop(self) -> None:
        super().drop()
        self._home.ended(self)

    def on_no_child(self) -> None:
        if self._opening is None:
            self._opening = self._home.tasks.spawn(self._open(), "template process")

    async def _open(self) -> None:
        try:
            child = await self._home.open(self)
        except SluiceError as error:
            failed = error
            self._fail_all(lambda: _copy(failed))
            return
        finally:
            self._opening = None
        self.use(child)

    def on_empty(self) -> None:
        self.used_at = asyncio.get_running_loop().time()
        self._home.rests(self)

    def on_reply(self, call: Call[RenderedText], reply: bytes) -> None:
        self._charge(call)
        kind, content = reply[:1], reply[1:]
        if kind == TEXT:
            self._kills = 0
            call.resolve(read_text(content))
            return
        tainted = self.replies > 1
        if kind == ENDS:
            self.drop()
        if kind != ENDS or not self._retry(call, tainted):
            call.resolve(self._blame(_read_error(content)))

    def on_failure(self, timed_out: bool) -> None:
        """Blames the running template, unless it is retried."""
        head = self.take_head()
        tainted = self.replies > 0
        self.drop()
        if head is None:
            return
        self._charge(head)
        if not timed_out and self._retry(head, tainted):
            return
        error = templates.took_too_long(self._home.limit_s) if timed_out else _exhausted()
        head.resolve(self._blame(error))
        self._count_kill(error)

    def _retry(self, call: Call[RenderedText], tainted: bool) -> bool:
        """Queues a call again, once, whose process ended after it had run others: they may have used up the memory."""
        if not tainted or call.attempts:
            return False
        call.attempts += 1
        self.waiting.appendleft(call)
        return True

    def _charge(self, call: Call[RenderedText]) -> None:
        self.waiting.charge(call, asyncio.get_running_loop().time() - call.started_at)

    def _count_kill(self, error: SluiceError) -> None:
        self._kills += 1
        if self._patient or self._kills <= KILLS_FORGIVEN:
            return
        pause_s = min(PAUSE_S[0] * 2 ** (self._kills - KILLS_FORGIVEN - 1), PAUSE_S[1])
        self._refused_until = asyncio.get_running_loop().time() + pause_s
        self._fail_all(lambda: self._blame(error))

    def _fail_all(self, error: Callable[[], SluiceError]) -> None:
        """Fails each call with its own error: a shared one would retain the frames of all."""
        while self.waiting:
            self.waiting.popleft().resolve(error())


def stopping() -> SluiceError:
    """Returns the error of calls during shutdown."""
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
    return invalid(message, param=param if _MESSAGES(param) else "chat_template", code=code)
