"""Admits requests: identifies the API key, applies its limits, and queues requests while the gateway is full."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any

from services.common.base.budgets import TenantPool
from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.tasks import TaskOwner
from services.gateway.admission import errors
from services.gateway.admission.errors import Refused
from services.gateway.admission.fair_queue import FairQueue
from services.gateway.admission.keys import ANONYMOUS, STRANGER, ApiKey, KeyFile
from services.gateway.admission.limits import Limiter
from services.gateway.admission.metrics import AdmissionMetrics
from services.gateway.admission.permit import Permit
from services.gateway.admission.tenants import TenantSalt

WaitForDisconnect = Callable[[], Coroutine[Any, Any, None]]
"""Returns when the client has disconnected."""


BACKGROUND_POLL_S = 0.05
_RUNNING = "The running requests"


class Gate:
    """Admits requests and releases them.

    Args:
        keys: API keys; None: every request is admitted with the key `anonymous`.
        limiter: counts the use of keys with limits.
        tasks: owns the tasks that settle completed requests.
        anonymous: key of requests to a gateway without API keys.
        tenant_salt: whether tenants get separate parts of the prefix cache; "auto": once the keys have two tenants.
        max_per_tenant: maximum number of running requests of a tenant; 0: three quarters of all that may run, once the
            keys have two tenants.
    """

    def __init__(
        self,
        keys: KeyFile | None,
        limiter: Limiter,
        queue: FairQueue,
        tasks: TaskOwner,
        anonymous: ApiKey = ANONYMOUS,
        tenant_salt: TenantSalt = "auto",
        max_per_tenant: int = 0,
    ) -> None:
        self._keys = keys
        self._anonymous = anonymous
        self._tenant_salt = tenant_salt
        self._limiter = limiter
        self._tasks = tasks
        self._metrics = AdmissionMetrics(lambda: queue.waiting, lambda: queue.running)
        self.queue = queue
        self._max_per_tenant = max_per_tenant
        total = queue.max_running
        self._running = TenantPool("running_requests", total, "--max-requests", total, "--max-requests-per-tenant")

    @property
    def degraded(self) -> str:
        """Why limits are applied by a fallback; empty if they are not."""
        return self._limiter.degraded

    def count_refused(self, reason: str) -> None:
        """Counts a request that was rejected before its key was read; `reason` is a label value of the metric."""
        self._metrics.refused(reason)

    def authenticate(self, credential: str | None) -> ApiKey:
        """Returns the key of a request; raises SluiceError(UNAUTHENTICATED) without a valid one."""
        key = self._find(credential)
        if key is None:
            raise self._count(errors.invalid_key() if credential else errors.missing_key())
        return key

    def identify(self, credential: str | None) -> Permit:
        """Returns the permit of a request to a path without authentication; `STRANGER`'s without a valid key."""
        return self.uncounted(self._find(credential) or STRANGER)

    def _find(self, credential: str | None) -> ApiKey | None:
        if self._keys is None:
            return self._anonymous
        return self._keys.ring.find(credential) if credential else None

    def uncounted(self, key: ApiKey) -> Permit:
        """Returns a permit for a request that is neither counted nor queued."""
        return Permit(key, "", None, None, self._metrics.refused, self._salts)

    @property
    def _has_tenants(self) -> bool:
        """Whether the keys have two tenants or more."""
        return self._keys is not None and self._keys.ring.tenants > 1

    @property
    def _salts(self) -> TenantSalt:
        if self._tenant_salt == "auto" and not self._has_tenants:
            return "off"
        return self._tenant_salt

    async def enter(self, key: ApiKey, cost: float, timeout_s: float, disconnected: WaitForDisconnect) -> Permit:
        """Admits a request, after a wait in the queue if necessary; `leave` must follow.

        Args:
            cost: share of the key's turns that the request uses.
            timeout_s: longest wait in the queue.

        Raises:
            SluiceError: OVERLOADED (429) if a limit of the key or of its tenant is exceeded, OVERLOADED (503) if the
                queue is full or the wait too long, CANCELLED if the client disconnects.
        """
        self._check_tenant(key)
        permit = await self._charge_request(key)
        try:
            if not self.queue.try_enter():
                await self._wait(key, cost, timeout_s, disconnected)
            self._begin(key)
        except BaseException:
            self._settle(permit)
            raise
        return permit

    async def _wait(self, key: ApiKey, cost: float, timeout_s: float, disconnected: WaitForDisconnect) -> None:
        loop, started = asyncio.get_running_loop(), monotonic()
        waiting = loop.create_task(self.queue.enter(key, cost, timeout_s))
        disconnect = loop.create_task(disconnected())
        try:
            await asyncio.wait((waiting, disconnect), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if not waiting.cancel() and waiting.exception() is None:  # admitted at the same moment
                self.queue.leave()
            self._metrics.waited(monotonic() - started, "left")
            raise
        finally:
            disconnect.cancel()
        left = waiting.cancel()
        refused = None if left else waiting.exception()
        self._metrics.waited(monotonic() - started, "left" if left else "refused" if refused else "turn")
        try:
            if left:
                raise SluiceError(ErrorKind.CANCELLED, "The client disconnected while its request was queued.")
            if isinstance(refused, Refused):
                raise self._count(refused)
            waiting.result()
        finally:
            del waiting, refused  # Break the reference cycle: the traceback references this frame.

    def key_of(self, key_id: str) -> ApiKey:
        """Returns a key by its public part; raises SluiceError(UNAUTHENTICATED) if it is not valid any more."""
        key = self._anonymous if self._keys is None else self._keys.ring.by_id(key_id)
        if key is None:
            raise self._count(errors.invalid_key())
        return key

    async def enter_in_background(self, key: ApiKey) -> Permit:
        """Admits a request without a waiting client, once the gateway has room to spare; `leave` must follow.

        Raises:
            SluiceError: OVERLOADED (429) if a limit of the key or of its tenant is exceeded.
        """
        while not self.queue.try_enter_in_background():  # noqa: ASYNC110 - the queue signals its own waiters only
            await asyncio.sleep(BACKGROUND_POLL_S)
        try:
            self._check_tenant(key)
            permit = await self._charge_request(key)
        except BaseException:
            self.queue.leave()
            raise
        try:
            self._begin(key)
        except BaseException:
            self._settle(permit)
            raise
        return permit

    def _check_tenant(self, key: ApiKey) -> None:
        """Raises SluiceError (429) if the tenant of a key has as many running requests as it may."""
        total = self.queue.max_running
        share = -(-3 * total // 4) if self._has_tenants else total
        limit = self._running.tenant_limit = min(self._max_per_tenant or share, total)
        if limit == total:
            return  # it may wait until others end
        try:
            self._running.check_tenant(key.owner, 1, _RUNNING)
        except SluiceError:
            self._metrics.refused("tenant")
            raise

    def _begin(self, key: ApiKey) -> None:
        """Counts an admitted request as running; one that exceeds its tenant's limit leaves, and raises SluiceError."""
        try:
            self._running.take(key.owner, 1, _RUNNING)
        except SluiceError:
            self._metrics.refused("tenant")
            self.queue.leave()
            raise

    def leave(self, permit: Permit) -> None:
        """Releases an admitted request."""
        self._running.give_back(permit.key.owner, 1)
        self.queue.leave()
        self._settle(permit)

    async def _charge_request(self, key: ApiKey) -> Permit:
        if not key.limited:
            return self.uncounted(key)
        request_id = secrets.token_hex(8)
        decision = await self._limiter.enter(key, request_id)
        permit = Permit(key, request_id, self._limiter, decision, self._metrics.refused, self._salts)
        if decision.refused_by is not None:
            raise self._count(errors.rate_limited(key, decision))
        return permit

    async def close(self) -> None:
        """Closes connections."""
        await self._limiter.close()

    def _count(self, refused: Refused) -> Refused:
        self._metrics.refused(refused.reason)
        return refused

    def _settle(self, permit: Permit) -> None:
        if permit.request_id:
            self._tasks.spawn(permit.settle(), "settle")
