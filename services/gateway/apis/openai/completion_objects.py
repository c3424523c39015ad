"""Builds the response objects of chat completions and completions, and their stream chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from services.common.base.errors import SluiceError
from services.gateway.core.request import Finish, FinishReason
from services.gateway.http.errors import error_body
from services.gateway.operations.logprobs import Naming, TokenText, chat_logprobs, completion_logprobs
from services.gateway.operations.output import Counts

_FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
}

DONE = b"data: [DONE]\n\n"


def finish_reason(finish: Finish) -> str:
    """Returns OpenAI's finish reason of a choice."""
    return _FINISH_REASONS.get(finish.reason, "stop")


def stop_reason(finish: Finish) -> str | int | None:
    """Returns the stop string or token id that ended the choice, or None; an extension of the engines."""
    return finish.stop_string or finish.stop_token_id


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A completed tool call; `arguments` is JSON text as the model generated it."""

    id: str
    name: str
    arguments: str

    def as_dict(self) -> dict[str, Any]:
        """Returns OpenAI's tool call object."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class CompletedChoice:
    """A completed choice."""

    text: str
    finish: Finish
    reasoning: str = ""
    calls: Sequence[ToolCall] = ()
    logprobs: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # requested extension fields


class Detail(NamedTuple):
    """Extra fields of a chunk, as JSON.

    Attributes:
        logprobs: the `logprobs` of the choice.
        of_choice: further fields of the choice, each after a comma.
        of_chunk: further fields of the chunk, each after a comma; None for the default `usage`.
    """

    logprobs: bytes = b"null"
    of_choice: bytes = b""
    of_chunk: bytes | None = None


PLAIN = Detail()


def degraded(finish: Finish) -> dict[str, Any]:
    """Returns extension fields that report fallbacks, migrations and, on request, the route; empty without any."""
    fields: dict[str, Any] = {"degraded": list(finish.degraded)} if finish.degraded else {}
    if finish.migrations:
        fields["migrations"] = finish.migrations
    if finish.receipt is not None:
        fields["route"] = finish.receipt
    return fields


def usage(counts: Counts) -> dict[str, Any]:
    """Returns the usage object."""
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.generated,
        "total_tokens": counts.prompt + counts.generated,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
        "completion_tokens_details": {"reasoning_tokens": counts.reasoning},
    }


class Format(ABC):
    """Formats responses, and the chunks of streamed ones.

    Attributes:
        id_prefix: prefix of completion ids.
        prompt_in_choice: whether fields about the prompt are in each choice instead of in the response.
        null_usage: the `usage` field of chunks without counts.
    """

    id_prefix: str
    prompt_in_choice: bool
    _response_object: str
    _chunk_object: str
    _role: bytes  # output of the first chunk; empty: none
    _no_output: bytes
    _choice_details: tuple[str, ...]  # fields of a collected choice that are null unless requested
    _response_details: tuple[str, ...]  # likewise, of the response

    def __init__(self, completion_id: str, created: int, model: str, include_usage: bool) -> None:
        self.null_usage = b',"usage":null' if include_usage else b""
        self._head = {"id": completion_id, "object": self._response_object, "created": created, "model": model}
        self._chunk_head = {**self._head, "object": self._chunk_object}
        self._chunk = b"data: " + orjson.dumps(self._chunk_head)[:-1] + b',"choices":[{"index":'

    @abstractmethod
    def logprobs(self, tokens: Sequence[TokenText], naming: Naming) -> dict[str, Any]:
        """Returns the `logprobs` of a choice, or of a piece of it."""

    @abstractmethod
    def _text(self, piece: bytes) -> bytes:
        """Returns the output of a chunk of text; `piece` is a JSON string."""

    @abstractmethod
    def _reasoning(self, piece: bytes) -> bytes:
        """Returns the output of a chunk of reasoning; `piece` is a JSON string."""

    @abstractmethod
    def _call(self, call: int, call_id: str, name: str, arguments: str) -> bytes:
        """Returns the output of a chunk of a tool call."""

    @abstractmethod
    def _output(self, choice: CompletedChoice) -> dict[str, Any]:
        """Returns the fields of a choice with its output."""

    def role_chunk(self, index: int, detail: Detail = PLAIN) -> bytes:
        """Returns the first chunk, which contains the role; empty where there are no roles."""
        return self._event(index, self._role, detail) if self._role else b""

    def text_affixes(self, index: int) -> tuple[bytes, bytes]:
        """Returns the bytes before and after the JSON string of a text chunk."""
        before, after = self._event(index, self._text(b"\0"), PLAIN).split(b"\0")
        return before, after

    def text(self, index: int, text: str, detail: Detail = PLAIN) -> bytes:
        """Returns a text chunk with details."""
        return self._event(index, self._text(orjson.dumps(text)), detail)

    def reasoning(self, index: int, text: str, detail: Detail = PLAIN) -> bytes:
        """Returns a chunk of reasoning."""
        return self._event(index, self._reasoning(orjson.dumps(text)), detail)

    def tool_call(
        self, index: int, call: int, call_id: str, name: str, arguments: str, detail: Detail = PLAIN
    ) -> bytes:
        """Returns a chunk of a tool call; only the first chunk of a call has its id and name."""
        return self._event(index, self._call(call, call_id, name, arguments), detail)

    def finish_chunk(self, index: int, finish: Finish, detail: Detail = PLAIN) -> bytes:
        """Returns the chunk with the finish reason."""
        reason = orjson.dumps(finish_reason(finish))
        extra = orjson.dumps({"stop_reason": stop_reason(finish), **degraded(finish)})
        return self._event(index, self._no_output, detail, reason, b"," + extra[1:-1])

    def usage_event(self, counts: dict[str, Any]) -> bytes:
        """Returns the usage chunk, the last one of a stream."""
        return b"data: " + orjson.dumps({**self._chunk_head, "choices": [], "usage": counts}) + b"\n\n"

    def full_response(
        self, choices: Sequence[CompletedChoice], counts: dict[str, Any], extra: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the response object; `extra` are requested extension fields."""
        return {
            **self._head,
            "choices": [
                {
                    "index": index,
                    **self._output(choice),
                    "logprobs": choice.logprobs,
                    "finish_reason": finish_reason(choice.finish),
                    "stop_reason": stop_reason(choice.finish),
                    **degraded(choice.finish),
                    **dict.fromkeys(self._choice_details),
                    **choice.extra,
                }
                for index, choice in enumerate(choices)
            ],
            "usage": counts,
            **dict.fromkeys(self._response_details),
            **(extra or {}),
        }

    def _event(self, index: int, output: bytes, detail: Detail, reason: bytes = b"null", extra: bytes = b"") -> bytes:
        return b'%b%d,%b,"logprobs":%b,"finish_reason":%b%b%b}]%b}\n\n' % (
            self._chunk,
            index,
            output,
            detail.logprobs,
            reason,
            extra,
            detail.of_choice,
            self.null_usage if detail.of_chunk is None else detail.of_chunk,
        )


class ChatFormat(Format):
    """Formats chat completions."""

    id_prefix = "chatcmpl-"
    _choice_details, _response_details = ("token_ids",), ("prompt_token_ids", "prompt_logprobs")
    prompt_in_choice = False
    _response_object, _chunk_object = "chat.completion", "chat.completion.chunk"
    _role, _no_output = b'"delta":{"role":"assistant","content":""}', b'"delta":{}'

    def logprobs(self, tokens: Sequence[TokenText], naming: Naming) -> dict[str, Any]:
        """See Format."""
        return chat_logprobs(tokens, naming)

    def _text(self, piece: bytes) -> bytes:
        return b'"delta":{"content":%b}' % piece

    def _reasoning(self, piece: bytes) -> bytes:
        return b'"delta":{"reasoning_content":%b,"reasoning":%b}' % (piece, piece)  # clients use either name

    def _call(self, call: int, call_id: str, name: str, arguments: str) -> bytes:
        piece: dict[str, Any] = {"index": call}
        if name:
            piece |= {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        else:
            piece["function"] = {"arguments": arguments}
        return b'"delta":' + orjson.dumps({"tool_calls": [piece]})

    def _output(self, choice: CompletedChoice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        message |= {"reasoning_content": choice.reasoning or None, "reasoning": choice.reasoning or None}
        if choice.calls:
            message |= {"content": choice.text or None, "tool_calls": [call.as_dict() for call in choice.calls]}
        return {"message": message}


class CompletionFormat(Format):
    """Formats completions, whose output is not parsed: all of it is text."""

    id_prefix = "cmpl-"
    _choice_details, _response_details = ("token_ids", "prompt_token_ids", "prompt_logprobs"), ()
    prompt_in_choice = True
    _response_object = _chunk_object = "text_completion"
    _role, _no_output = b"", b'"text":""'

    def logprobs(self, tokens: Sequence[TokenText], naming: Naming) -> dict[str, Any]:
        """See Format."""
        return completion_logprobs(tokens, naming)

    def _text(self, piece: bytes) -> bytes:
        return b'"text":%b' % piece

    def _reasoning(self, piece: bytes) -> bytes:
        return self._text(piece)

    def _call(self, call: int, call_id: str, name: str, arguments: str) -> bytes:
        return self._text(orjson.dumps(arguments))

    def _output(self, choice: CompletedChoice) -> dict[str, Any]:
        return {"text": choice.text}


def error_event(error: SluiceError) -> bytes:
    """Returns the error event of a stream."""
    return b"data: " + orjson.dumps(error_body(error)) + b"\n\n"
