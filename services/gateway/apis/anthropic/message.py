"""The message object, whole and its parts."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Any

import orjson

from services.gateway.apis.common.transcript import Block, Counts, Kind, Transcript
from services.gateway.apis.openai.completion_objects import degraded
from services.gateway.core.request import Finish, FinishReason


class Signature:
    """What a thinking block is signed with: a digest of its text, which nobody checks when it comes back."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, piece: str) -> None:
        """The next of the text."""
        self._digest.update(piece.encode("utf-8", "surrogatepass"))

    def text(self) -> str:
        """The signature of all of it."""
        return base64.b64encode(self._digest.digest()).decode()


def usage(counts: Counts) -> dict[str, Any]:
    """The usage object: input tokens are those that came from no cache."""
    return {
        "input_tokens": counts.prompt - counts.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached,
        "output_tokens": counts.generated,
        "output_tokens_details": {"thinking_tokens": counts.reasoning},
    }


def stop_reason(finish: Finish, clipped: bool) -> str:
    """Anthropic's word for how a turn ended; `clipped`: less fits into the context than `max_tokens`."""
    if finish.reason is FinishReason.LENGTH:
        return "model_context_window_exceeded" if clipped else "max_tokens"
    if finish.reason is FinishReason.TOOL_CALLS:
        return "tool_use"
    return "stop_sequence" if finish.stop_string else "end_turn"


def ending(finish: Finish, clipped: bool) -> dict[str, Any]:
    """How the turn ended."""
    return {"stop_reason": stop_reason(finish, clipped), "stop_sequence": finish.stop_string or None}


def begun(message_id: str, model: str, counts: Counts) -> dict[str, Any]:
    """A message before anything is said."""
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage(counts), "service_tier": "standard"},
    }


def whole(
    message_id: str,
    model: str,
    blocks: Sequence[Block],
    finish: Finish,
    counts: Counts,
    *,
    clipped: bool,
    thinking: bool,
    omitted: bool,
) -> dict[str, Any]:
    """A message that is answered at once.

    Args:
        thinking: the client wants to hear of it.
        omitted: it wants to hear that there was some, but not what.
    """
    told = blocks if thinking else _without_thinking(blocks)
    return {
        **begun(message_id, model, counts),
        "content": [_shown(block, omitted) for block in told],
        **ending(finish, clipped),
        **degraded(finish),
    }


def _without_thinking(blocks: Sequence[Block]) -> Sequence[Block]:
    """Texts between which there was nothing but thinking are one text."""
    told = Transcript()
    for block in blocks:
        if block.kind is Kind.TEXT:
            told.add(Kind.TEXT, block.said)
        elif block.kind is Kind.CALL:
            told.blocks.append(block)
    return told.blocks


def _shown(block: Block, omitted: bool) -> dict[str, Any]:
    if block.kind is Kind.TEXT:
        return {"type": "text", "text": block.said, "citations": None}
    if block.kind is Kind.REASONING:
        signature = Signature()
        signature.add(block.said)
        return {"type": "thinking", "thinking": "" if omitted else block.said, "signature": signature.text()}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input(block.said)}


def _input(arguments: str) -> dict[str, Any]:
    """What a model wrote that is no JSON object (it was cut off, say) is kept as it is, under a name of its own."""
    try:
        parsed = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {"unparsed_arguments": arguments}
