"""Budgets: bounds on what a caller may make this process hold or compute, checked before anything is built.

Each budget has a name, the setting that changes its limit, and a count of refusals
(`sluice_process_refused_total{budget=…}`). `Budget` bounds a single request or message; `BudgetPool` bounds what all of
them hold together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from services.common.errors import ErrorKind, SluiceError

NAMES = (
    "body_bytes",
    "body_time",
    "body_values",
    "pipelined_requests",
    "list_items",
    "schema_nodes",
    "schema_characters",
    "pattern_characters",
    "grammar_characters",
    "batch_tokens",
    "health_watches",
    "template_processes",
)
"""Every budget of the suite; the values of the metric's label."""

CODE = "budget_exceeded"

on_refused: Callable[[str], None] | None = None
"""Called with the name of a budget whenever it refuses something; set while the process records metrics."""


class Budget:
    """Bounds one request, message or stream.

    Args:
        name: one of NAMES.
        limit: most that is allowed, in units of what is bounded.
        setting: flag that changes the limit, such as ``--max-schema-nodes``; named in errors.
    """

    def __init__(self, name: str, limit: int, setting: str) -> None:
        if name not in NAMES:
            raise ValueError(f"{name!r} is not a declared budget.")
        self.name = name
        self.limit = limit
        self.setting = setting

    def check(
        self, amount: int, subject: str, *, param: str = "", kind: ErrorKind = ErrorKind.INVALID_ARGUMENT
    ) -> None:
        """Raises SluiceError when `amount` is over the limit.

        Args:
            subject: what is bounded, such as ``The JSON schemas of this request``.
            param: the caller's field.
            kind: of the error.
        """
        if amount > self.limit:
            raise self.refuse(f"{subject} exceed the limit of {self.limit}", param=param, kind=kind)

    def refuse(
        self,
        reason: str,
        *,
        param: str = "",
        kind: ErrorKind = ErrorKind.INVALID_ARGUMENT,
        code: str = CODE,
        retry_after_ms: int = 0,
    ) -> SluiceError:
        """Counts a refusal and returns its error: the reason and the setting that changes the limit.

        Args:
            reason: a sentence without its full stop.
        """
        self.count()
        message = f"{reason} (the server's {self.setting})."
        return SluiceError(kind, message, param=param, code=code, retry_after_ms=retry_after_ms)

    def count(self) -> None:
        """Counts an excess that is answered otherwise than by `refuse`, such as by reading a connection later."""
        if on_refused is not None:
            on_refused(self.name)


class BudgetPool(Budget):
    """Bounds what all requests of the process hold together; shares that do not fit wait in order of arrival.

    Attributes:
        used: what is held now.
    """

    def __init__(self, name: str, limit: int, setting: str) -> None:
        super().__init__(name, limit, setting)
        self.used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def try_take(self, amount: int) -> bool:
        """Takes a share if it fits now and no other request waits for one."""
        if self._waiting or self.used + amount > self.limit:
            return False
        self.used += amount
        return True

    def try_grow(self, amount: int) -> bool:
        """Enlarges a share that is held if it fits now, ahead of requests that wait for one: holders must not wait."""
        if self.used + amount > self.limit:
            return False
        self.used += amount
        return True

    @property
    def missing(self) -> int:
        """How much must be given back until the first request that waits gets its share; 0 when none waits."""
        return max(self.used + self._waiting[0][0] - self.limit, 0) if self._waiting else 0

    async def take(self, amount: int) -> None:
        """Waits for a share; cancel it to give up. An amount over the limit never fits: check it first."""
        if self.try_take(amount):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (amount, turn)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(amount)  # the share was granted in the moment of the cancellation
            else:
                self._waiting.remove(entry)
                self._grant()
            raise

    def give_back(self, amount: int) -> None:
        """Returns a share, or a part of one."""
        self.used -= amount
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self.used + self._waiting[0][0] <= self.limit:
            amount, turn = self._waiting.popleft()
            if not turn.done():
                self.used += amount
                turn.set_result(None)
