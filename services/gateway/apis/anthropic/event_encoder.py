"""Encodes a message as the server-sent events of Anthropic's API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import orjson

from services.common.base.errors import SluiceError
from services.gateway.apis.anthropic.call_ids import tool_use_id
from services.gateway.apis.anthropic.message import Signature, end_fields, message_start, usage
from services.gateway.apis.openai.completion_objects import degraded
from services.gateway.core.request import Finish
from services.gateway.operations.logprobs import TokenText
from services.gateway.operations.output import Counts
from services.gateway.operations.transcript import BlockKind

_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessageEventEncoder:
    """See EventEncoder.

    Args:
        error_body: returns the body of an error event.
        clipped: `max_tokens` was reduced to fit into the context.
        thinking: include thinking blocks.
        omitted: include thinking blocks without their text.
    """

    def __init__(
        self,
        message_id: str,
        model: str,
        error_body: Callable[[SluiceError], dict[str, Any]],
        *,
        clipped: bool,
        thinking: bool,
        omitted: bool,
    ) -> None:
        self._message_id = message_id
        self._model = model
        self._error_body = error_body
        self._clipped = clipped
        self._thinking = thinking
        self._omitted = omitted
        self._index = -1
        self._kind: BlockKind | None = None  # of the open block
        self._before = self._after = b""  # the bytes around a piece of the open block
        self._signature = Signature()

    def opening(self, counts: Counts) -> bytes:
        """See EventEncoder; omits counts of generated tokens, which may be ahead of the text that is written."""
        before = replace(counts, generated=0, reasoning=0)
        return _event("message_start", message=message_start(self._message_id, self._model, before))

    def text(self, piece: str, tokens: Sequence[TokenText]) -> bytes:
        """See EventEncoder."""
        events = b""
        if self._kind is not BlockKind.TEXT:
            events = self._begin(BlockKind.TEXT, {"type": "text", "text": ""}, "text_delta", "text")
        return events + self._piece(piece)

    def reasoning(self, piece: str) -> bytes:
        """See EventEncoder."""
        if not self._thinking:
            return b""
        events = b""
        if self._kind is not BlockKind.REASONING:
            block = {"type": "thinking", "thinking": "", "signature": ""}
            events = self._begin(BlockKind.REASONING, block, "thinking_delta", "thinking")
            self._signature = Signature()
        self._signature.add(piece)
        return events if self._omitted else events + self._piece(piece)

    def call(self, call: int, call_id: str, name: str, arguments: str) -> bytes:
        """See EventEncoder."""
        events = b""
        if name:
            shown_id = tool_use_id(call_id, self._message_id)
            block = {"type": "tool_use", "id": shown_id, "name": name, "input": {}}
            events = self._begin(BlockKind.CALL, block, "input_json_delta", "partial_json")
        return events + self._piece(arguments)

    def closing(self, finish: Finish, counts: Counts) -> bytes:
        """See EventEncoder."""
        delta = _event(
            "message_delta", delta=end_fields(finish, self._clipped), usage=usage(counts), **degraded(finish)
        )
        return self._end() + delta + _event("message_stop")

    def failure(self, error: SluiceError, counts: Counts) -> bytes:
        """See EventEncoder."""
        return b"event: error\ndata: %b\n\n" % orjson.dumps(self._error_body(error))

    def silence(self) -> bytes:
        """See EventEncoder."""
        return _PING

    def _begin(self, kind: BlockKind, block: dict[str, Any], delta: str, name: str) -> bytes:
        events = self._end()
        self._index += 1
        self._kind = kind
        head = f'"index":{self._index},"delta":{{"type":"{delta}","{name}":'
        self._before = b'event: content_block_delta\ndata: {"type":"content_block_delta",' + head.encode()
        self._after = b"}}\n\n"
        events += _event("content_block_start", index=self._index, content_block=block)
        return events if self._index else events + _PING

    def _piece(self, piece: str) -> bytes:
        return self._before + orjson.dumps(piece) + self._after

    def _end(self) -> bytes:
        kind, self._kind = self._kind, None
        if kind is None:
            return b""
        events = b""
        if kind is BlockKind.REASONING:
            delta_fields = {"type": "signature_delta", "signature": self._signature.text()}
            events = _event("content_block_delta", index=self._index, delta=delta_fields)
        return events + _event("content_block_stop", index=self._index)


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))
