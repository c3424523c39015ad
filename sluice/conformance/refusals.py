"""What a refusal has to look like: typed, in words, on its own request only."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, NoReturn

import grpc

from services.common.errors import ErrorKind
from services.common.rpc.errors import DETAIL_KEY, from_rpc_error
from sluice.conformance.heard import REASONS, ObservedStream
from sluice.conformance.rule import Broken, NotClaimed, expect
from sluice.conformance.subject import Subject
from sluice.v1 import common_pb2, worker_pb2

UNSUPPORTED = (ErrorKind.FAILED_PRECONDITION, ErrorKind.INVALID_ARGUMENT, ErrorKind.NOT_FOUND)
INVALID = (ErrorKind.INVALID_ARGUMENT, ErrorKind.TOO_LARGE)
CODES = {
    ErrorKind.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorKind.TOO_LARGE: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorKind.FAILED_PRECONDITION: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorKind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
}


async def refused(subject: Subject, request: worker_pb2.GenerateRequest, *kinds: ErrorKind) -> str:
    """The sentence with which a session refuses a request; the next request on that session must work.

    Raises:
        Broken: the request was taken, or refused in another way.
    """
    async with subject.session() as caller:
        bad = await caller.ask_one(request)
        said = refusal_of(bad, kinds)
        after = await caller.ask_one(subject.request())
        expect(
            after.reason in (REASONS.FINISH_REASON_STOP, REASONS.FINISH_REASON_LENGTH),
            f"The request after the refused one ended with {after.describe()}.",
        )
    return said


async def unclaimed(subject: Subject, request: worker_pb2.GenerateRequest) -> NoReturn:
    """Ends a rule whose capability the card does not list: the request must be refused, not quietly served without."""
    raise NotClaimed(f"Refused: {await refused(subject, request, *UNSUPPORTED)}")


async def unclaimed_option(subject: Subject, request: worker_pb2.GenerateRequest) -> NoReturn:
    """Ends a rule about a sampling option that the card does not list.

    Clients send these whatever the engine, so an engine may take one without honouring it; nothing on the wire tells
    that from a refusal that was forgotten.
    """
    heard = await subject.ask(request)
    if heard.reason in (REASONS.FINISH_REASON_STOP, REASONS.FINISH_REASON_LENGTH):
        raise NotClaimed("Taken without effect, as an engine may.")
    raise NotClaimed(f"Refused: {refusal_of(heard, UNSUPPORTED)}")


async def call_refused(subject: Subject, call: Awaitable[Any], *kinds: ErrorKind) -> str:
    """The sentence with which a unary call is refused, by gRPC status and typed detail alike."""
    try:
        async with asyncio.timeout(subject.patience.generation_s):
            await call
    except grpc.aio.AioRpcError as error:
        return _status(error, kinds)
    except TimeoutError:
        raise Broken("No answer in time; it should have been refused.") from None
    raise Broken("It was accepted; it should have been refused.")


def _status(error: grpc.aio.AioRpcError, kinds: tuple[ErrorKind, ...]) -> str:
    detailed = any(key == DETAIL_KEY for key, _ in error.trailing_metadata() or ())
    expect(detailed, f"The status {error.code().name} carries no typed detail ({DETAIL_KEY}).")
    typed = from_rpc_error(error, "worker")
    _check_words(typed.kind, typed.message, kinds)
    wanted = CODES.get(typed.kind)
    expect(wanted in (None, error.code()), f"The status is {error.code().name} for the kind {typed.kind.name}.")
    return typed.message


def refusal_of(heard: ObservedStream, kinds: tuple[ErrorKind, ...]) -> str:
    """The sentence of a terminal delta that refuses; Broken when it is none, or not of these kinds."""
    expect(
        heard.reason == REASONS.FINISH_REASON_ERROR,
        f"It was accepted ({heard.describe()}); it should have been refused.",
    )
    expect(not heard.token_ids, "It was refused only after tokens had come.")
    expect(heard.terminal.HasField("error"), "The terminal delta says ERROR without the error.")
    detail: common_pb2.ErrorDetail = heard.terminal.error
    _check_words(detail.kind, detail.message, kinds)
    return detail.message


def _check_words(kind: int, message: str, kinds: tuple[ErrorKind, ...]) -> None:
    wanted = " or ".join(one.name for one in kinds)
    name = ErrorKind(kind).name if kind in ErrorKind.__members__.values() else str(kind)
    expect(kind in kinds, f"The error is {name}, not {wanted}: {message or 'no message'}")
    expect(bool(message.strip()), f"The error {name} has no message.")
    expect("Traceback" not in message and "\n" not in message.strip(), "The message is no sentence but a traceback.")
