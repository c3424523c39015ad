"""Where SGLang's prefill and decode schedulers meet: its own connection carries the cache, we carry the address."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass
from typing import Any

from services.common.errors import SluiceError, invalid
from services.worker.contract.generation import Disaggregation, GenerateRequest, Role

ROOM_BITS = 63
FAKE_BOOTSTRAP_HOST = "2.2.2.2"
"""SGLang's own name for a decode side that does not exist: the prefill side ends by itself."""


@dataclass(frozen=True, slots=True)
class BootstrapInfo:
    """Bootstrap server of the prefill side and the room of one request.

    Attributes:
        told: tokens that the prefill worker has told its caller.
    """

    host: str
    port: int
    room: int
    told: int = 1

    def pack(self) -> bytes:
        """The handoff that travels between workers."""
        return json.dumps(asdict(self)).encode()

    def fields(self) -> dict[str, Any]:
        """Arguments of SGLang's GenerateReqInput."""
        return {"bootstrap_host": self.host, "bootstrap_port": self.port, "bootstrap_room": self.room}


def unpack(handoff: bytes) -> BootstrapInfo:
    """Reads `BootstrapInfo.pack`; SluiceError(INVALID_ARGUMENT) for anything else."""
    try:
        found = json.loads(handoff)
        meeting = BootstrapInfo(str(found["host"]), int(found["port"]), int(found["room"]), int(found.get("told", 1)))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _malformed("it is not from an sglang worker") from error
    if not (meeting.host and 0 < meeting.port < 1 << 16 and 0 <= meeting.room < 1 << ROOM_BITS and meeting.told >= 0):
        raise _malformed("its address is impossible")
    return meeting


def meeting_of(request: GenerateRequest, role: Role, host: str, port: int) -> BootstrapInfo | None:
    """Where a request's two halves meet; None on a worker that plays both.

    A room that the caller names means that it starts both sides at once. Otherwise the prefill side makes one and says
    so at once, before any token: SGLang's prefill ends only when the decode side has fetched the cache. An answer of
    one token needs no other side.

    Args:
        host: of this worker's bootstrap server, where it has one.
        port: of the same.

    Raises:
        SluiceError: INVALID_ARGUMENT for a handoff that cannot be read, or none where one is needed.
    """
    if role is Role.AGGREGATED:
        return None
    given = request.disaggregation or Disaggregation(role)
    if given.handoff and role is Role.DECODE:
        return unpack(given.handoff)
    if given.bootstrap_room:
        if given.bootstrap_room >= 1 << ROOM_BITS:
            raise _malformed("its room is out of range")
        return BootstrapInfo(given.bootstrap_host or host, given.bootstrap_port or port, given.bootstrap_room)
    if role is Role.DECODE:
        raise invalid(
            "A decode worker of sglang needs the handoff of a prefill worker, or a bootstrap host, port and room.",
            param="disaggregation",
        )
    room = secrets.randbits(ROOM_BITS - 1) + 1
    return (
        BootstrapInfo(FAKE_BOOTSTRAP_HOST, port, room)
        if request.stop.max_tokens == 1
        else BootstrapInfo(host, port, room, told=0)
    )


def _malformed(what: str) -> SluiceError:
    return invalid(f"The handoff cannot be used: {what}.", param="disaggregation")
