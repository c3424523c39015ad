"""Background responses: they go on when their request has been answered, and their state is stored.

The gateway that runs one renews its lease in the store. Once the lease has expired, every gateway reports the response
as failed: the gateway that ran it has stopped. It has expired when the gateway's own clock and the store's say so:
neither a gateway nor a store whose clock is wrong ends responses that others run.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from math import inf
from typing import Any

import orjson

from services.common.base.budgets import Budget
from services.common.base.errors import ErrorKind, SluiceError, invalid, unavailable
from services.gateway.apis.responses.event_log import EventLog, LoggedEvents
from services.gateway.apis.responses.store import ResponseStore, StoredResponse
from services.gateway.operations.operation import Streamed
from services.gateway.settings import GatewaySettings

LEASE_S = 30.0
MAX_RUNNING = 256
"""Background responses in progress, a quarter of them of one tenant where there are API keys; more are OVERLOADED."""
MAX_BYTES = 64 << 20
"""Bytes of the events of all background responses, of which the oldest go; of their inputs, more are OVERLOADED."""
RENEWALS_PER_LEASE = 3
LAST_TRIES = 30
"""Attempts, within the time of a lease, to store the last state of a background response while the store fails."""
CANCEL_WAIT_S = 5.0
LEASE = "_lease_until"
RUNNING = ("queued", "in_progress")
SWAPS = 4
"""Attempts to change a stored response that another gateway changes at the same time."""
_STATUS_WITHIN = 256
"""The first bytes of a stored response, which contain its status."""


class BackgroundRun:
    """A background response in progress.

    Args:
        key: owner and id.
        items: JSON of its input items.
        on_events: called with the bytes by which the log of events has grown.

    Attributes:
        kept: what the store has of it, as far as is known; None: nothing yet.
        wanted: what the store is to have; None: what it has.
    """

    def __init__(
        self,
        key: tuple[str, str],
        items: bytes,
        max_event_bytes: int,
        on_events: Callable[[int], None] = lambda added: None,
    ) -> None:
        self._on_events = on_events
        self.key = key
        self.items = items
        self.events = EventLog(max_event_bytes)
        self.state: dict[str, Any] = {}
        self.kept: StoredResponse | None = None
        self.wanted: StoredResponse | None = None
        self.changed = asyncio.Event()
        self.closed = False
        self.ended = asyncio.Event()
        self.deleted = False
        self._cancelled = asyncio.Event()

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Ends the generation soon."""
        self._cancelled.set()

    async def gone(self) -> None:
        """Returns once it is cancelled; the `gone` of its caller."""
        await self._cancelled.wait()

    def add(self, events: bytes) -> None:
        """Adds events to the log."""
        before = self.events.size
        self.events.add(events)
        self._on_events(self.events.size - before)


class BackgroundResponses:
    """The background responses that this gateway runs, and the events of those that it ran.

    Args:
        clock: returns the seconds since the epoch.
        lease_s: seconds for which a gateway that stopped still seems to run its responses.
        max_running: responses in progress; where there are API keys, a tenant has a quarter of them.
        max_bytes: bytes of all events, a quarter for each response; and of the inputs of those in progress.
    """

    def __init__(
        self,
        store: ResponseStore,
        settings: GatewaySettings,
        clock: Callable[[], float] = time.time,
        lease_s: float = LEASE_S,
        max_running: int = MAX_RUNNING,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._store = store
        self._budget = Budget("background_responses", max_running, "")
        share = max_running if settings.api_keys_file is None else max_running // 4
        self._of_tenant = Budget("background_responses", share, "")
        self._max_bytes = max_bytes
        self._clock = clock
        self._lease_s = lease_s
        self._size = 0  # at least the bytes of all events
        self._runs: OrderedDict[tuple[str, str], BackgroundRun] = OrderedDict()

    def begin(self, owner: str, response_id: str, items: bytes) -> BackgroundRun:
        """Adds a response; raises SluiceError(OVERLOADED) if too many are in progress, or their inputs too large."""
        running = [run for run in self._runs.values() if not run.ended.is_set()]
        own = sum(run.key[0] == owner for run in running)
        if own >= self._of_tenant.limit:
            raise _full(self._of_tenant, f"{own} background responses of this client are in progress, the limit")
        if len(running) >= self._budget.limit:
            raise _full(self._budget, f"The gateway runs {len(running)} background responses, its limit; retry later")
        if len(items) + sum(len(run.items) for run in running) > self._max_bytes:
            raise _full(self._budget, "The inputs of the background responses in progress take too much memory")
        run = BackgroundRun((owner, response_id), items, self._max_bytes // 4, self._grown)
        self._runs[run.key] = run
        return run

    def update(self, run: BackgroundRun, state: dict[str, Any]) -> None:
        """Sets the state of a response, which `run` stores unless it was deleted; the first is stored at once."""
        run.state = state
        if run.deleted:
            return
        leased = {**state, LEASE: self._clock() + self._lease_s} if state["status"] in RUNNING else state
        stored = StoredResponse(orjson.dumps(leased), run.items)
        if run.kept is None:  # no other gateway knows it
            run.kept = stored
            self._store.put(*run.key, stored)
        else:
            run.wanted = stored
            run.changed.set()

    async def run(self, run: BackgroundRun, generate: Callable[[], Awaitable[None]]) -> None:
        """Generates, while the lease is renewed and changes are stored, and ends the log; `generate` must not raise."""
        loop = asyncio.get_running_loop()
        renewing, storing = loop.create_task(self._renew(run)), loop.create_task(self._store_changes(run))
        try:
            await generate()
        finally:
            renewing.cancel()
            run.events.end()
            run.closed = True
            run.changed.set()
            try:
                await storing
            finally:
                run.ended.set()
                run.items, run.kept, run.wanted = b"", None, None
                self._trim()

    async def find(self, owner: str, response_id: str) -> StoredResponse | None:
        """Returns a stored response; one whose lease has expired has failed."""
        if (own := self._unwritten(owner, response_id)) is not None:
            return own
        stored = await self._store.find(owner, response_id) if is_response(response_id) else None
        if stored is None or not is_running(stored):
            return stored
        state = await self._store.parsed(stored.response)
        lease_until = state.pop(LEASE, 0.0)
        if lease_until > self._clock() or await self._store.age_s(owner, response_id) < self._lease_s:
            return StoredResponse(orjson.dumps(state), stored.items)
        message = "The gateway that ran this response stopped before its end; create the response again."
        state |= {"status": "failed", "error": {"code": "server_error", "message": message, "param": None}}
        failed = StoredResponse(orjson.dumps(state), stored.items)
        swapped = await self._store.swap(owner, response_id, stored, failed)
        return failed if swapped else await self.find(owner, response_id)

    async def cancel(self, owner: str, response_id: str) -> StoredResponse | None:
        """Cancels a response and returns it; None if it is not stored.

        One that runs on another gateway ends when that gateway renews its lease.

        Raises:
            SluiceError: INVALID_ARGUMENT for a response that is not a background response, UNAVAILABLE if its gateway
                changes it all the time.
        """
        for _ in range(SWAPS):
            stored = await self.find(owner, response_id)
            if stored is None:
                return None
            state = await self._store.parsed(stored.response)
            if not state["background"]:
                raise invalid(
                    "Cannot cancel a synchronous response; close its connection instead.", code="not_cancellable"
                )
            run = self._runs.get((owner, response_id))
            if run is not None and not run.ended.is_set():
                run.cancel()
                with contextlib.suppress(TimeoutError):  # it ends later
                    async with asyncio.timeout(CANCEL_WAIT_S):
                        await run.ended.wait()
                return await self.find(owner, response_id)
            if state["status"] not in RUNNING:
                return stored
            leased = await self._store.find(owner, response_id)
            cancelled = StoredResponse(orjson.dumps({**state, "status": "cancelled"}), stored.items)
            running = leased is not None and is_running(leased)
            if running and await self._store.swap(owner, response_id, leased, cancelled):
                return cancelled
        raise unavailable("The response changes at the moment; retry.", code="overloaded", retry_after_ms=1_000)

    def _unwritten(self, owner: str, response_id: str) -> StoredResponse | None:
        """Returns a response whose last change here is not stored yet."""
        run = self._runs.get((owner, response_id))
        if run is None or run.wanted is None or run.deleted:
            return None
        return StoredResponse(orjson.dumps(run.state), run.wanted.items)

    def stop(self, owner: str, response_id: str) -> None:
        """Ends a response that was deleted, if it runs here, and forgets its events."""
        run = self._runs.pop((owner, response_id), None)
        if run is not None:
            run.deleted = True
            run.cancel()

    def stream(self, owner: str, response_id: str, number: int) -> Streamed:
        """Returns the events from a sequence number on; raises SluiceError if they are not on this gateway."""
        run = self._runs.get((owner, response_id))
        if run is None:
            raise invalid(
                "Only the gateway that ran a background response can stream it, for a while after its end; "
                "set stream to false.",
                param="stream",
                code="stream_unavailable",
            )
        return Streamed(LoggedEvents(run.events, number))

    async def _renew(self, run: BackgroundRun) -> None:
        while True:
            await asyncio.sleep(self._lease_s / RENEWALS_PER_LEASE)
            self.update(run, run.state)

    async def _store_changes(self, run: BackgroundRun) -> None:
        """Stores each change of a response until the last one is stored, or cannot be for as long as a lease."""
        loop, last_until_s = asyncio.get_running_loop(), inf
        while True:
            await run.changed.wait()
            run.changed.clear()
            closing, wanted = run.closed, run.wanted
            if wanted is not None:
                try:
                    await self._swap(run, wanted)
                except SluiceError as error:  # the store is unavailable; the next renewal may be in time
                    if error.kind is ErrorKind.TOO_LARGE:
                        self._store.put(*run.key, wanted)  # which drops it
                        run.kept = wanted
                    elif closing:  # there is no further renewal
                        last_until_s = min(last_until_s, loop.time() + self._lease_s)
                        if loop.time() < last_until_s:
                            await asyncio.sleep(self._lease_s / LAST_TRIES)
                            run.changed.set()
                            continue
                if run.wanted is wanted and (run.kept is wanted or run.deleted):
                    run.wanted = None
            if closing and (run.wanted is None or run.wanted is wanted):
                return

    async def _swap(self, run: BackgroundRun, wanted: StoredResponse) -> None:
        """Stores a state, unless another gateway has deleted or cancelled the response, which ends it."""
        for _ in range(SWAPS):
            if await self._store.swap(*run.key, run.kept, wanted):
                run.kept = wanted
                return
            run.kept = await self._store.find(*run.key)
            if run.kept is None:
                run.deleted = True
                run.cancel()
                return
            if is_cancelled(run.kept) and not is_cancelled(wanted):
                run.cancel()
                run.wanted = None
                return

    def _grown(self, size: int) -> None:
        self._size += size
        if self._size > self._max_bytes:
            self._trim()

    def _trim(self) -> None:
        """Forgets the oldest responses that have ended, and then the oldest events of those with most."""
        self._size = sum(run.events.size for run in self._runs.values())
        for key, run in list(self._runs.items()):
            if self._size <= self._max_bytes and len(self._runs) <= 2 * self._budget.limit:
                return
            if run.ended.is_set():
                self._size -= run.events.size
                del self._runs[key]
        while self._size > self._max_bytes:
            largest = max((run.events for run in self._runs.values()), key=lambda events: events.size)
            before = largest.size
            largest.shrink(before // 2)
            self._size -= before - largest.size


def _full(budget: Budget, reason: str) -> SluiceError:
    return budget.refuse(reason, kind=ErrorKind.OVERLOADED, code="overloaded", retry_after_ms=1_000)


def is_response(name: str) -> bool:
    """Returns whether a stored value is a response by its id; the others are conversations."""
    return name.startswith("resp_")


def is_cancelled(stored: StoredResponse) -> bool:
    """Returns whether a stored response was cancelled."""
    return b'"status":"cancelled"' in stored.response[:_STATUS_WITHIN]


def is_running(stored: StoredResponse) -> bool:
    """Returns whether a stored response was in progress when it was stored."""
    head = stored.response[:_STATUS_WITHIN]
    return any(b'"status":"%b"' % status.encode() in head for status in RUNNING)
