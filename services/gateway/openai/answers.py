"""OpenAI answers: the objects of chat completions and completions, whole and as chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from services.common.errors import SluiceError
from services.gateway.generation import Finish, FinishReason
from services.gateway.http.errors import error_body

_FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
}

DONE = b"data: [DONE]\n\n"


def finish_reason(finish: Finish) -> str:
    """OpenAI's word for how a choice ended."""
    return _FINISH_REASONS.get(finish.reason, "stop")


def stop_reason(finish: Finish) -> str | int | None:
    """The stop string or id that was hit, an extension the engines share; None for the model's own end."""
    return finish.stop_string or None


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """The usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class ChatFormat:
    """How a chat completion is written."""

    id_prefix = "chatcmpl-"

    def __init__(self, answer_id: str, created: int, model: str, include_usage: bool) -> None:
        self._head = {"id": answer_id, "created": created, "model": model}
        self._null_usage = b',"usage":null' if include_usage else b""
        head = orjson.dumps({"id": answer_id, "object": "chat.completion.chunk", "created": created, "model": model})
        self._chunk = b"data: " + head[:-1] + b',"choices":[{"index":'

    def opening(self, index: int) -> bytes:
        """The chunk that announces the role."""
        return self._event(index, b'{"role":"assistant","content":""}', b"null")

    def text_affixes(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the JSON string of a text chunk."""
        return (
            b'%b%d,"delta":{"content":' % (self._chunk, index),
            b'},"logprobs":null,"finish_reason":null}]%b}\n\n' % self._null_usage,
        )

    def closing(self, index: int, finish: Finish) -> bytes:
        """The chunk that says how the choice ended."""
        return self._event(
            index, b"{}", orjson.dumps(finish_reason(finish)), b',"stop_reason":' + orjson.dumps(stop_reason(finish))
        )

    def usage_event(self, counts: dict[str, Any]) -> bytes:
        """The last chunk, when usage was asked for."""
        body = {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": counts}
        return b"data: " + orjson.dumps(body) + b"\n\n"

    def whole(self, choices: Sequence[tuple[str, Finish]], counts: dict[str, Any]) -> dict[str, Any]:
        """The answer that is not streamed; `choices` are text and end of each."""
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": index,
                    "message": {"role": "assistant", "content": text, "refusal": None},
                    "logprobs": None,
                    "finish_reason": finish_reason(finish),
                    "stop_reason": stop_reason(finish),
                }
                for index, (text, finish) in enumerate(choices)
            ],
            "usage": counts,
        }

    def _event(self, index: int, delta: bytes, reason: bytes, more: bytes = b"") -> bytes:
        return b'%b%d,"delta":%b,"logprobs":null,"finish_reason":%b%b}]%b}\n\n' % (
            self._chunk,
            index,
            delta,
            reason,
            more,
            self._null_usage,
        )


class CompletionFormat:
    """How a completion is written."""

    id_prefix = "cmpl-"

    def __init__(self, answer_id: str, created: int, model: str, include_usage: bool) -> None:
        self._head = {"id": answer_id, "object": "text_completion", "created": created, "model": model}
        self._null_usage = b',"usage":null' if include_usage else b""
        self._chunk = b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":[{"index":'

    def opening(self, index: int) -> bytes:
        """Completions announce nothing."""
        return b""

    def text_affixes(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the JSON string of a text chunk."""
        return (
            b'%b%d,"text":' % (self._chunk, index),
            b',"logprobs":null,"finish_reason":null}]%b}\n\n' % self._null_usage,
        )

    def closing(self, index: int, finish: Finish) -> bytes:
        """The chunk that says how the choice ended."""
        return b'%b%d,"text":"","logprobs":null,"finish_reason":%b,"stop_reason":%b}]%b}\n\n' % (
            self._chunk,
            index,
            orjson.dumps(finish_reason(finish)),
            orjson.dumps(stop_reason(finish)),
            self._null_usage,
        )

    def usage_event(self, counts: dict[str, Any]) -> bytes:
        """The last chunk, when usage was asked for."""
        return b"data: " + orjson.dumps({**self._head, "choices": [], "usage": counts}) + b"\n\n"

    def whole(self, choices: Sequence[tuple[str, Finish]], counts: dict[str, Any]) -> dict[str, Any]:
        """The answer that is not streamed; `choices` are text and end of each."""
        return {
            **self._head,
            "choices": [
                {
                    "index": index,
                    "text": text,
                    "logprobs": None,
                    "finish_reason": finish_reason(finish),
                    "stop_reason": stop_reason(finish),
                }
                for index, (text, finish) in enumerate(choices)
            ],
            "usage": counts,
        }


Format = ChatFormat | CompletionFormat


def error_event(error: SluiceError) -> bytes:
    """What a stream says when it cannot go on."""
    return b"data: " + orjson.dumps(error_body(error)) + b"\n\n"
