"""The handoff from a vLLM prefill worker to a decode worker: the first token and the KV connector's parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.base.errors import SluiceError, invalid
from services.common.net.intake.json_intake import foreign_json

FORMAT = "sluice-vllm-1"


@dataclass(frozen=True, slots=True)
class Handoff:
    """Holds the first token and the kv_transfer_params; the latter are empty if the connector finds blocks by token."""

    token_id: int
    transfer: Mapping[str, Any]

    def pack(self) -> bytes:
        """Returns the handoff as bytes."""
        return json.dumps({"format": FORMAT, "token_id": self.token_id, "transfer": dict(self.transfer)}).encode()


def read_handoff(data: bytes) -> Handoff:
    """Parses the bytes of `Handoff.pack`; raises SluiceError(INVALID_ARGUMENT) for anything else."""
    try:
        content = foreign_json(data, "handoff")
    except SluiceError as error:
        raise _malformed() from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _malformed()
    token_id, transfer = content.get("token_id"), content.get("transfer")
    if type(token_id) is not int or not 0 <= token_id < 1 << 32 or not isinstance(transfer, dict):
        raise _malformed()
    return Handoff(token_id, transfer)


def _malformed() -> SluiceError:
    return invalid(
        "The handoff was not created by a vLLM prefill worker; forward that worker's handoff unchanged.",
        param="disaggregation",
    )
