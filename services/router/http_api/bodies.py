"""Reads request bodies within bounds, and parses them as JSON."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Container, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request

from services.common.base.budgets import Budget, BudgetPool
from services.common.base.errors import BODY_TIMEOUT, ErrorKind, SluiceError, invalid, quoted
from services.common.net.http_policy import is_form
from services.router.scheduling.body_intake import BodyIntake

MAX_ITEMS = 10_000
"""Items of a list or object in any body of the HTTP twin; more are refused, budget `list_items`."""
_ITEMS = Budget("list_items", MAX_ITEMS, "")


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Bounds on bodies.

    Attributes:
        size: maximum bytes of one body.
        memory: bytes of all bodies together, including parsed ones.
        timeout_s: longest time in which a body arrives.
        intake: parses bodies, within the memory.
    """

    size: int
    memory: BudgetPool
    timeout_s: float
    intake: BodyIntake


@asynccontextmanager
async def read_object(request: Request, limits: BodyLimits) -> AsyncIterator[tuple[dict[str, Any], int]]:
    """Provides the JSON object of a body and the body's length in bytes.

    Its share of the memory is taken before it is read and held until the end of the context.

    Raises:
        SluiceError: INVALID_ARGUMENT for a form or a compressed body, TOO_LARGE, DEADLINE_EXCEEDED (`body_timeout`),
            OVERLOADED if too many bodies are being read, CANCELLED if the client disconnected; as BodyIntake.parse.
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
        body = await _read(request, limits)
        value, held = await limits.intake.parse(body)
        try:
            yield value, len(body)
        finally:
            limits.intake.give_back(held)
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
        late = f"The request body did not arrive within {limits.timeout_s:g} s."
        raise SluiceError(ErrorKind.DEADLINE_EXCEEDED, late, code=BODY_TIMEOUT) from None
    except ClientDisconnect:
        raise SluiceError(ErrorKind.CANCELLED, "The client disconnected before the body was complete.") from None
    return bytes(body)


def _check_type(request: Request) -> None:
    # Browsers send these types to other sites without asking them first, so any web page could reserve load.
    if any(is_form(value.encode("latin-1")) for value in request.headers.getlist("content-type")):
        raise invalid(
            'The request body is not declared as JSON; send "content-type: application/json".', param="content-type"
        )
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise invalid("The request body is compressed; send it uncompressed.", param="content-encoding")


def _too_large(limits: BodyLimits) -> SluiceError:
    return SluiceError(
        ErrorKind.TOO_LARGE,
        f"The request body exceeds {limits.size} bytes.",
        code="request_too_large",
    )


def check_lists(value: Mapping[str, Any], unlimited: Container[str] = ()) -> None:
    """Raises SluiceError (INVALID_ARGUMENT) for a field with more items than a call handles at once.

    Args:
        unlimited: fields that only `body_values` bounds.
    """
    for name, items in value.items():
        if isinstance(items, list | dict) and name not in unlimited:
            _ITEMS.check(len(items), f"The items of {quoted(name)}", param=name)
