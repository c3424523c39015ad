"""Background responses: they go on when their request has been answered, and their state is stored.

The gateway that runs one renews its lease in the store. Once the lease has expired, every gateway reports the response
as failed: the gateway that ran it has stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from services.common.errors import ErrorKind, SluiceError, invalid, overloaded
from services.gateway.apis.responses.event_log import EventLog, LoggedEvents
from services.gateway.apis.responses.store import ResponseStore, StoredResponse
from services.gateway.settings import GatewaySettings

LEASE_S = 30.0
RENEWALS_PER_LEASE = 3
CANCEL_WAIT_S = 5.0
LEASE = "_lease_until"
RUNNING = ("queued", "in_progress")
_STATUS_WITHIN = 256
"""The first bytes of a stored response, which contain its status."""


class BackgroundRun:
    """A background response in progress.

    Args:
        key: owner and id.
        items: JSON of its input items.
    """

    def __init__(self, key: tuple[str, str], items: bytes, max_event_bytes: int) -> None:
        self.key = key
        self.items = items
        self.events = EventLog(max_event_bytes)
        self.state: dict[str, Any] = {}
        self.ended = asyncio.Event()
        self.deleted = False
        self._cancelled = asyncio.Event()
        self._status = 200
        self._error = b""

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Ends the generation soon."""
        self._cancelled.set()

    async def receive(self) -> Message:
        """The ASGI `receive` of the generation: a disconnect once it is cancelled."""
        await self._cancelled.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """The ASGI `send` of the generation: its events are added to the log."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif self._status == 200:
            self.events.add(message.get("body", b""))
        else:
            self._error += message.get("body", b"")

    def check(self) -> None:
        """Raises SluiceError if the generation failed before its first event."""
        if self._error:
            found = orjson.loads(self._error)["error"]
            kind = ErrorKind.INTERNAL if self._status in (500, 502) else ErrorKind.UNAVAILABLE
            if self._status in (400, 413):
                kind = ErrorKind.INVALID_ARGUMENT
            raise SluiceError(kind, found["message"], param=found["param"] or "", code=found["code"] or "")


class BackgroundResponses:
    """The background responses that this gateway runs, and the events of those that it ran.

    Args:
        clock: returns the seconds since the epoch.
        lease_s: seconds for which a gateway that stopped still seems to run its responses.
    """

    def __init__(
        self,
        store: ResponseStore,
        settings: GatewaySettings,
        clock: Callable[[], float] = time.time,
        lease_s: float = LEASE_S,
    ) -> None:
        self._store = store
        self._most = settings.responses_background
        self._max_bytes = settings.responses_background_mb << 20
        self._comment_every_s = settings.comment_every_s
        self._write_s = settings.write_timeout_s
        self._clock = clock
        self._lease_s = lease_s
        self._runs: OrderedDict[tuple[str, str], BackgroundRun] = OrderedDict()

    def begin(self, owner: str, response_id: str, items: bytes) -> BackgroundRun:
        """Adds a response; raises SluiceError(OVERLOADED) if too many are running."""
        running = sum(not run.ended.is_set() for run in self._runs.values())
        if running >= self._most:
            raise overloaded(f"The gateway runs {running} background responses, its limit; retry later.")
        run = BackgroundRun((owner, response_id), items, self._max_bytes // 4)
        self._runs[run.key] = run
        return run

    def update(self, run: BackgroundRun, state: dict[str, Any]) -> None:
        """Stores the state of a response, unless it was deleted."""
        run.state = state
        if run.deleted:
            return
        leased = {**state, LEASE: self._clock() + self._lease_s} if state["status"] in RUNNING else state
        self._store.put(*run.key, StoredResponse(orjson.dumps(leased), run.items))

    async def run(self, run: BackgroundRun, generate: Callable[[], Awaitable[None]]) -> None:
        """Generates, while the lease is renewed, and ends the log; `generate` must not raise."""
        renewing = asyncio.get_running_loop().create_task(self._renew(run))
        try:
            await generate()
        finally:
            renewing.cancel()
            run.events.end()
            run.ended.set()
            self._trim()

    async def find(self, owner: str, response_id: str) -> StoredResponse | None:
        """Returns a stored response; one whose lease has expired has failed."""
        stored = await self._store.find(owner, response_id) if is_response(response_id) else None
        if stored is None or not is_running(stored):
            return stored
        state = orjson.loads(stored.response)
        lease_until = state.pop(LEASE, 0.0)
        if lease_until <= self._clock():
            message = "The gateway that ran this response stopped before its end; create the response again."
            state |= {"status": "failed", "error": {"code": "server_error", "message": message, "param": None}}
            self._store.put(owner, response_id, StoredResponse(orjson.dumps(state), stored.items))
        return StoredResponse(orjson.dumps(state), stored.items)

    async def cancel(self, owner: str, response_id: str) -> StoredResponse | None:
        """Cancels a response and returns it; None if it is not stored.

        One that runs on another gateway ends when that gateway renews its lease.

        Raises:
            SluiceError: INVALID_ARGUMENT for a response that is not a background response.
        """
        stored = await self.find(owner, response_id)
        if stored is None:
            return None
        state = orjson.loads(stored.response)
        if not state["background"]:
            raise invalid("Cannot cancel a synchronous response; close its connection instead.", code="not_cancellable")
        run = self._runs.get((owner, response_id))
        if run is not None and not run.ended.is_set():
            run.cancel()
            with contextlib.suppress(TimeoutError):  # it ends later
                await asyncio.wait_for(run.ended.wait(), CANCEL_WAIT_S)
            return await self.find(owner, response_id)
        if state["status"] in RUNNING:
            stored = StoredResponse(orjson.dumps({**state, "status": "cancelled"}), stored.items)
            self._store.put(owner, response_id, stored)
        return stored

    def stop(self, owner: str, response_id: str) -> None:
        """Ends a response that was deleted, if it runs here, and forgets its events."""
        run = self._runs.pop((owner, response_id), None)
        if run is not None:
            run.deleted = True
            run.cancel()

    def stream(self, owner: str, response_id: str, number: int) -> Response:
        """Returns the events from a sequence number on; raises SluiceError if they are not on this gateway."""
        run = self._runs.get((owner, response_id))
        if run is None:
            raise invalid(
                "Only the gateway that ran a background response can stream it, for a while after its end; "
                "set stream to false.",
                param="stream",
                code="stream_unavailable",
            )
        return LoggedEvents(run.events, number, self._comment_every_s, self._write_s)

    async def _renew(self, run: BackgroundRun) -> None:
        while True:
            await asyncio.sleep(self._lease_s / RENEWALS_PER_LEASE)
            try:
                stored = await self._store.find(*run.key)
            except SluiceError:
                continue  # the store is unavailable; the next renewal may be in time
            if stored is None or b'"status":"cancelled"' in stored.response[:_STATUS_WITHIN]:
                run.deleted = stored is None
                run.cancel()
                return
            self.update(run, run.state)

    def _trim(self) -> None:
        """Forgets the events of the oldest responses that have ended."""
        size = sum(run.events.size for run in self._runs.values())
        for key, run in list(self._runs.items()):
            if size <= self._max_bytes and len(self._runs) <= 2 * self._most:
                return
            if run.ended.is_set():
                size -= run.events.size
                del self._runs[key]


class DetachedResponse(Response):
    """Answers a request at once, and then does the work that it started.

    The work is part of the request for admission, limits and the shutdown of the gateway.

    Args:
        answer: sent to the client while the work goes on.
        work: does the rest.
    """

    def __init__(self, answer: Response, work: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self._answer = answer
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        working = asyncio.ensure_future(self._work())
        try:
            await self._answer(scope, receive, send)
        finally:
            await working


def is_response(name: str) -> bool:
    """Returns whether a stored value is a response by its id; the others are conversations."""
    return name.startswith("resp_")


def is_running(stored: StoredResponse) -> bool:
    """Returns whether a stored response was in progress when it was stored."""
    head = stored.response[:_STATUS_WITHIN]
    return any(b'"status":"%b"' % status.encode() in head for status in RUNNING)
