"""The handoff between SGLang workers: the address at which SGLang transfers the KV cache on its own connection."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

from services.common.base.errors import SluiceError, invalid
from services.common.net.intake.json_intake import foreign_json
from services.worker.contract.generation import Disaggregation, GenerateRequest, Role

ROOM_BITS = 63
FAKE_BOOTSTRAP_HOST = "2.2.2.2"
"""SGLang's placeholder for a missing decode worker: the prefill completes without a transfer."""


@dataclass(frozen=True, slots=True)
class BootstrapInfo:
    """Address of the prefill worker's bootstrap server and the room of one request.

    Attributes:
        sent_tokens: Tokens that the prefill worker has returned to its caller.
    """

    host: str
    port: int
    room: int
    sent_tokens: int = 1

    def pack(self) -> bytes:
        """Returns the handoff for the decode worker."""
        return json.dumps({"host": self.host, "port": self.port, "room": self.room, "told": self.sent_tokens}).encode()

    def fields(self) -> dict[str, Any]:
        """Returns arguments for SGLang's GenerateReqInput."""
        return {"bootstrap_host": self.host, "bootstrap_port": self.port, "bootstrap_room": self.room}


def unpack(handoff: bytes) -> BootstrapInfo:
    """Parses the bytes of `BootstrapInfo.pack`; raises SluiceError(INVALID_ARGUMENT) for anything else."""
    try:
        fields = foreign_json(handoff, "handoff")
        host, port, room = str(fields["host"]), int(fields["port"]), int(fields["room"])
        sent_tokens = int(fields.get("told", 1))
    except (SluiceError, ValueError, TypeError, KeyError) as error:
        raise _malformed("it was not created by an sglang worker") from error
    if not (host and 0 < port < 1 << 16 and 0 <= room < 1 << ROOM_BITS and sent_tokens >= 0):
        raise _malformed("its address is out of range")
    return BootstrapInfo(host, port, room, sent_tokens)


def bootstrap_for(request: GenerateRequest, role: Role, host: str, port: int) -> BootstrapInfo | None:
    """Returns the bootstrap address of a request that is split into prefill and decode; None for role AGGREGATED.

    A caller that sends a room starts both workers at the same time. Otherwise the prefill worker chooses a room and
    returns it before any token, because SGLang's prefill completes only when the decode worker has fetched the cache.
    A request for one token needs no decode worker.

    Args:
        host: Host of this worker's bootstrap server, if it has one.
        port: Port of the same server.

    Raises:
        SluiceError: INVALID_ARGUMENT for an invalid handoff, or a missing one on a decode worker.
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
            "Missing handoff; send an sglang decode worker the prefill worker's handoff, or a bootstrap host, port and "
            "room.",
            param="disaggregation",
        )
    room = secrets.randbits(ROOM_BITS - 1) + 1
    return (
        BootstrapInfo(FAKE_BOOTSTRAP_HOST, port, room)
        if request.stop.max_tokens == 1
        else BootstrapInfo(host, port, room, sent_tokens=0)
    )


def _malformed(what: str) -> SluiceError:
    return invalid(f"Invalid handoff: {what}; run the prefill again.", param="disaggregation")
