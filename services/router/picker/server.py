"""The picker's gRPC servers: ExternalProcessor with health for Envoy, and health alone on a port of its own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

from services.common.base.budgets import BudgetPool
from services.common.base.errors import BODY_TIMEOUT, ErrorKind, SluiceError, invalid, overloaded, word
from services.common.net.intake.parts_pace import BodyParts, PartsPace
from services.common.rpc.errors import abort
from services.common.rpc.session import FramePace
from services.router.metrics import Metrics
from services.router.picker import messages
from services.router.picker.http_request import HttpRequest, read_head
from services.router.picker.picker import PickedEndpoint, Picker
from services.router.picker.usage import UsageReader
from services.router.state.reservations.table import AllBusy
from sluice.v1 import ext_proc_pb2

log = logging.getLogger(__name__)

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"

_PIECE_BYTES = 64 << 10
MAX_BODY_S = 60.0
"""Seconds in which a request body arrives from Envoy; then status 408."""

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class PickerLimits:
    """Limits on what Envoy may send.

    Attributes:
        body_bytes: the longest request body.
        streams: the most requests in progress.
        close_after_choice: end the stream once an endpoint is chosen; the booking is then released by its lifetime or
            by the load reports of its worker.
    """

    body_bytes: int = 10 << 20
    streams: int = 10_000
    close_after_choice: bool = False


class PickerService:
    """Implements ExternalProcessor: one stream for each HTTP request.

    Args:
        bodies: bounds the bytes of all request bodies held at a time.
    """

    def __init__(self, picker: Picker, limits: PickerLimits, bodies: BudgetPool, metrics: Metrics) -> None:
        self._picker = picker
        self._limits = limits
        self._bodies = bodies
        self._metrics = metrics
        self._pace = PartsPace()
        self._streams = 0

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the service under Envoy's name."""
        process: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            self.Process,
            request_deserializer=ext_proc_pb2.ProcessingRequest.FromString,
            response_serializer=None,  # they are serialized already
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": process}),))

    async def Process(self, requests: AsyncIterator[Any], context: Context) -> None:
        """Serves the stream of one HTTP request; reads and writes by context, for deadlines on both."""
        if self._streams >= self._limits.streams:
            await abort(context, overloaded(f"{self._streams} requests are in progress; use another replica."))
        self._streams += 1
        self._metrics.picker_streams += 1
        parts = BodyParts(self._pace)
        exchange = _Exchange(self._picker, self._limits, self._bodies, self._metrics, context, parts)
        try:
            if await exchange.run_request():
                await exchange.run_response()
        except SluiceError as error:  # of this picker, not of the request: Envoy fails open or closed
            await abort(context, error)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except (grpc.aio.UsageError, grpc.aio.InternalError, asyncio.InvalidStateError):
            return  # the stream has ended
        except Exception:
            log.exception("unexpected error in the stream of a request")
            await abort(context, SluiceError(ErrorKind.INTERNAL, "Unexpected error; see the router's log."))
        finally:
            exchange.close()
            self._streams -= 1
            self._metrics.picker_streams -= 1
            self._metrics.picker_requests.add(1, {"outcome": exchange.outcome})


class _Body:
    """A request body while it arrives, in pieces of one size.

    Small chunks would fragment the memory, and so would buffers that grow to all sizes at a time.
    """

    def __init__(self) -> None:
        self._first = b""
        self._pieces: list[bytearray] = []

    def add(self, chunk: bytes) -> None:
        """Adds what has arrived."""
        if not self._first:
            self._first = chunk
        elif self._pieces and len(self._pieces[-1]) + len(chunk) <= _PIECE_BYTES:
            self._pieces[-1] += chunk
        else:
            self._pieces.append(bytearray(chunk))

    def take(self) -> bytes:
        """Returns the whole body; it is empty afterwards."""
        first, pieces, self._first, self._pieces = self._first, self._pieces, b"", []
        return b"".join((first, *pieces)) if pieces else first


class _Exchange:
    """One HTTP request and its response."""

    def __init__(
        self,
        picker: Picker,
        limits: PickerLimits,
        bodies: BudgetPool,
        metrics: Metrics,
        context: Context,
        parts: BodyParts,
    ) -> None:
        self._picker = picker
        self._limits = limits
        self._bodies = bodies
        self._metrics = metrics
        self._context = context
        self._parts = parts
        self._held = 0
        self._pick: PickedEndpoint | None = None
        self._usage = UsageReader()
        self._failed = False
        self._first_response: Any = None
        self._last = "request_headers"
        self.outcome = "disconnected"

    def close(self) -> None:
        """Releases what the request holds."""
        if self._held:
            self._let_go()
        if self._pick is None or self.outcome == "completed":
            return
        if self._limits.close_after_choice and self.outcome == "picked":
            self._pick.reservation = ""  # the request goes on without the picker
        self._picker.end(self._pick, self._usage, self._failed)

    async def run_request(self) -> bool:
        """Receives a request and sends it to its endpoint; returns whether its response passes through the picker."""
        request: HttpRequest | None = None
        try:
            async with asyncio.timeout(MAX_BODY_S):
                request, body = await self._receive()
            if request is None:
                return self._first_response is not None
            started = time.perf_counter()
            self._pick = await self._picker.pick(request, body)
            self._metrics.picker_seconds.record(time.perf_counter() - started)
        except TimeoutError:
            limit = f"The body did not arrive within {MAX_BODY_S:g} s; send it faster."
            error = SluiceError(ErrorKind.DEADLINE_EXCEEDED, limit, code=BODY_TIMEOUT)
            return await self._reject(error, request)
        except SluiceError as error:
            if error.code == "not_ready":
                raise
            return await self._reject(error, request)
        for message in messages.picked(self._pick, self._last):
            await self._context.write(message)
        self._let_go()
        self._pick.body = b""
        self.outcome = "picked"
        return not self._limits.close_after_choice

    async def _receive(self) -> tuple[HttpRequest | None, bytes]:
        """Returns the head and the body of the request; no head if the stream ended before."""
        request: HttpRequest | None = None
        body = _Body()
        subset = None
        while (message := await self._context.read()) is not grpc.aio.EOF:
            if pause_s := self._parts.pause_s(len(message.request_body.body)):
                await asyncio.sleep(pause_s)
            if message.observability_mode:
                continue  # Envoy expects no responses
            if message.HasField("metadata_context"):
                found = messages.subset_of(message)
                subset = subset if found is None else found
            kind = message.WhichOneof("request")
            if kind == "request_headers":
                _check_modes(message)
                request = read_head(messages.read_headers(message.request_headers))
                done = message.request_headers.end_of_stream
            elif kind == "request_body":
                self._hold(len(message.request_body.body))
                body.add(message.request_body.body)
                done = message.request_body.end_of_stream
            elif kind == "request_trailers":
                done = True
            else:  # a response whose request did not pass through the picker
                self._first_response = message
                return None, b""
            if done and request is not None:
                request.subset, self._last = subset, kind
                return request, body.take()
        return None, b""

    def _hold(self, size: int) -> None:
        if self._held + size > self._limits.body_bytes:
            raise SluiceError(
                ErrorKind.TOO_LARGE,
                f"The body exceeds {self._limits.body_bytes >> 20} MiB (the picker's --picker-body-mb).",
                code="request_too_large",
            )
        if not self._bodies.try_grow(size):
            reason = f"Bodies of {self._bodies.used} bytes are being received"
            raise self._bodies.refuse(reason, kind=ErrorKind.OVERLOADED, retry_after_ms=1000)
        self._held += size

    def _let_go(self) -> None:
        self._bodies.give_back(self._held)
        self._held = 0

    async def _reject(self, error: SluiceError, request: HttpRequest | None) -> bool:
        self.outcome = "shed" if isinstance(error, AllBusy) else word(error)
        await self._context.write(messages.rejected(error, request))
        return False

    async def run_response(self) -> None:
        """Passes the response on, and follows its progress."""
        pick = self._pick or PickedEndpoint((), {}, b"")
        message, pace = self._first_response or await self._context.read(), FramePace()
        while message is not grpc.aio.EOF:
            kind = message.WhichOneof("request")
            if kind == "response_body":
                body = message.response_body
                for part in messages.streamed(messages.RESPONSE_BODY, body.body, body.end_of_stream):
                    await self._context.write(part)
                self._passed_on(pick, body.body, body.end_of_stream)
            elif kind == "response_headers":
                self._failed = not messages.status_of(message.response_headers).startswith("2")
                await self._context.write(messages.response_headers(pick, message.response_headers))
                if message.response_headers.end_of_stream:
                    self._end(pick)
                elif (endpoint := _elsewhere(pick, message)) and await self._picker.served(pick, endpoint):
                    self._metrics.picker_moved.add(1)
            elif kind == "response_trailers":
                await self._context.write(messages.RESPONSE_TRAILERS)
                self._end(pick)
            elif kind == "request_trailers":
                await self._context.write(messages.REQUEST_TRAILERS)
            # Further request bodies repeat the end of the stream that has been answered.
            if pause_s := pace.pause_s():
                await asyncio.sleep(pause_s)
            message = await self._context.read()

    def _passed_on(self, pick: PickedEndpoint, body: bytes, end: bool) -> None:
        if body:
            self._picker.first_byte(pick)
            self._usage.feed(body)
        if end:
            self._end(pick)

    def _end(self, pick: PickedEndpoint) -> None:
        self.outcome = "completed"
        self._picker.end(pick, self._usage, self._failed)


def _elsewhere(pick: PickedEndpoint, message: Any) -> str:
    """Returns the endpoint that serves the request, from the headers of its response, if it is not the chosen one."""
    endpoint = messages.served_endpoint(message) if pick.reservation else ""
    return endpoint if endpoint and endpoint != pick.endpoints[0] else ""


def _check_modes(message: Any) -> None:
    """Raises SluiceError (INVALID_ARGUMENT) if Envoy does not stream bodies as the picker needs them."""
    if not message.HasField("protocol_config"):
        return  # an Envoy that does not send its modes
    modes = message.protocol_config
    streamed = modes.request_body_mode == messages.FULL_DUPLEX or message.request_headers.end_of_stream
    if not streamed or modes.response_body_mode not in (messages.FULL_DUPLEX, messages.NO_BODY):
        raise invalid(
            "The ext_proc filter must have request_body_mode and response_body_mode FULL_DUPLEX_STREAMED.",
            code="wrong_body_mode",
        )
