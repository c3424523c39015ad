"""Request bodies: bounded in size, time and memory, and JSON."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope

from services.common.errors import ErrorKind, SluiceError, invalid
from services.gateway.admission import permit
from services.gateway.http.body_memory import SETTING, SMALL_BYTES, BodyMemory, BodyShare
from services.gateway.http.json_size import measured_size, parsed_size

MAX_DEPTH = 200
MEASURED_FROM = 16 << 10
"""Bytes of objects, roughly counted, from which on they are measured."""

_SHARE_KEY = "sluice.body"
_OF_FORMS = ("text/plain", "application/x-www-form-urlencoded", "multipart/")


async def read_json(request: Request, limit: int, timeout_s: float, memory: BodyMemory | None = None) -> dict[str, Any]:
    """The body as a JSON object; `release_body` gives its memory back.

    Args:
        limit: most bytes.
        timeout_s: longest wait for memory, and then for all of the body.
        memory: of all bodies; None for a body that shares with no other.

    Raises:
        SluiceError: TOO_LARGE, UNAVAILABLE when there is no memory for it, CANCELLED, PERMISSION_DENIED for a model
            that the key may not use, or INVALID_ARGUMENT for anything that is no JSON object.
        HTTPException: 408 when it does not arrive in time, 415 when it is compressed or sent as a form.
    """
    _check_kind(request)
    memory = memory or BodyMemory(4 * limit)
    share = request.scope[_SHARE_KEY] = BodyShare(memory)
    body = await _read_in_time(request, limit, timeout_s, memory, share)
    size = parsed_size(body)
    memory.check(size)
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid(f"The request body is not valid JSON: {error.msg} at character {error.pos}.") from None
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and not _can_be_written(parsed):
        raise invalid("The request body is nested too deep.")
    if not isinstance(parsed, dict):
        raise invalid("The request body must be a JSON object.")
    model = parsed.get("model")
    if isinstance(model, str):
        permit.current().check_model(model)
    share.resize(size if size < MEASURED_FROM else measured_size(parsed) or size)
    return parsed


def release_body(scope: Scope) -> None:
    """Gives back the memory of a request's body, if it had one that was read."""
    share: BodyShare | None = scope.pop(_SHARE_KEY, None)
    if share is not None:
        share.release()


def _check_kind(request: Request) -> None:
    # Nothing is ever unpacked here, so a small body cannot become a large one.
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise HTTPException(415, "The request body is compressed; send it as it is, without content-encoding.")
    # Browsers send these types to other sites without asking them first, so a page could use a gateway that trusts its
    # network. All other types need a permission that the gateway never gives.
    kind = request.headers.get("content-type", "").strip().lower()
    if kind.startswith(_OF_FORMS):
        raise HTTPException(415, 'The request body is not declared as JSON; send "content-type: application/json".')


def _can_be_written(parsed: Any) -> bool:
    """Parts of the body are passed on as JSON, and what can be read may be too deep for that."""
    try:
        orjson.dumps(parsed)
    except orjson.JSONEncodeError:
        return False
    return True


async def _read_in_time(request: Request, limit: int, timeout_s: float, memory: BodyMemory, share: BodyShare) -> bytes:
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            share.deadline = deadline
            body = await _read(request, limit, timeout_s, memory, share)
    except TimeoutError:
        share.release()
        if share.lost or share.waiting:
            raise memory.refuse() from None
        raise HTTPException(408, f"The request body did not arrive within {timeout_s:g} s.") from None
    except ClientDisconnect:
        raise SluiceError(ErrorKind.CANCELLED, "The client went away before the body was complete.") from None
    memory.arrived(share)
    return body


async def _read(request: Request, limit: int, timeout_s: float, memory: BodyMemory, share: BodyShare) -> bytes:
    announced = request.headers.get("content-length", "")
    length = int(announced) if announced.isdigit() else None if "transfer-encoding" in request.headers else 0
    if length is not None and length > limit:
        raise _too_large(limit)
    longest = min(limit, memory.longest)
    if length is not None and length > longest:
        raise _too_large(longest, f" (the server's {SETTING})")
    if length != 0:
        await _take(SMALL_BYTES if length is None else length, timeout_s, memory, share)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > longest:
            raise _too_large(longest)
        if length is None and size - len(chunk) <= SMALL_BYTES < size:
            await _take(longest, timeout_s, memory, share)  # nobody can tell how long it will be
        chunks.append(chunk)
    return b"".join(chunks)


async def _take(length: int, timeout_s: float, memory: BodyMemory, share: BodyShare) -> None:
    """Waits for memory; the time to read the body begins after that."""
    if await memory.take(share, length) and share.deadline is not None:
        share.deadline.reschedule(asyncio.get_running_loop().time() + timeout_s)


def _too_large(limit: int, setting: str = "") -> SluiceError:
    return SluiceError(
        ErrorKind.TOO_LARGE, f"The request body is over the limit of {limit} bytes{setting}.", code="request_too_large"
    )
