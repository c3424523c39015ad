"""Reads and parses JSON request bodies within bounds on size, time and memory."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope

from services.common.base.budgets import Budget
from services.common.base.errors import ErrorKind, SluiceError, invalid
from services.common.net.http_policy import is_form
from services.common.net.intake.json_intake import JsonIntake
from services.common.net.intake.json_size import parsed_size
from services.common.net.intake.json_values import Marks
from services.gateway.core import context
from services.gateway.http.body_memory import SETTING, SMALL_BYTES, BodyMemory, BodyShare
from services.gateway.http.middleware import scopes as scoped

_SHARE_KEY = "sluice.body"


async def read_json(
    request: Request,
    limit: int,
    timeout_s: float,
    values: Budget | None = None,
    memory: BodyMemory | None = None,
) -> dict[str, Any]:
    """Returns the body as a JSON object; `release_body` releases its memory.

    Args:
        limit: maximum size in bytes.
        timeout_s: longest wait for memory, and then for the whole body.
        values: maximum number of values; None for no limit.
        memory: memory shared by all bodies; None for memory of its own.

    Raises:
        SluiceError: TOO_LARGE, UNAVAILABLE without memory or time for it, CANCELLED, PERMISSION_DENIED for a model or
            field that the key may not use, INVALID_ARGUMENT for anything other than a JSON object.
        HTTPException: 408 if it does not arrive in time, 415 if it is compressed or sent as a form.
    """
    length = _announced_length(request)
    memory = memory or BodyMemory(4 * limit)
    body, share = await _read_in_time(request, length, limit, timeout_s, memory)
    size = 0

    def check(text: bytes, marks: Marks) -> None:
        nonlocal size
        size = parsed_size(text, marks)
        memory.check(size)

    parsed = await JsonIntake(values, memory.pace).parse(body, timeout_s, check)
    if not isinstance(parsed, dict):
        raise invalid("The request body must be a JSON object.")
    memory.resize(share, size)
    scoped.check_body(context.current().permit, parsed)
    return parsed


async def read_bytes(request: Request, limit: int, timeout_s: float, memory: BodyMemory | None = None) -> bytes:
    """Returns the body of a form unparsed; `release_body` releases its memory. Arguments and errors as `read_json`."""
    memory = memory or BodyMemory(4 * limit)
    length = request.headers.get("content-length", "")
    announced = int(length) if length.isdigit() else None
    body, _ = await _read_in_time(request, announced, limit, timeout_s, memory)
    return body


def release_body(scope: Scope) -> None:
    """Releases the memory of a request's body, if one was read."""
    share: BodyShare | None = scope.pop(_SHARE_KEY, None)
    if share is not None:
        share.memory.release(share)


def _announced_length(request: Request) -> int | None:
    """Returns the body's length in bytes, None if chunked; HTTPException(415) for forms and compressed bodies."""
    length: int | None = 0
    for name, value in request.scope["headers"]:
        if name == b"content-length":
            length = int(value)
        elif name == b"transfer-encoding":
            length = None
        elif name == b"content-type":
            # Browsers send these types to other sites without a CORS preflight, so any web page could use a gateway
            # that trusts its network. All other types need a preflight, which the gateway never grants.
            if is_form(value):
                message = 'The request body is not declared as JSON; send "content-type: application/json".'
                raise HTTPException(415, message)
        elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            # Bodies are never decompressed, so a small body cannot expand to a large one.
            raise HTTPException(415, "The request body is compressed; send it uncompressed, without content-encoding.")
    return length


async def _read_in_time(
    request: Request, length: int | None, limit: int, timeout_s: float, memory: BodyMemory
) -> tuple[bytes, BodyShare]:
    deadline = asyncio.timeout(None)
    share = request.scope[_SHARE_KEY] = memory.expect(deadline, timeout_s)
    try:
        async with deadline:
            body = await _read(request, length, limit, memory, share)
    except TimeoutError:
        if share.lost or share.waiting:
            raise memory.refuse() from None
        raise HTTPException(408, f"The request body did not arrive within {timeout_s:g} s.") from None
    except ClientDisconnect:
        raise SluiceError(
            ErrorKind.CANCELLED, "The client disconnected before the request body was complete."
        ) from None
    finally:
        memory.arrived(share)
    return body, share


async def _read(request: Request, length: int | None, limit: int, memory: BodyMemory, share: BodyShare) -> bytes:
    if length is not None and length > limit:
        raise _too_large(limit)
    longest = min(limit, memory.longest)
    if length is not None and length > longest:
        raise _too_large(longest, f" (the server's {SETTING})")
    covered = SMALL_BYTES if length is None else length
    chunks: list[bytes] = []
    size, more = 0, True
    if covered and not memory.try_take(share, covered):
        if covered <= SMALL_BYTES:
            chunk, more = await _receive(request)
            chunks, size = [chunk], len(chunk)
        if more or not memory.try_take(share, size, complete=True):
            await memory.take(share, covered)
    while more:
        if size > covered:  # chunked: the total size is unknown until the end
            covered = longest
            await memory.take(share, covered)
        chunk, more = await _receive(request)
        size += len(chunk)
        if size > longest:
            raise _too_large(longest)
        chunks.append(chunk)
    return b"".join(chunks)


async def _receive(request: Request) -> tuple[bytes, bool]:
    """Returns the next chunk of the body and whether more follow; raises ClientDisconnect."""
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message.get("body", b""), message.get("more_body", False)


def _too_large(limit: int, setting: str = "") -> SluiceError:
    return SluiceError(
        ErrorKind.TOO_LARGE, f"The request body exceeds the limit of {limit} bytes{setting}.", code="request_too_large"
    )
