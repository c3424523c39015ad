"""Parser of Harmony, the format of gpt-oss: messages on the channels analysis, commentary and final.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
    <|message|>{…}<|call|>

Analysis is reasoning, a message to `functions.NAME` or to a tool of the request is a tool call, everything else is
content.
"""

from __future__ import annotations

import re

from services.postprocess.parsers.base import Parser, ParserContext
from services.postprocess.parsers.calls.call_names import NOT_CHOSEN, Calls, Named
from services.postprocess.parsers.calls.parser import INCOMPLETE, MALFORMED, REPAIRED
from services.postprocess.parsers.events import CallArguments, Content, Degraded, Event, PlainKind, Reasoning
from services.postprocess.parsers.families.family import EngineNames, Family
from services.postprocess.parsers.scanning.json_scan import JsonValue, Malformed, skip_spaces
from services.postprocess.parsers.scanning.markers import PIECE_CHARS, Markers, WhitespaceBuffer, pieces_of

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MAX_HEADER = 512
"""Characters of a message's header; after them the message is text, reported in `degraded`."""
UNKNOWN_HEADER = "harmony_header_missing"

_FUNCTIONS = "functions."
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*([A-Za-z]+)").search
_RECIPIENT = re.compile(r"\bto=([^\s<]+)").search
_IN_HEADER = Markers(MESSAGE, START, *ENDS)
_HEADER_PARTS = re.compile(
    rf"\s+|\bassistant\b|{re.escape(CHANNEL)}\s*[A-Za-z]+|\bto=[^\s<]+|{re.escape(CONSTRAIN)}\s*(?i:json|code|text)?|\b(?:json|code|text)\b"
)
_IN_MESSAGE = Markers(START, *ENDS)

_HEADER, _CONTENT, _REASONING, _CALL, _BETWEEN = range(5)


class HarmonyParser(Parser):
    """Parses content, reasoning and calls of gpt-oss.

    Args:
        context: of the stream.
        calls: return tool calls as events; False: return them as content.
    """

    markers = frozenset((START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS))

    def __init__(self, context: ParserContext, calls: bool = True) -> None:
        super().__init__(context)
        self._emits_calls = calls
        self._calls = Calls(context, markers=self.markers)
        self._index = -1
        self._empty = True  # the current call has no arguments yet
        self._value: JsonValue | None = None
        self._buffer = ""
        self._gate = WhitespaceBuffer()  # for the text between messages
        self._state = _HEADER
        self._may_be_constrained = context.guided  # the output may be constrained from its first character on
        _, begun, header = context.prompt_tail.rpartition(START)
        self._from_prompt = self._header = header if begun else ""  # the prompt may contain the beginning of the header
        if self._header.endswith(MESSAGE):
            self._enter([])

    def feed(self, text: str) -> list[Event]:
        if len(text) > PIECE_CHARS:
            return [event for piece in pieces_of(text) for event in self.feed(piece)]
        self._buffer += text
        events: list[Event] = []
        while self._buffer and self._step(events):
            pass
        self.reasoning = self._state == _REASONING
        return events

    def plain(self, text: str) -> PlainKind:
        if self._buffer or self._state not in (_CONTENT, _REASONING) or not _IN_MESSAGE.absent(text):
            return None
        return Reasoning if self._state == _REASONING else Content

    def _step(self, events: list[Event]) -> bool:
        if self._state == _HEADER:
            return self._read_header(events)
        before, marker, self._buffer = _IN_MESSAGE.split(self._buffer)
        if self._state == _BETWEEN and (before := self._gate.text(before)):
            self._state = _CONTENT
            before += self._gate.flush()
            events.append(Degraded(UNKNOWN_HEADER))
        self._emit(before, events)
        if not marker:
            return False
        self._end(events)
        self._gate.marker()
        self._state, self._header = (_HEADER if marker == START else _BETWEEN), ""
        return True

    def _read_header(self, events: list[Event]) -> bool:
        if self._may_be_constrained and (begun := (self._generated_header + self._buffer).strip()):
            self._may_be_constrained = False
            if begun[0] != "<":
                self._buffer = self._generated_header + self._buffer
                self._state, self._header, self._from_prompt = _CONTENT, "", ""
                return True
        before, marker, rest = _IN_HEADER.split(self._buffer)
        room = MAX_HEADER - len(self._header)
        if room < len(before):
            events.append(Degraded(UNKNOWN_HEADER))
            events.append(Content(self._generated_header + before[:room]))
            self._buffer = self._buffer[room:]
            self._state, self._header, self._from_prompt = _CONTENT, "", ""
            return True
        self._buffer = rest
        self._header += before
        if marker == MESSAGE:
            self._header += marker
            self._enter(events)
        elif marker:
            self._end_header(marker, events)
        return bool(marker)

    def _end_header(self, marker: str, events: list[Event]) -> None:
        """Turns a header without a message into content."""
        if text := self._generated_header.strip():
            events += [Degraded(UNKNOWN_HEADER)]
            events += [Content(text)] if _HEADER_PARTS.sub("", text) else []
        self._header = self._from_prompt = ""
        self._state = _HEADER if marker == START else _BETWEEN

    def _enter(self, events: list[Event]) -> None:
        """Starts a message."""
        self._drop_damaged(events)
        channel, recipient = _CHANNEL(self._header), _RECIPIENT(self._header)
        kind = channel[1] if channel else "final"
        if _HEADER_PARTS.sub("", self._header.removesuffix(MESSAGE)):
            events.append(Degraded(UNKNOWN_HEADER))
        self._state = _REASONING if kind == "analysis" else _CONTENT
        if recipient is not None and recipient[1] != "assistant":
            self._begin_call(recipient[1], events)
        self._header = self._from_prompt = ""
        self.reasoning = self._state == _REASONING

    def _drop_damaged(self, events: list[Event]) -> None:
        """Turns all but the last of several headers into content: the call of an earlier one has no arguments."""
        start = self._header.rfind(CHANNEL)
        if _CHANNEL(self._header) is None or _RECIPIENT(self._header, start) is None:
            return
        damaged = self._header[:start]
        if _RECIPIENT(damaged) is None:
            return
        events += [Degraded(MALFORMED), Content(damaged[len(self._from_prompt) :])]
        self._header, self._from_prompt = self._header[start:], ""

    def _begin_call(self, recipient: str, events: list[Event]) -> None:
        """Starts a call, if the recipient is a tool; what is written to any other is text of its channel."""
        name = recipient.removeprefix(_FUNCTIONS)
        offered = recipient.startswith(_FUNCTIONS) or recipient in self.context.names
        if not self._emits_calls or not offered:
            events.append(Degraded(NOT_CHOSEN if offered else MALFORMED))
            return
        is_name = self._calls.is_name(name)
        if not is_name or not self._calls.allows(name):
            events += [Degraded(NOT_CHOSEN if is_name else MALFORMED), Content(self._generated_header)]
            self._state = _CONTENT
            return
        start = self._calls.start(Named(name))
        self._index, self._value, self._state = start.call, JsonValue(), _CALL
        self._empty = True
        events.append(start)

    def _emit(self, text: str, events: list[Event]) -> None:
        if not text or self._state == _BETWEEN:
            return
        if self._state == _CALL:
            events.append(CallArguments(self._index, self._checked(text, events)))
            self._empty = False
        else:
            events.append(Reasoning(text) if self._state == _REASONING else Content(text))

    def _checked(self, text: str, events: list[Event]) -> str:
        """Returns a part of a call's arguments, with control characters in strings escaped."""
        if self._value is None:
            return text
        at, parts, fixed = 0, list[str](), False
        try:
            while at < len(text) and not self._value.done:
                at, piece, repaired = self._value.read(text, at)
                parts.append(piece)
                fixed = fixed or repaired
            if skip_spaces(text, at) < len(text):
                raise Malformed(at)
        except Malformed:
            self._value = None
            events.append(Degraded(MALFORMED))
        events += [Degraded(REPAIRED)] if fixed else []
        return "".join(parts) + text[at:]

    def _end(self, events: list[Event]) -> None:
        if self._state != _CALL:
            return
        if self._empty:
            events.append(CallArguments(self._index, "{}"))
        elif self._value is not None and not self._value.done:
            events.append(Degraded(INCOMPLETE))
        self._state, self._value = _BETWEEN, None

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._state == _HEADER:
            if text := self._generated_header + self._buffer:
                events += [Degraded(UNKNOWN_HEADER), Content(text)]
        else:
            if self._state == _BETWEEN and self._buffer:
                self._state = _CONTENT
            self._emit(self._buffer, events)
            self._end(events)
        self._buffer = ""
        return events + (self._calls.end() if self._emits_calls else [])

    @property
    def _generated_header(self) -> str:
        """The part of the header that the model wrote."""
        return self._header[len(self._from_prompt) :]

    @property
    def held(self) -> str:
        return (self._generated_header if self._state == _HEADER else "") + self._gate.held + self._buffer

    @property
    def held_size(self) -> int:
        header = len(self._header) - len(self._from_prompt) if self._state == _HEADER else 0
        return header + len(self._gate.held) + len(self._buffer)


FAMILY = Family(
    name="harmony",
    tool=HarmonyParser,
    reasoning=HarmonyParser,
    rule=lambda _, special: {CHANNEL, MESSAGE} <= special,
    engine_tools=(EngineNames(vllm="openai", sglang="gpt-oss"),),
    engine_reasoning=(EngineNames(vllm="openai_gptoss", sglang="gpt-oss"),),
)
