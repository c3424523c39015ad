"""Converts a generation to the body of an OpenAI request, and the chunks of the response to text and tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from services.common.base.errors import ErrorKind, SluiceError, internal, invalid
from services.common.net.intake.json_intake import foreign_json
from services.postprocess.parsers.events import CallArguments, CallStart, Content, Event, Reasoning
from services.worker.contract.capabilities import Capability
from services.worker.contract.delta_stream import DeltaStream
from services.worker.contract.generation import FinishReason, GenerateRequest, Usage
from services.worker.contract.text_delta import TextUpdate
from services.worker.engines.http.client import error_of
from services.worker.engines.http.dialect import incomplete

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CAPABILITIES = frozenset(
    {
        Capability.TEXT,
        Capability.MESSAGES,
        Capability.TEXT_OUT,
        Capability.GUIDED_JSON,
        Capability.TEMPERATURE,
        Capability.TOP_P,
        Capability.FREQUENCY_PENALTY,
        Capability.PRESENCE_PENALTY,
        Capability.SEED,
        Capability.ENGINE_OPTIONS,
    }
)
"""The common part of the servers; fields of a single server can be passed as engine options."""
MAX_CALLS = 1_024
"""Tool calls of a stream of an OpenAI server; with more its request fails with INTERNAL."""
FORWARDED = ("messages", "tools", "tool_choice", "chat_template_kwargs")
_SAMPLING = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed")
_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "tool_calls": FinishReason.STOP,
    "function_call": FinishReason.STOP,
}


def path_and_body(request: GenerateRequest, model: str) -> tuple[str, dict[str, Any]]:
    """Returns the path and body of a request.

    Args:
        model: name of the model on the server.

    Raises:
        SluiceError: INVALID_ARGUMENT for a prompt or an option that this API does not have.
    """
    if request.messages_json is None and request.text is None:
        raise invalid("This engine takes text and messages, not token ids.", param="prompt")
    body: dict[str, Any] = dict(request.sampling.engine_options or {})
    body |= {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    body |= {name: value for name in _SAMPLING if (value := getattr(request.sampling, name)) is not None}
    if request.stop.max_tokens is not None:
        body["max_tokens"] = request.stop.max_tokens
    options = request.text_out
    if options is not None and options.stop:
        if options.include_stop_string:
            raise invalid("This engine omits stop strings; remove include_stop_str_in_output.", param="stop")
        body["stop"] = list(options.stop)
    if request.text is not None:
        return COMPLETIONS, body | {"prompt": request.text} | _format(request, None)
    chat = _chat(request.messages_json or b"")
    if options is not None and options.single_tool_call and chat.get("tools"):
        body["parallel_tool_calls"] = False
    return CHAT, body | chat | _format(request, chat.get("tool_choice"))


def _chat(document: bytes) -> dict[str, Any]:
    chat = foreign_json(document, "messages_json")
    for name in ("chat_template", "documents", "continue_final_message"):
        if chat.get(name):
            raise invalid(f"This engine renders prompts by itself; remove {name}.", param=name)
    return {name: chat[name] for name in FORWARDED if chat.get(name) is not None}


def _format(request: GenerateRequest, tool_choice: Any) -> dict[str, Any]:
    """Returns the constraint; the server itself enforces a tool choice that requires a call."""
    guided = request.guided
    if guided is None or tool_choice not in (None, "none", "auto"):
        return {}
    if guided.kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    schema = {"name": "response", "schema": orjson.loads(str(guided.grammar)), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


class ChunkReader:
    """Reads the chunks of one response into a stream of deltas; usage is the server's own.

    Attributes:
        ended: whether the stream has finished.
    """

    def __init__(self, stream: DeltaStream) -> None:
        self._stream = stream
        self._began = False
        self._calls: set[int] = set()
        self._reason: FinishReason | None = None
        self._usage: Usage | None = None
        self._pieces = 0
        self.ended = False

    def take(self, chunk: Mapping[str, Any]) -> None:
        """Processes one chunk; raises SluiceError for an error that the server reports or a malformed chunk."""
        try:
            self._take(chunk)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise internal("The engine's server sent a malformed chunk.") from error

    def close(self) -> None:
        """Ends the generation; raises SluiceError when the server sent no finish reason."""
        if self._reason is None:
            raise incomplete()
        self._begin()
        self._stream.finish(self._reason, self._usage or Usage(0, self._pieces, None))
        self.ended = True

    @property
    def finishing(self) -> bool:
        """Whether the finish reason has arrived."""
        return self._reason is not None

    def _take(self, chunk: Mapping[str, Any]) -> None:
        if error := chunk.get("error"):
            code = error.get("code") if isinstance(error, dict) else None
            message = error.get("message") if isinstance(error, dict) else error
            raise error_of(code if isinstance(code, int) else 500, str(message or ""))
        for choice in chunk.get("choices") or ():
            events = list(self._events(choice.get("delta") or {"content": choice.get("text")}))
            if events:
                self._begin()
                self._pieces += 1
                self._stream.push_text(TextUpdate(events))
            if reason := choice.get("finish_reason"):
                if reason not in _REASONS:
                    raise _filtered(str(reason))
                self._reason = _REASONS[reason]
        if usage := chunk.get("usage"):
            details = usage.get("prompt_tokens_details") or {}
            prompt, completion = (max(int(usage.get(name) or 0), 0) for name in ("prompt_tokens", "completion_tokens"))
            cached = details.get("cached_tokens")
            self._usage = Usage(prompt, completion, None if cached is None else max(int(cached), 0))

    def _begin(self) -> None:
        if not self._began:
            self._began = True
            self._stream.begin(None)

    def _events(self, delta: Mapping[str, Any]) -> list[Event]:
        events: list[Event] = []
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            events.append(Reasoning(str(reasoning)))
        if content := delta.get("content"):
            events.append(Content(str(content)))
        for position, call in enumerate(delta.get("tool_calls") or ()):
            index = int(call.get("index") if call.get("index") is not None else position)
            if not 0 <= index < MAX_CALLS:
                raise ValueError("index of a tool call")
            function = call.get("function") or {}
            if index not in self._calls:
                self._calls.add(index)
                events.append(CallStart(index, str(call.get("id") or ""), str(function.get("name") or "")))
            if arguments := function.get("arguments"):
                events.append(CallArguments(index, str(arguments)))
        return events


def _filtered(reason: str) -> SluiceError:
    if reason == "content_filter":
        return SluiceError(
            ErrorKind.INVALID_ARGUMENT, "The engine's server filtered the output.", code="content_filter"
        )
    return internal("The engine's server failed on this request.")
