"""Checks of refusals: each must have a typed error and a message, and affect its own request only."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, NoReturn

import grpc

from services.common.base.errors import ErrorKind
from services.common.rpc.errors import DETAIL_KEY, from_rpc_error
from sluice.conformance.exceptions import NotClaimed, RuleFailed
from sluice.conformance.observed_stream import REASONS, ObservedStream
from sluice.conformance.rule import expect
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


async def expect_refused(subject: Subject, request: worker_pb2.GenerateRequest, *kinds: ErrorKind) -> str:
    """Expects a session to refuse a request and to serve the next one; returns the error message.

    Raises:
        RuleFailed: the request was accepted, or refused in another way.
    """
    async with subject.session() as caller:
        bad = await caller.complete_one(request)
        message = refusal_message(bad, kinds)
        after = await caller.complete_one(subject.request())
        expect(
            after.reason in (REASONS.FINISH_REASON_STOP, REASONS.FINISH_REASON_LENGTH),
            f"The request after the refused one ended with {after.describe()}.",
        )
    return message


async def expect_unsupported(subject: Subject, request: worker_pb2.GenerateRequest) -> NoReturn:
    """Ends a rule whose capability the card does not list: expects the request to be refused, not served without it."""
    raise NotClaimed(f"Refused: {await expect_refused(subject, request, *UNSUPPORTED)}")


async def expect_unsupported_option(subject: Subject, request: worker_pb2.GenerateRequest) -> NoReturn:
    """Ends a rule about a sampling option that the card does not list: accepts a refusal as well as a generation.

    Clients send these options to every engine, so an engine may ignore one; the protocol cannot distinguish this from
    a missing refusal.
    """
    stream = await subject.complete(request)
    if stream.reason in (REASONS.FINISH_REASON_STOP, REASONS.FINISH_REASON_LENGTH):
        raise NotClaimed("Accepted and ignored, which is permitted.")
    raise NotClaimed(f"Refused: {refusal_message(stream, UNSUPPORTED)}")


async def expect_call_refused(subject: Subject, call: Awaitable[Any], *kinds: ErrorKind) -> str:
    """Expects a unary call to be refused with matching gRPC status and typed detail; returns the error message."""
    try:
        async with asyncio.timeout(subject.patience.generation_s):
            await call
    except grpc.aio.AioRpcError as error:
        return _check_status(error, kinds)
    except TimeoutError:
        raise RuleFailed("The call timed out; it should have been refused.") from None
    raise RuleFailed("The call was accepted; it should have been refused.")


def _check_status(error: grpc.aio.AioRpcError, kinds: tuple[ErrorKind, ...]) -> str:
    detailed = any(key == DETAIL_KEY for key, _ in error.trailing_metadata() or ())
    expect(detailed, f"The status {error.code().name} has no typed detail ({DETAIL_KEY}).")
    typed = from_rpc_error(error, "worker")
    _check_error(typed.kind, typed.message, kinds)
    wanted = CODES.get(typed.kind)
    expect(wanted in (None, error.code()), f"The status is {error.code().name} for the kind {typed.kind.name}.")
    return typed.message


def refusal_message(stream: ObservedStream, kinds: tuple[ErrorKind, ...]) -> str:
    """Returns the error message of a refused request.

    Raises:
        RuleFailed: the request was not refused, or with an error of another kind.
    """
    expect(
        stream.reason == REASONS.FINISH_REASON_ERROR,
        f"The request was accepted ({stream.describe()}); it should have been refused.",
    )
    expect(not stream.token_ids, "The request was refused only after tokens had been sent.")
    expect(stream.terminal.HasField("error"), "The terminal delta has the finish reason ERROR but no error.")
    detail: common_pb2.ErrorDetail = stream.terminal.error
    _check_error(detail.kind, detail.message, kinds)
    return detail.message


def _check_error(kind: int, message: str, kinds: tuple[ErrorKind, ...]) -> None:
    wanted = " or ".join(one.name for one in kinds)
    name = ErrorKind(kind).name if kind in ErrorKind.__members__.values() else str(kind)
    expect(kind in kinds, f"The error is {name}, not {wanted}: {message or 'no message'}")
    expect(bool(message.strip()), f"The error {name} has no message.")
    expect("Traceback" not in message and "\n" not in message.strip(), "The message is a traceback, not a sentence.")
