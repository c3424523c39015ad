"""Request bodies: bounded in size and time, and JSON."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from services.common.budgets import Budget
from services.common.errors import ErrorKind, SluiceError, invalid
from services.gateway.admission import permit
from services.gateway.body_values import check_values
from services.gateway.http import scoped

MAX_DEPTH = 200


async def read_json(request: Request, limit: int, timeout_s: float, values: Budget | None = None) -> dict[str, Any]:
    """The body as a JSON object.

    Args:
        limit: most bytes.
        timeout_s: longest wait for all of it.
        values: most values in it; None: as many as fit.

    Raises:
        SluiceError: TOO_LARGE, CANCELLED, PERMISSION_DENIED for a model or a field that the key may not use, or
            INVALID_ARGUMENT for anything that is no JSON object.
        HTTPException: 408 when it does not arrive in time, 415 when it is compressed.
    """
    # Nothing is ever unpacked here, so a small body cannot become a large one.
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise HTTPException(415, "The request body is compressed; send it as it is, without content-encoding.")
    try:
        body = await asyncio.wait_for(_read(request, limit), timeout_s)
    except TimeoutError:
        raise HTTPException(408, f"The request body did not arrive within {timeout_s:g} s.") from None
    except ClientDisconnect:
        raise SluiceError(ErrorKind.CANCELLED, "The client went away before the body was complete.") from None
    if values is not None:
        check_values(body, values)
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid(f"The request body is not valid JSON: {error.msg} at character {error.pos}.") from None
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and not _can_be_written(parsed):
        raise invalid("The request body is nested too deep.")
    if not isinstance(parsed, dict):
        raise invalid("The request body must be a JSON object.")
    scoped.check_body(permit.current(), parsed)
    return parsed


def _can_be_written(parsed: Any) -> bool:
    """Parts of the body are passed on as JSON, and what can be read may be too deep for that."""
    try:
        orjson.dumps(parsed)
    except orjson.JSONEncodeError:
        return False
    return True


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(limit: int) -> SluiceError:
    return SluiceError(
        ErrorKind.TOO_LARGE, f"The request body is over the limit of {limit} bytes.", code="request_too_large"
    )
