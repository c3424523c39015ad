"""The engine-independent envelope around a prefill engine's handoff.

It identifies the prefill worker and the prompt, so that a decode worker rejects damaged, mismatched or expired handoffs
before they reach its engine, and carries the trace context of the prefill. Layout, little-endian: magic, header length
(u32), JSON header, engine payload, xxh3-64 of all preceding bytes.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from struct import Struct
from typing import get_type_hints

from xxhash import xxh3_64_intdigest

from services.common.base.errors import SluiceError, invalid
from services.common.base.packing import pack_u32
from services.common.net.intake.json_intake import foreign_json
from services.common.types.hashing import seed_for
from services.worker.contract.generation import GenerateRequest, Role

MAGIC = b"SLH1"
TTL_S = 300.0
_LENGTH = Struct("<I")
_CHECKSUM = Struct("<Q")


@dataclass(frozen=True, slots=True)
class HandoffHeader:
    """Identifies a handoff.

    Attributes:
        worker_id: The prefill worker; `epoch` is that worker's epoch.
        prompt: Digest of the prompt's token ids, the adapter and the cache salt.
        issued_unix_ms: Creation time; a handoff older than `TTL_S` is rejected as stale.
        traceparent: W3C trace context of the prefill span; empty if not traced.
    """

    request_id: str
    worker_id: str
    epoch: int
    prompt: int
    prompt_tokens: int
    issued_unix_ms: int
    traceparent: str = ""


_FIELD_TYPES = get_type_hints(HandoffHeader)


def seal(request: GenerateRequest, worker_id: str, epoch: int, traceparent: str, payload: bytes) -> bytes:
    """Returns an engine's handoff in an envelope."""
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
    return body + _CHECKSUM.pack(xxh3_64_intdigest(body))


def unseal(data: bytes, request: GenerateRequest) -> tuple[HandoffHeader, bytes]:
    """Returns the header and the engine payload of an envelope.

    Raises:
        SluiceError: INVALID_ARGUMENT with code malformed_handoff, foreign_handoff or stale_handoff.
    """
    header, payload = _read(data)
    if (header.prompt, header.prompt_tokens) != (_digest(request), len(request.token_ids)):
        raise _rejected(f"is for the prompt of another request ({header.request_id!r})", "foreign_handoff")
    age_s = time.time() - header.issued_unix_ms / 1000
    if age_s > TTL_S:
        raise _rejected(f"is {age_s:.0f} seconds old and has expired after {TTL_S:.0f} seconds", "stale_handoff")
    return header, payload


def opened(request: GenerateRequest) -> tuple[GenerateRequest, str]:
    """Returns the request with its handoff unsealed, and the prefill's traceparent; raises as `unseal`."""
    disaggregation = request.disaggregation
    if disaggregation is None or disaggregation.role is not Role.DECODE or not disaggregation.handoff:
        return request, ""
    header, payload = unseal(disaggregation.handoff, request)
    return replace(request, disaggregation=replace(disaggregation, handoff=payload)), header.traceparent


def _read(data: bytes) -> tuple[HandoffHeader, bytes]:
    body, checksum = data[: -_CHECKSUM.size], data[-_CHECKSUM.size :]
    start = len(MAGIC) + _LENGTH.size
    if not body.startswith(MAGIC) or len(body) < start or _CHECKSUM.pack(xxh3_64_intdigest(body)) != checksum:
        raise _rejected("was not created by a prefill worker or is damaged", "malformed_handoff")
    end = start + _LENGTH.unpack_from(body, len(MAGIC))[0]
    try:
        header = HandoffHeader(**foreign_json(body[start:end], "handoff"))
        if any(not isinstance(getattr(header, name), kind) for name, kind in _FIELD_TYPES.items()):
            raise TypeError
        return header, body[end:]
    except (SluiceError, ValueError, TypeError, RecursionError) as error:
        raise _rejected("has a version that this worker does not support", "malformed_handoff") from error


def _digest(request: GenerateRequest) -> int:
    return xxh3_64_intdigest(pack_u32(request.token_ids), seed_for(request.lora, request.cache_salt))


def _rejected(why: str, code: str) -> SluiceError:
    return invalid(f"The handoff {why}; run the prefill again.", param="disaggregation", code=code)
