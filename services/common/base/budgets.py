"""Budgets: limits on what a caller may make this process store or compute, checked before anything is allocated.

Each budget has a name, the flag that changes its limit, and a refusal counter
(`sluice_process_refused_total{budget=…}`). `Budget` limits a single request or message; `BudgetPool` limits the total
held by all requests, `TenantPool` also what each tenant holds of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from services.common.base.errors import ErrorKind, SluiceError

NAMES = (
    "body_bytes",
    "body_time",
    "body_values",
    "body_depth",
    "body_chunks",
    "headers",
    "connections",
    "pipelined_requests",
    "list_items",
    "schema_nodes",
    "schema_characters",
    "pattern_characters",
    "grammar_characters",
    "word_characters",
    "choice_bytes",
    "pair_characters",
    "logprob_values",
    "running_bytes",
    "batch_tokens",
    "health_watches",
    "template_processes",
    "picker_bodies",
    "answer_bytes",
    "answer_values",
    "tokenizer_memory",
    "worker_models",
    "worker_frames",
    "stored_bytes",
    "stored_total_bytes",
    "batch_lines",
    "broken_lines",
    "background_responses",
    "sockets",
    "socket_frames",
    "running_requests",
    "scrape_connections",
)
"""Every budget; the values of the metric's label."""

CODE = "budget_exceeded"
TENANT_CODE = "rate_limit_exceeded"
"""Code of what exceeds the limit of a tenant, which is not the server's fault; its HTTP status is 429."""

on_refused: Callable[[str], None] | None = None
"""Called with the budget's name on every refusal; set while the process records metrics."""


class Budget:
    """Limits one request, message or stream.

    Args:
        name: one of NAMES.
        limit: the largest amount allowed, in the budget's own unit.
        setting: the flag that changes the limit, such as ``--max-body-mb``; named in errors. Empty: it is fixed.
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
        message = f"{reason} (the server's {self.setting})." if self.setting else f"{reason}."
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
        if self._waiting:
            self._grant()

    def _grant(self) -> None:
        while self._waiting and self.used + self._waiting[0][0] <= self.limit:
            amount, turn = self._waiting.popleft()
            if not turn.done():
                self.used += amount
                turn.set_result(None)


class TenantPool(Budget):
    """Limits what all tenants hold together, and what each of them holds; nothing waits.

    Args:
        limit: the largest amount that all tenants may hold.
        setting: the flag that changes `limit`.
        tenant_limit: the largest amount that one tenant may hold.
        tenant_setting: the flag that changes `tenant_limit`.

    Attributes:
        used: the amount held now.
    """

    def __init__(self, name: str, limit: int, setting: str, tenant_limit: int, tenant_setting: str) -> None:
        super().__init__(name, limit, setting)
        self.used = 0
        self._tenants = Budget(name, tenant_limit, tenant_setting)
        self._held: dict[str, int] = {}

    @property
    def tenant_limit(self) -> int:
        """The largest amount that one tenant may hold."""
        return self._tenants.limit

    @tenant_limit.setter
    def tenant_limit(self, limit: int) -> None:
        self._tenants.limit = limit

    def check_tenant(self, tenant: str, amount: int, subject: str, *, retry_after_ms: int = 1000) -> int:
        """Returns what a tenant would hold with a further share; raises SluiceError (HTTP 429) if it is too much."""
        held = self._held.get(tenant, 0) + amount
        if held > self._tenants.limit:
            raise self._tenants.refuse(
                f"{subject} of this tenant exceed the limit of {self._tenants.limit}",
                kind=ErrorKind.OVERLOADED,
                code=TENANT_CODE,
                retry_after_ms=retry_after_ms,
            )
        return held

    def take(self, tenant: str, amount: int, subject: str, *, retry_after_ms: int = 1000) -> None:
        """Takes a share for a tenant; `give_back` must follow.

        Args:
            subject: what is limited, as a plural noun phrase such as ``The open WebSockets``.

        Raises:
            SluiceError: OVERLOADED, `rate_limit_exceeded` (HTTP 429) if the tenant would hold more than its limit,
                otherwise `budget_exceeded` (HTTP 503) if all of them would.
        """
        held = self.check_tenant(tenant, amount, subject, retry_after_ms=retry_after_ms)
        if self.used + amount > self.limit:
            raise self.refuse(
                f"{subject} of all tenants exceed the limit of {self.limit}",
                kind=ErrorKind.OVERLOADED,
                retry_after_ms=retry_after_ms,
            )
        self._held[tenant] = held
        self.used += amount

    def give_back(self, tenant: str, amount: int) -> None:
        """Returns all or part of a tenant's share."""
        self.used -= amount
        self._held[tenant] -= amount
        if not self._held[tenant]:
            del self._held[tenant]
