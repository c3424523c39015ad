"""Admission of one request: whose it is, whether its key allows it, and when it is its turn."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any

from services.common.errors import ErrorKind, SluiceError
from services.common.tasks import TaskOwner
from services.gateway.admission import errors as refusals
from services.gateway.admission.errors import Refused
from services.gateway.admission.fair_queue import FairQueue
from services.gateway.admission.keys import ANONYMOUS, STRANGER, ApiKey, KeyFile
from services.gateway.admission.limits import Limiter
from services.gateway.admission.metrics import AdmissionMetrics
from services.gateway.admission.permit import Permit
from services.gateway.admission.tenants import TenantSalt


class Gate:
    """Lets requests in and out.

    Args:
        keys: None: every request is admitted with the key `anonymous`.
        limiter: counts what keys with limits use.
        tasks: owns the settling of requests that are over.
        anonymous: key of requests to a gateway without keys.
        tenant_salt: whether tenants get parts of the prefix cache of their own; "auto": as soon as the file of keys
            has two of them.
    """

    def __init__(
        self,
        keys: KeyFile | None,
        limiter: Limiter,
        line: FairQueue,
        tasks: TaskOwner,
        anonymous: ApiKey = ANONYMOUS,
        tenant_salt: TenantSalt = "auto",
    ) -> None:
        self._keys = keys
        self._anonymous = anonymous
        self._tenant_salt = tenant_salt
        self._limiter = limiter
        self._tasks = tasks
        self._metrics = AdmissionMetrics(lambda: line.waiting, lambda: line.running)
        self.line = line

    @property
    def degraded(self) -> str:
        """Why limits are not what they should be; empty when they are."""
        return self._limiter.degraded

    def count_refused(self, reason: str) -> None:
        """Counts a request that was refused before its key was looked at; `reason` is one of the metric's."""
        self._metrics.refused(reason)

    def authenticate(self, shown: str | None) -> ApiKey:
        """Whose request it is; SluiceError(UNAUTHENTICATED) when no valid key was shown."""
        key = self._find(shown)
        if key is None:
            raise self._told(refusals.no_key(bool(shown)))
        return key

    def identify(self, shown: str | None) -> Permit:
        """Permit of a request to a path that needs no key: of its key, or of a stranger."""
        return self.look_in(self._find(shown) or STRANGER)

    def _find(self, shown: str | None) -> ApiKey | None:
        if self._keys is None:
            return self._anonymous
        return self._keys.ring.find(shown) if shown else None

    def look_in(self, key: ApiKey) -> Permit:
        """For a request that asks for no work: it is not counted and does not wait."""
        return Permit(key, "", None, None, self._metrics.refused, self._salts)

    @property
    def _salts(self) -> TenantSalt:
        if self._tenant_salt == "auto" and (self._keys is None or self._keys.ring.tenants < 2):
            return "off"
        return self._tenant_salt

    async def enter(
        self, key: ApiKey, cost: float, patience_s: float, gone: Callable[[], Coroutine[Any, Any, None]]
    ) -> Permit:
        """Lets a request in; `leave` must follow.

        Args:
            cost: of its key's share of the line.
            patience_s: longest that it may wait.
            gone: returns when the client went away.

        Raises:
            SluiceError: OVERLOADED when its key allows no more, UNAVAILABLE when the gateway takes no more, CANCELLED
                when the client went away.
        """
        permit = await self._counted(key)
        try:
            if not self.line.try_enter():
                await self._wait(key, cost, patience_s, gone)
        except BaseException:
            self._settle(permit)
            raise
        return permit

    async def _wait(
        self, key: ApiKey, cost: float, patience_s: float, gone: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        loop, began = asyncio.get_running_loop(), monotonic()
        waiting = loop.create_task(self.line.enter(key, cost, patience_s))
        leaving = loop.create_task(gone())
        try:
            await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if not waiting.cancel() and waiting.exception() is None:  # its turn had come
                self.line.leave()
            self._metrics.waited(monotonic() - began, "left")
            raise
        finally:
            leaving.cancel()
        left = waiting.cancel()
        refused = None if left else waiting.exception()
        self._metrics.waited(monotonic() - began, "left" if left else "refused" if refused else "turn")
        try:
            if left:
                raise SluiceError(ErrorKind.CANCELLED, "The client went away while it waited in line.")
            if isinstance(refused, Refused):
                raise self._told(refused)
            waiting.result()
        finally:
            del waiting, refused  # what is raised holds this call, which must not hold it as well

    def leave(self, permit: Permit) -> None:
        """A request that was let in is over."""
        self.line.leave()
        self._settle(permit)

    async def _counted(self, key: ApiKey) -> Permit:
        if not key.limited:
            return self.look_in(key)
        request_id = secrets.token_hex(8)
        decision = await self._limiter.enter(key, request_id)
        permit = Permit(key, request_id, self._limiter, decision, self._metrics.refused, self._salts)
        if decision.refused_by is not None:
            raise self._told(refusals.over(key, decision))
        return permit

    async def close(self) -> None:
        """Lets go of connections."""
        await self._limiter.close()

    def _told(self, refused: Refused) -> Refused:
        self._metrics.refused(refused.reason)
        return refused

    def _settle(self, permit: Permit) -> None:
        if permit.request_id:
            self._tasks.spawn(permit.settle(), "settle")
