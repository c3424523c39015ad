"""Budgets: limits on what a caller may make this process store or compute, checked before anything is allocated.

Each budget has a name, the flag that changes its limit, and a refusal counter
(`sluice_process_refused_total{budget=…}`). `Budget` limits a single request or message; `BudgetPool` limits the total
held by all requests.
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
    "picker_bodies",
)
"""Every budget; the values of the metric's label."""

CODE = "budget_exceeded"

on_refused: Callable[[str], None] | None = None
"""Called with the budget's name on every refusal; set while the process records metrics."""


class Budget:
    """Limits one request, message or stream.

    Args:
        name: one of NAMES.
        limit: the largest amount allowed, in the budget's own unit.
        setting: the flag that changes the limit, such as ``--max-schema-nodes``; named in errors.
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
        """Raises SluiceError when `amount` exceeds the limit.

        Args:
            subject: what is limited, as a plural noun phrase such as ``The JSON schemas of this request``.
            param: the request field at fault.
            kind: the error's kind.
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
        """Counts a refusal and returns its error, which states the reason and the setting that changes the limit.

        Args:
            reason: a sentence without its full stop.
        """
        self.count()
        message = f"{reason} (the server's {self.setting})."
        return SluiceError(kind, message, param=param, code=code, retry_after_ms=retry_after_ms)

    def count(self) -> None:
        """Counts a limit hit that raises no error, such as one handled by pausing reads on a connection."""
        if on_refused is not None:
            on_refused(self.name)


class BudgetPool(Budget):
    """Limits the total that all requests of the process hold; shares that do not fit wait in arrival order.

    Attributes:
        used: the amount held now.
    """

    def __init__(self, name: str, limit: int, setting: str) -> None:
        super().__init__(name, limit, setting)
        self.used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def try_take(self, amount: int) -> bool:
        """Takes a share if it fits now and no other request is waiting; returns whether it did."""
        if self._waiting or self.used + amount > self.limit:
            return False
        self.used += amount
        return True

    def try_grow(self, amount: int) -> bool:
        """Enlarges a held share if it fits now; returns whether it did.

        Takes precedence over waiting requests: a holder that waited could deadlock the pool.
        """
        if self.used + amount > self.limit:
            return False
        self.used += amount
        return True

    @property
    def missing(self) -> int:
        """The amount that must be given back before the first waiting request is granted; 0 if none waits."""
        return max(self.used + self._waiting[0][0] - self.limit, 0) if self._waiting else 0

    async def take(self, amount: int) -> None:
        """Waits for a share; cancelling gives it up. Check the limit first: a larger amount never fits."""
        if self.try_take(amount):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (amount, turn)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(amount)  # granted while the cancellation was being delivered
            else:
                self._waiting.remove(entry)
                self._grant()
            raise

    def give_back(self, amount: int) -> None:
        """Returns all or part of a share."""
        self.used -= amount
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self.used + self._waiting[0][0] <= self.limit:
            amount, turn = self._waiting.popleft()
            if not turn.done():
                self.used += amount
                turn.set_result(None)
