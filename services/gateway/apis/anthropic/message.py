"""Builds the message object and its parts."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Any

import orjson

from services.common.base.sendable_text import sendable_json
from services.gateway.apis.anthropic.call_ids import tool_use_id
from services.gateway.apis.openai.completion_objects import degraded
from services.gateway.core.request import Finish, FinishReason
from services.gateway.operations.output import Counts
from services.gateway.operations.transcript import Block, BlockKind, Transcript


class Signature:
    """The signature of a thinking block: a digest of its text, which is not verified when clients send it back."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, piece: str) -> None:
        """Adds a piece of the text."""
        self._digest.update(piece.encode("utf-8", "surrogatepass"))

    def text(self) -> str:
        """Returns the signature of the text so far."""
        return base64.b64encode(self._digest.digest()).decode()


def usage(counts: Counts) -> dict[str, Any]:
    """Returns the usage object; cached tokens are not part of `input_tokens`."""
    return {
        "input_tokens": counts.prompt - counts.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached,
        "output_tokens": counts.generated,
        "output_tokens_details": {"thinking_tokens": counts.reasoning},
    }


def stop_reason(finish: Finish, clipped: bool) -> str:
    """Returns the stop reason; `clipped`: `max_tokens` was reduced to fit into the context."""
    if finish.reason is FinishReason.LENGTH:
        return "model_context_window_exceeded" if clipped else "max_tokens"
    if finish.reason is FinishReason.TOOL_CALLS:
        return "tool_use"
    return "stop_sequence" if finish.stop_string else "end_turn"


def end_fields(finish: Finish, clipped: bool) -> dict[str, Any]:
    """Returns the fields that report how the turn ended."""
    return {"stop_reason": stop_reason(finish, clipped), "stop_sequence": finish.stop_string or None}


def message_start(message_id: str, model: str, counts: Counts) -> dict[str, Any]:
    """Returns the message object before its first block."""
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


def full_message(
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
    """Returns a completed message.

    Args:
        clipped: `max_tokens` was reduced to fit into the context.
        thinking: include thinking blocks.
        omitted: include thinking blocks without their text.
    """
    shown = blocks if thinking else _without_thinking(blocks)
    return {
        **message_start(message_id, model, counts),
        "content": [_content_block(block, omitted, message_id) for block in shown],
        **end_fields(finish, clipped),
        **degraded(finish),
    }


def _without_thinking(blocks: Sequence[Block]) -> Sequence[Block]:
    """Returns the blocks without thinking; texts that only thinking separated are merged."""
    transcript = Transcript()
    for block in blocks:
        if block.kind is BlockKind.TEXT:
            transcript.add(BlockKind.TEXT, block.text)
        elif block.kind is BlockKind.CALL:
            transcript.blocks.append(block)
    return transcript.blocks


def _content_block(block: Block, omitted: bool, message_id: str) -> dict[str, Any]:
    if block.kind is BlockKind.TEXT:
        return {"type": "text", "text": block.text}
    if block.kind is BlockKind.REASONING:
        signature = Signature()
        signature.add(block.text)
        return {"type": "thinking", "thinking": "" if omitted else block.text, "signature": signature.text()}
    shown_id = tool_use_id(block.call_id, message_id)
    return {"type": "tool_use", "id": shown_id, "name": block.name, "input": _input(block.text)}


def _input(arguments: str) -> dict[str, Any]:
    """Returns the parsed arguments, or `unparsed_arguments` with the text if it is not a JSON object."""
    try:
        parsed = orjson.loads(sendable_json(arguments) or "{}")
    except orjson.JSONDecodeError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {"unparsed_arguments": arguments}
