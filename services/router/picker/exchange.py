"""One HTTP request and its response, as Envoy passes them through the picker: one call of ExternalProcessor.

Messages are handled as they arrive; only choosing an endpoint, and moving a booking, are tasks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from services.common.budgets import BudgetPool
from services.common.errors import ErrorKind, SluiceError, internal, invalid, overloaded, word
from services.common.tasks import TaskOwner
from services.router.metrics import Metrics
from services.router.picker import messages
from services.router.picker.http2.call import CallHandler, GrpcCall
from services.router.picker.http_request import HttpRequest, read_head
from services.router.picker.picker import PickedEndpoint, Picker
from services.router.picker.usage import UsageReader
from services.router.reservations.table import AllBusy
from sluice.v1 import ext_proc_pb2

log = logging.getLogger(__name__)

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
_parse = ext_proc_pb2.ProcessingRequest.FromString


@dataclass(frozen=True, slots=True)
class PickerLimits:
    """Limits on what Envoy may send.

    Attributes:
        body_bytes: the longest request body.
        body_s: how long a request body may take to arrive, seconds.
        streams: the most requests in progress.
        close_after_choice: end the stream once an endpoint is chosen; the booking is then released by its lifetime or
            by the load reports of its worker.
    """

    body_bytes: int = 16 << 20
    body_s: float = 60.0
    streams: int = 10_000
    close_after_choice: bool = False


@dataclass(frozen=True, slots=True)
class Shared:
    """What all exchanges of a picker share.

    Attributes:
        bodies: bounds the bytes of all request bodies held at a time.
        tasks: owns the tasks of exchanges.
    """

    picker: Picker
    limits: PickerLimits
    bodies: BudgetPool
    metrics: Metrics
    tasks: TaskOwner


class Exchange:
    """Serves one call.

    A request is received until its body is complete; then an endpoint is chosen, and the response passes through.
    """

    __slots__ = (
        "_body_due",
        "_call",
        "_choosing",
        "_chunks",
        "_closed",
        "_failed",
        "_held",
        "_moving",
        "_outcome",
        "_pick",
        "_request",
        "_responding",
        "_shared",
        "_subset",
        "_trailers",
        "_usage",
    )

    def __init__(self, shared: Shared, call: GrpcCall) -> None:
        self._shared = shared
        self._call = call
        self._request: HttpRequest | None = None
        self._chunks: list[bytes] = []
        self._subset: tuple[str, ...] | None = None
        self._held = 0
        self._choosing: asyncio.Task[None] | None = None
        self._moving: asyncio.Task[None] | None = None
        self._trailers = False  # of the request, which arrived while its endpoint was chosen
        self._responding = False
        self._closed = False
        self._pick: PickedEndpoint | None = None
        self._usage = UsageReader()
        self._failed = False
        self._outcome = "disconnected"
        timer = asyncio.get_running_loop().call_later(shared.limits.body_s, self._on_late_body)
        self._body_due: asyncio.TimerHandle | None = timer
        shared.metrics.picker_streams.add(1)

    # The messages of Envoy

    def on_message(self, message: bytes) -> None:
        """Takes the next message."""
        parsed = _parse(message)
        kind = parsed.WhichOneof("request")
        if self._responding:
            self._respond(kind, parsed)
        elif self._choosing is None:
            self._receive(kind, parsed)
        elif kind == "request_trailers":
            self._trailers = True
        # Further request bodies repeat the end of the stream that has been answered.

    def on_half_close(self) -> None:
        """Takes the end of Envoy's messages."""
        if self._choosing is not None:
            self._choosing.cancel()
        self._call.finish()

    def on_end(self) -> None:
        """Releases what the request holds."""
        self._closed = True
        self._cancel_timer()
        self._let_go()
        if self._choosing is not None:
            self._choosing.cancel()
        if self._moving is None:
            self._release()
        metrics = self._shared.metrics
        metrics.picker_streams.add(-1)
        metrics.picker_requests.add(1, {"outcome": self._outcome})

    def _release(self) -> None:
        if self._pick is None:
            return
        if self._shared.limits.close_after_choice and self._outcome == "picked":
            self._pick.reservation = ""  # the request goes on without the picker
        self._shared.picker.end(self._pick, self._usage, self._failed)

    # The request

    def _receive(self, kind: str | None, message: Any) -> None:
        if message.observability_mode:
            return  # Envoy expects no responses
        if message.HasField("metadata_context"):
            found = messages.subset_of(message)
            self._subset = self._subset if found is None else found
        try:
            done = self._receive_part(kind, message)
        except SluiceError as error:
            self._reject(error)
            return
        if done and self._request is not None:
            self._request.subset = self._subset
            self._cancel_timer()
            body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
            self._chunks.clear()
            choosing = self._choose(self._request, body)
            self._choosing = self._shared.tasks.spawn(choosing, "picker-choice")

    def _receive_part(self, kind: str | None, message: Any) -> bool:
        """Returns whether the request is complete."""
        if kind == "request_headers":
            head = message.request_headers
            done = bool(head.end_of_stream)
            if message.HasField("protocol_config"):  # older Envoys do not send their modes
                _check_modes(message.protocol_config, done)
            self._request = read_head(messages.read_headers(head))
            return done
        if kind == "request_body":
            body = message.request_body
            chunk = body.body
            self._hold(len(chunk))
            self._chunks.append(chunk)
            return bool(body.end_of_stream)
        if kind == "request_trailers":
            return True
        self._cancel_timer()  # a response whose request did not pass through the picker
        self._responding = True
        self._respond(kind, message)
        return False

    def _hold(self, size: int) -> None:
        limits, bodies = self._shared.limits, self._shared.bodies
        if self._held + size > limits.body_bytes:
            raise SluiceError(
                ErrorKind.TOO_LARGE,
                f"The body exceeds {limits.body_bytes >> 20} MiB (the picker's --picker-body-mb).",
                code="request_too_large",
            )
        if not bodies.try_grow(size):
            reason = f"Bodies of {bodies.used} bytes are being received"
            raise bodies.refuse(reason, kind=ErrorKind.UNAVAILABLE, retry_after_ms=1000)
        self._held += size

    def _let_go(self) -> None:
        if self._held:
            self._shared.bodies.give_back(self._held)
            self._held = 0

    def _on_late_body(self) -> None:
        limit = f"The body did not arrive within {self._shared.limits.body_s:g} s; send it faster."
        self._body_due = None
        self._reject(SluiceError(ErrorKind.DEADLINE_EXCEEDED, limit))

    def _cancel_timer(self) -> None:
        if self._body_due is not None:
            self._body_due.cancel()
            self._body_due = None

    def _reject(self, error: SluiceError) -> None:
        self._outcome = "shed" if isinstance(error, AllBusy) else word(error)
        self._call.send(messages.rejected(error, self._request))
        self._call.finish()

    # The choice

    async def _choose(self, request: HttpRequest, body: bytes) -> None:
        started = time.perf_counter()
        try:
            pick = await self._shared.picker.pick(request, body)
        except SluiceError as error:
            self._choosing = None
            if error.code == "not_ready":  # a failure of this picker, not of the request: Envoy fails open or closed
                self._call.fail(error)
            else:
                self._reject(error)
            return
        except Exception:
            self._choosing = None
            log.exception("unexpected error in the stream of a request")
            self._call.fail(internal("Unexpected error; see the router's log."))
            return
        self._choosing = None
        self._shared.metrics.picker_seconds.record(time.perf_counter() - started)
        self._pick = pick
        if self._closed:
            self._release()
            return
        self._responding = True
        self._outcome = "picked"
        self._call.send(messages.picked(pick))
        self._call.when_sent(self._let_go)
        pick.body = b""
        if self._shared.limits.close_after_choice:
            self._call.finish()
        elif self._trailers:
            self._call.send(messages.REQUEST_TRAILERS)

    # The response

    def _respond(self, kind: str | None, message: Any) -> None:
        call = self._call
        if kind == "response_body":
            body = message.response_body
            chunk, end = body.body, body.end_of_stream
            call.send(messages.response_body(chunk, end))
            if self._pick is not None:
                self._shared.picker.first_byte(self._pick)
                self._usage.feed(chunk)
            if end:
                self._end()
        elif kind == "response_headers":
            self._answer_headers(message)
        elif kind == "response_trailers":
            call.send(messages.RESPONSE_TRAILERS)
            self._end()
        elif kind == "request_trailers":
            call.send(messages.REQUEST_TRAILERS)
        # Further request bodies repeat the end of the stream that has been answered.

    def _answer_headers(self, message: Any) -> None:
        pick = self._pick
        headers = message.response_headers
        self._failed = not messages.status_of(headers).startswith("2")
        self._call.send(messages.response_headers(pick))
        if headers.end_of_stream:
            self._end()
        elif pick is not None and pick.reservation:
            endpoint = messages.served_endpoint(message)
            if endpoint and endpoint != pick.endpoints[0]:
                self._moving = self._shared.tasks.spawn(self._move(pick, endpoint), "picker-move")

    async def _move(self, pick: PickedEndpoint, endpoint: str) -> None:
        """Moves the booking to the endpoint that serves the request; its end waits for that."""
        try:
            if await self._shared.picker.served(pick, endpoint):
                self._shared.metrics.picker_moved.add(1)
        finally:
            self._moving = None
            if self._closed or self._outcome == "completed":
                self._release()

    def _end(self) -> None:
        self._outcome = "completed"
        if self._moving is None:
            self._release()


def _check_modes(config: Any, without_body: bool) -> None:
    """Raises SluiceError (INVALID_ARGUMENT) if Envoy does not stream bodies as the picker needs them."""
    if config.request_body_mode != messages.FULL_DUPLEX and not without_body:
        raise invalid(
            "The ext_proc filter must have request_body_mode and response_body_mode FULL_DUPLEX_STREAMED.",
            code="wrong_body_mode",
        )


class PickerService:
    """Implements ExternalProcessor: one call for each HTTP request."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def methods(self) -> Mapping[str, Callable[[GrpcCall], CallHandler]]:
        """Returns what serves the calls, by method."""
        return {f"/{SERVICE}/Process": self.process}

    def process(self, call: GrpcCall) -> CallHandler:
        """Starts the exchange of one HTTP request; raises SluiceError (OVERLOADED) if too many are in progress."""
        shared = self._shared
        running = int(shared.metrics.picker_streams.values().get((), 0))
        if running >= shared.limits.streams:
            raise overloaded(f"{running} requests are in progress; use another replica.")
        return Exchange(shared, call)
