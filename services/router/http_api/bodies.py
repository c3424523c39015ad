"""Reads request bodies within bounds, and parses them as JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message
from starlette.requests import ClientDisconnect, Request

from services.common.budgets import BudgetPool
from services.common.errors import ErrorKind, SluiceError, invalid, sentence

MOST_PROBLEM = 300
MOST_LEVELS = 50
_FORM_TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/")

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Bounds on bodies.

    Attributes:
        size: maximum bytes of one body.
        memory: bytes of all bodies together.
        timeout_s: longest time in which a body arrives.
    """

    size: int
    memory: BudgetPool
    timeout_s: float


@asynccontextmanager
async def read_body(request: Request, limits: BodyLimits) -> AsyncIterator[bytes]:
    """Provides the body; its share of the memory is taken before it is read and held until the end of the context.

    Raises:
        SluiceError: INVALID_ARGUMENT for a form or a compressed body, TOO_LARGE, DEADLINE_EXCEEDED (`body_timeout`),
            OVERLOADED if too many bodies are being read, CANCELLED if the client disconnected.
    """
    _check_type(request)
    length = request.headers.get("content-length", "")
    share = int(length) if length.isdecimal() and length.isascii() else limits.size
    if share > limits.size:
        raise _too_large(limits)
    if not limits.memory.try_take(share):
        raise limits.memory.refuse(
            "Too many request bodies are being read; retry later",
            kind=ErrorKind.OVERLOADED,
            code="overloaded",
            retry_after_ms=1000,
        )
    try:
        yield await _read(request, limits)
    finally:
        limits.memory.give_back(share)


async def _read(request: Request, limits: BodyLimits) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(limits.timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.size:
                    raise _too_large(limits)
    except TimeoutError:
        raise SluiceError(
            ErrorKind.DEADLINE_EXCEEDED,
            f"The request body did not arrive within {limits.timeout_s:g} s.",
            code="body_timeout",
        ) from None
    except ClientDisconnect:
        raise SluiceError(ErrorKind.CANCELLED, "The client disconnected before the body was complete.") from None
    return bytes(body)


def _check_type(request: Request) -> None:
    # Browsers send these types to other sites without asking them first, so any web page could reserve load.
    if request.headers.get("content-type", "").strip().lower().startswith(_FORM_TYPES):
        raise invalid(
            'The request body is not declared as JSON; send "content-type: application/json".', param="content-type"
        )
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise invalid("The request body is compressed; send it uncompressed.", param="content-encoding")


def _too_large(limits: BodyLimits) -> SluiceError:
    return SluiceError(
        ErrorKind.TOO_LARGE,
        f"The request body exceeds {limits.size} bytes (--http-max-body-mb).",
        code="request_too_large",
    )


def json_object(body: bytes) -> dict[str, Any]:
    """Returns the JSON object of a body; raises SluiceError (INVALID_ARGUMENT) for anything else."""
    try:
        value = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise invalid(f"The request body is not valid JSON: {sentence(str(error), MOST_PROBLEM)}.") from None
    if not isinstance(value, dict):
        raise invalid("The request body must be a JSON object.")
    return value


def message_of(body: bytes, kind: type[M]) -> M:
    """Returns a message from its JSON form; an empty body is an empty message.

    Raises:
        SluiceError: INVALID_ARGUMENT if the body is not JSON or has fields that the message lacks.
    """
    if not body:
        return kind()
    try:
        return json_format.ParseDict(json_object(body), kind(), max_recursion_depth=MOST_LEVELS)
    except (json_format.ParseError, ValueError, TypeError, RecursionError) as error:
        problem = sentence(str(error).partition("\n")[0], MOST_PROBLEM)
        raise invalid(f"The request body is not a {kind.DESCRIPTOR.name}: {problem}.") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")
