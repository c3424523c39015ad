"""Answers: lines of JSON as the text arrives, or one object."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from sluice.apis import Block, BlockKind, Counts, Finish, FinishReason, SluiceError, TokenText

LINES = "application/x-ndjson"


def _message(text: str = "", thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = list(calls)
    return message


def _object(model: str, message: dict[str, Any], **rest: Any) -> dict[str, Any]:
    created_at = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return {"model": model, "created_at": created_at, "message": message, **rest}


def _end(finish: Finish, counts: Counts) -> dict[str, Any]:
    reason = "length" if finish.reason is FinishReason.LENGTH else "stop"
    return {
        "done": True,
        "done_reason": reason,
        "prompt_eval_count": counts.prompt,
        "eval_count": counts.generated,
    }


def _call(name: str, arguments: str) -> dict[str, Any]:
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:  # the model generated no JSON
        value = {"arguments": arguments}
    return {"function": {"name": name, "arguments": value}}


def whole_answer(model: str, blocks: Sequence[Block], finish: Finish, counts: Counts) -> dict[str, Any]:
    """Returns the answer of a request that is not streamed."""

    def joined(kind: BlockKind) -> str:
        return "".join(piece for block in blocks if block.kind is kind for piece in block.pieces)

    calls = [_call(block.name, "".join(block.pieces)) for block in blocks if block.kind is BlockKind.CALL]
    message = _message(joined(BlockKind.TEXT), joined(BlockKind.REASONING), calls)
    return _object(model, message, **_end(finish, counts))


class ChatLines:
    """Encodes a chat as lines of JSON, a call as one line; see sluice.apis.EventEncoder.

    Args:
        model: the name that the client sent.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._call_name = ""
        self._arguments: list[str] = []

    def opening(self, counts: Counts) -> bytes:
        """Returns nothing: the first line has the first text."""
        return b""

    def text(self, piece: str, tokens: Sequence[TokenText]) -> bytes:
        """Returns a line with a piece of text."""
        return self._close_call() + self._line(_message(piece))

    def reasoning(self, piece: str) -> bytes:
        """Returns a line with a piece of thinking."""
        return self._close_call() + self._line(_message(thinking=piece))

    def call(self, call: int, call_id: str, name: str, arguments: str) -> bytes:
        """Holds the call back until it is complete; returns the line of the one before."""
        lines = b""
        if name:
            lines = self._close_call()
            self._call_name = name
        self._arguments.append(arguments)
        return lines

    def closing(self, finish: Finish, counts: Counts) -> bytes:
        """Returns the last line."""
        return self._close_call() + orjson.dumps(_object(self._model, _message(), **_end(finish, counts))) + b"\n"

    def failure(self, error: SluiceError, counts: Counts) -> bytes:
        """Returns the line of an error in the middle of the stream."""
        return orjson.dumps({"error": error.message}) + b"\n"

    def silence(self) -> bytes:
        """Returns a line without text."""
        return self._line(_message())

    def _close_call(self) -> bytes:
        if not self._call_name:
            return b""
        call = _call(self._call_name, "".join(self._arguments))
        self._call_name = ""
        self._arguments.clear()
        return self._line(_message(calls=[call]))

    def _line(self, message: dict[str, Any]) -> bytes:
        return orjson.dumps(_object(self._model, message, done=False)) + b"\n"
