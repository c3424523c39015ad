"""The envelope around what a prefill engine hands over, the same for every engine.

It says who made it and for which request, so that a decode worker refuses what is broken, foreign or too old before
its engine sees it, and it carries the prefill's trace context. Layout: magic, header length u32, header as JSON, the
engine's bytes, and xxh3-64 over all of that, little-endian.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from struct import Struct
from typing import get_type_hints

from xxhash import xxh3_64_intdigest

from services.common.errors import SluiceError, invalid
from services.common.hashing import seed_for
from services.common.packing import pack_u32
from services.worker.contract.generation import GenerateRequest, Role

MAGIC = b"SLH1"
TTL_S = 300.0
_LENGTH = Struct("<I")
_SUM = Struct("<Q")


@dataclass(frozen=True, slots=True)
class HandoffHeader:
    """Who handed over what.

    Attributes:
        worker_id: the prefill worker; `epoch` says which of its starts.
        prompt: digest of the prompt's ids, the adapter and the salt.
        issued_unix_ms: when; one that is older than `TTL_S` is stale, whatever it says.
        traceparent: of the prefill's span; empty: not traced.
    """

    request_id: str
    worker_id: str
    epoch: int
    prompt: int
    prompt_tokens: int
    issued_unix_ms: int
    traceparent: str = ""


_KINDS = get_type_hints(HandoffHeader)


def seal(request: GenerateRequest, worker_id: str, epoch: int, traceparent: str, payload: bytes) -> bytes:
    """The envelope of an engine's handoff."""
    header = HandoffHeader(
        request.request_id,
        worker_id,
        epoch,
        _digest(request),
        len(request.token_ids),
        time.time_ns() // 1_000_000,
        traceparent,
    )
    document = json.dumps(asdict(header)).encode()
    body = b"".join((MAGIC, _LENGTH.pack(len(document)), document, payload))
    return body + _SUM.pack(xxh3_64_intdigest(body))


def unseal(data: bytes, request: GenerateRequest) -> tuple[HandoffHeader, bytes]:
    """The header and the engine's bytes.

    Raises:
        SluiceError: INVALID_ARGUMENT with code malformed_handoff, foreign_handoff or stale_handoff.
    """
    header, payload = _read(data)
    if (header.prompt, header.prompt_tokens) != (_digest(request), len(request.token_ids)):
        raise _refused(f"was made for another prompt, of request {header.request_id!r}", "foreign_handoff")
    age_s = time.time() - header.issued_unix_ms / 1000
    if age_s > TTL_S:
        raise _refused(f"is {age_s:.0f} seconds old, and the prefill worker keeps its cache for less", "stale_handoff")
    return header, payload


def opened(request: GenerateRequest) -> tuple[GenerateRequest, str]:
    """The request with its handoff out of the envelope, and the traceparent of the prefill; SluiceError as `unseal`."""
    split = request.disaggregation
    if split is None or split.role is not Role.DECODE or not split.handoff:
        return request, ""
    header, payload = unseal(split.handoff, request)
    return replace(request, disaggregation=replace(split, handoff=payload)), header.traceparent


def _read(data: bytes) -> tuple[HandoffHeader, bytes]:
    body, check = data[: -_SUM.size], data[-_SUM.size :]
    start = len(MAGIC) + _LENGTH.size
    if not body.startswith(MAGIC) or len(body) < start or _SUM.pack(xxh3_64_intdigest(body)) != check:
        raise _refused("is not one of a prefill worker, or was damaged on the way", "malformed_handoff")
    end = start + _LENGTH.unpack_from(body, len(MAGIC))[0]
    try:
        header = HandoffHeader(**json.loads(body[start:end]))
        if any(not isinstance(getattr(header, name), kind) for name, kind in _KINDS.items()):
            raise TypeError
        return header, body[end:]
    except (ValueError, TypeError, RecursionError) as error:
        raise _refused("is of a version that this worker does not know", "malformed_handoff") from error


def _digest(request: GenerateRequest) -> int:
    return xxh3_64_intdigest(pack_u32(request.token_ids), seed_for(request.lora, request.cache_salt))


def _refused(why: str, code: str) -> SluiceError:
    return invalid(f"The handoff {why}; run the prefill again.", param="disaggregation", code=code)
