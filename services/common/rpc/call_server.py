"""The server's side of unary calls that share one stream; `multiplexed_call` is the caller's side."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import grpc
from google.protobuf.message import Message

from services.common.base.errors import SluiceError, internal, invalid, overloaded
from services.common.base.packing import unpack_u32
from services.common.base.shared_steps import shared_step
from services.common.observability import telemetry
from services.common.rpc.errors import abort, to_detail
from services.common.rpc.session import BatchWriter, serve_session

log = logging.getLogger(__name__)

MAX_CALLS = 16_384
"""Calls of one session whose responses are not sent; with more the session ends as OVERLOADED."""
BYTES_PER_MESSAGE = 4 << 20

Metadata = Iterable[tuple[str, str | bytes]]


class MultiplexedCallServer:
    """Serves one caller's stream: each call runs as a task, and responses that are ready together share a message.

    Args:
        handle: returns the fields of the response to a call with its metadata, such as `response`.
        make_answer: builds the message of one response, such as `TokenizeAnswer`.
        make_answers: builds the message of several responses.
        greeting: fields of the first message, which says what the session serves.
        most_calls: maximum number of calls in progress and unwritten responses; a caller beyond it is disconnected.
        max_pause_s: as in `BatchWriter`.
    """

    def __init__(
        self,
        handle: Callable[[Any, Metadata], Awaitable[Mapping[str, Message]]],
        make_answer: Callable[..., Any],
        make_answers: Callable[..., Any],
        most_calls: int = MAX_CALLS,
        max_pause_s: float = 0.0,
        greeting: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._handle = handle
        self._make_answer = make_answer
        self._make_answers = make_answers
        self._most_calls = most_calls
        self._max_pause_s = max_pause_s
        self._running: dict[int, asyncio.Task[None]] = {}
        self._ready: list[Any] = []
        self._greeting: Mapping[str, Any] | None = greeting
        self._writer: BatchWriter[Any]

    async def serve(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Serves until the caller half-closes or disconnects."""
        self._writer = BatchWriter(self._drain, context.write, self._max_pause_s)
        self._writer.wake()
        try:
            await serve_session(context, self._writer, self._on_message, self._all_completed)
        except SluiceError as error:
            await abort(context, error)
        finally:
            for task in self._running.values():
                task.cancel()

    async def _all_completed(self) -> None:
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    @shared_step("calls.serve")
    def _on_message(self, message: Any) -> None:
        if len(self._running) + len(self._ready) + len(message.calls) > self._most_calls:
            raise overloaded(f"A session is limited to {self._most_calls} calls; read responses before sending more.")
        for call in message.calls:
            if (running := self._running.pop(call.number, None)) is not None:  # nothing tells their responses apart
                running.cancel()
                reused = invalid(f"Call {call.number} is already in progress; choose another number.", param="number")
                self._add_answer(self._failed(call, reused))
                continue
            task = asyncio.get_running_loop().create_task(self._answer(call))
            self._running[call.number] = task
        for number in unpack_u32(message.cancels, "cancels"):
            if number in self._running:
                self._running.pop(number).cancel()

    async def _answer(self, call: Any) -> None:
        try:
            metadata = [(key, call.metadata[key]) for key in call.metadata]
            telemetry.name_request(metadata)
            answer = self._make_answer(number=call.number, **await self._handle(call, metadata))
        except SluiceError as error:
            answer = self._failed(call, error)
        except Exception:
            log.exception("unexpected failure of a call on a session")
            answer = self._failed(call, internal("Unexpected failure; see the service's log for details."))
        self._running.pop(call.number, None)
        self._add_answer(answer)

    def _add_answer(self, answer: Any) -> None:
        self._ready.append(answer)
        self._writer.wake()

    def _failed(self, call: Any, error: SluiceError) -> Any:
        telemetry.failed(error)
        return self._make_answer(number=call.number, error=to_detail(error))

    def _drain(self) -> Any | None:
        if not self._ready and self._greeting is None:
            return None
        greeting, self._greeting = self._greeting or {}, None
        count, size = 0, 0
        while count < len(self._ready) and size < BYTES_PER_MESSAGE:
            size += self._ready[count].ByteSize()
            count += 1
        answers, self._ready = self._ready[:count], self._ready[count:]
        return self._make_answers(answers=answers, **greeting)
