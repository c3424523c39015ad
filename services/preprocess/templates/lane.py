"""A lane: the templates of one origin (a model, or the clients), run sequentially in one limited process.

When the process must be killed, the running template is blamed; the other calls are sent again to the next process.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from math import inf

import orjson

from services.common.base.budgets import Budget, BudgetPool
from services.common.base.errors import ErrorKind, SluiceError, invalid
from services.common.child_rpc.lane import Call
from services.common.child_rpc.pool import ForkLane, ForkPool
from services.common.child_rpc.process import Child
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


class LaneSlots:
    """Places for the processes of models; a lane that waits for one ends the least recently used idle process.

    Args:
        count: number of places.
        wait_s: maximum wait for one, seconds.
    """

    def __init__(self, count: int, wait_s: float) -> None:
        self._budget = BudgetPool("template_processes", count, "")
        self._wait_s = wait_s
        self._holders: set[TemplateLane] = set()
        self._waiting = 0

    async def take(self, lane: TemplateLane) -> None:
        """Takes a place; raises SluiceError (OVERLOADED) if none becomes free in time."""
        if not self._budget.try_take(1):
            idle = [held for held in self._holders if held.child is not None and not held.outstanding]
            if idle:
                min(idle, key=lambda held: held.used_at).drop()
            self._waiting += 1
            try:
                async with asyncio.timeout(self._wait_s):
                    await self._budget.take(1)
            except TimeoutError:
                raise self._budget.refuse(
                    "The templates of too many models are running; retry shortly",
                    kind=ErrorKind.OVERLOADED,
                    code="overloaded",
                    retry_after_ms=1000,
                ) from None
            finally:
                self._waiting -= 1
        self._holders.add(lane)

    def give_back(self, lane: TemplateLane) -> None:
        """Gives back the place of a lane; ignores one without any."""
        if lane in self._holders:
            self._holders.discard(lane)
            self._budget.give_back(1)

    def on_idle(self, lane: TemplateLane) -> None:
        """Ends the process of an idle lane if another waits for its place."""
        if self._waiting and lane in self._holders:
            lane.drop()


class TemplateLane(ForkLane[RenderedText]):
    """The calls of one origin and the process that runs them.

    Args:
        pool: its limits have the time of a template.
        waiting: limits the waiting calls.
        wait_s: maximum wait of a caller for its prompt, seconds.
        blame: converts a template's error into the one its callers receive.
        slots: places for processes; None for a lane that several origins share, which needs none: there, calls take
            turns, and none are rejected for a while after templates were killed several times in a row.
    """

    def __init__(
        self,
        pool: ForkPool[RenderedText],
        waiting: Budget,
        wait_s: float,
        blame: Callable[[SluiceError], SluiceError] = lambda error: error,
        slots: LaneSlots | None = None,
    ) -> None:
        super().__init__(pool, pool.limits.call_s + GRACE_S, WINDOW if slots else FAIR_WINDOW)
        self.waiting: FairCalls = FairCalls()
        self._waiting_budget = waiting
        self._wait_s = wait_s
        self._blame = blame
        self._slots = slots
        self._kills = 0
        self._refused_until = -inf
        self.used_at = 0.0

    async def call(self, source: str, job: bytes, origin: str = "") -> RenderedText:
        """Returns the prompt; only compiles the template if `job` is COMPILE_ONLY.

        Args:
            origin: whose template it is.

        Raises:
            SluiceError: as `templates.render`, or as converted by `blame`; OVERLOADED when too many calls wait or
                this one was not rendered in time; UNAVAILABLE when the lane was closed.
        """
        if len(source) > templates.MAX_TEMPLATE_CHARS:
            raise self._blame(templates.too_long_a_template())
        if asyncio.get_running_loop().time() < self._refused_until:
            raise self._blame(_exhausted())
        template = source.encode("utf-8", "replace")
        future, _ = self.submit(SOURCE_SIZE.pack(len(template)) + template + job, origin)
        try:
            async with asyncio.timeout(self._wait_s if self.child is not None else self._wait_s + START_S):
                return await future
        except TimeoutError:
            raise self._overloaded() from None

    def _overloaded(self) -> SluiceError:
        return self._waiting_budget.refuse(
            "Too many chat templates are running; retry shortly",
            kind=ErrorKind.OVERLOADED,
            code="overloaded",
            retry_after_ms=1000,
        )

    async def open(self) -> Child:
        if self._slots is None:
            return await super().open()
        await self._slots.take(self)
        try:
            return await super().open()
        except BaseException:
            self._slots.give_back(self)
            raise

    def drop(self) -> None:
        super().drop()
        if self._slots is not None:
            self._slots.give_back(self)

    def on_added(self) -> None:
        if self.outstanding > self._waiting_budget.limit:
            self.waiting.pop_of_busiest().resolve(self._overloaded())

    def on_idle(self) -> None:
        self.used_at = asyncio.get_running_loop().time()
        if self._slots is not None:
            self._slots.on_idle(self)

    def on_ran(self, call: Call[RenderedText]) -> None:
        self.waiting.charge(call, asyncio.get_running_loop().time() - call.started_at)

    def read(self, reply: bytes) -> RenderedText | SluiceError:
        kind, content = reply[:1], reply[1:]
        if kind != TEXT:
            return self._blame(_read_error(content))
        self._kills = 0
        return read_text(content)

    def is_last(self, reply: bytes) -> bool:
        return reply.startswith(ENDS)

    def failed(self, timed_out: bool) -> SluiceError:
        """Returns the running template's error, and rejects others for a while after several kills in a row."""
        error = templates.took_too_long(self._pool.limits.call_s) if timed_out else _exhausted()
        self._kills += 1
        if self._slots is not None and self._kills > KILLS_FORGIVEN:
            pause_s = min(PAUSE_S[0] * 2 ** (self._kills - KILLS_FORGIVEN - 1), PAUSE_S[1])
            self._refused_until = asyncio.get_running_loop().time() + pause_s
            self.fail_all(lambda: self._blame(error.copy()))
        return self._blame(error)


def _exhausted() -> SluiceError:
    return invalid("The chat template requires too much time or memory.", param="chat_template")


def _read_error(content: bytes) -> SluiceError:
    """Returns the error in a reply; a process compromised by a template may send anything."""
    try:
        form = orjson.loads(content)
        message, param, code = (str(form[name])[:MAX_ERROR_CHARS] for name in ("message", "param", "code"))
    except (ValueError, KeyError, TypeError):
        return _exhausted()
    return invalid(message, param=param if _MESSAGES(param) else "chat_template", code=code)
