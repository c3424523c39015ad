"""What a prefill worker hands to a decode worker: the first token, and what the engine's KV connector said."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.errors import SluiceError, invalid

FORMAT = "sluice-vllm-1"


@dataclass(frozen=True, slots=True)
class Handoff:
    """`transfer` are the engine's kv_transfer_params, empty where its connector finds blocks by their tokens."""

    token_id: int
    transfer: Mapping[str, Any]

    def pack(self) -> bytes:
        """As it travels."""
        return json.dumps({"format": FORMAT, "token_id": self.token_id, "transfer": dict(self.transfer)}).encode()


def read_handoff(data: bytes) -> Handoff:
    """The other way round; SluiceError(INVALID_ARGUMENT) when the bytes are not from a prefill worker like this."""
    try:
        content = json.loads(data)
    except ValueError as error:
        raise _malformed() from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _malformed()
    token_id, transfer = content.get("token_id"), content.get("transfer")
    if type(token_id) is not int or not 0 <= token_id < 1 << 32 or not isinstance(transfer, dict):
        raise _malformed()
    return Handoff(token_id, transfer)


def _malformed() -> SluiceError:
    return invalid(
        "The handoff is not one of a vLLM prefill worker; pass on what that worker gave.", param="disaggregation"
    )
