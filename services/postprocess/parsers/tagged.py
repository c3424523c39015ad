"""Bodies of calls whose arguments are enclosed in tags, streamed as JSON.

The tags do not tell which values are strings, but the schemas of the tools do: a value of type string is streamed; any
other value is returned when it is complete, as JSON if it is valid JSON and else as a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.postprocess.parsers.calls import Body, Named
from services.postprocess.parsers.json_scan import Malformed, skip_spaces
from services.postprocess.parsers.markers import Markers
from services.postprocess.parsers.objects import NAME_AT_MOST

_IS_NAME = re.compile(r"[A-Za-z_0-9][\w.:\-/]*").fullmatch

# Expected next.
_NAME, _KEY_OR_END, _KEY, _BEFORE_VALUE, _VALUE = range(5)


@dataclass(frozen=True)
class Form:
    """Format of a family's calls, after the start marker.

    Attributes:
        name_ends: any of these ends the name; the first is consumed, the others belong to what follows.
        key_start, key_end: tags around an argument's name.
        value_start: tag before the value; empty for none.
        value_end: tag after the value.
        end: end of the call, which is not consumed.
        lines: values are on separate lines, so one line break at each end is not part of them.
    """

    name_ends: tuple[str, ...]
    key_start: str
    key_end: str
    value_start: str
    value_end: str
    end: str
    lines: bool = False


Types = Callable[[str, str], frozenset[str]]
"""Returns the JSON types allowed for an argument of a function; empty if unknown."""


def types_of(tools: Sequence[Mapping[str, Any]]) -> Types:
    """Returns the types according to the schemas of the tools."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}

    def types(function: str, argument: str) -> frozenset[str]:
        schema = schemas.get(function)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        found = properties.get(argument) if isinstance(properties, dict) else None
        kind = found.get("type") if isinstance(found, dict) else None
        return frozenset([kind] if isinstance(kind, str) else kind if isinstance(kind, list) else ())

    return types


class TaggedBody(Body):
    """Body of one call.

    Args:
        form: format of the family.
        types: of the arguments.
    """

    def __init__(self, form: Form, types: Types) -> None:
        self._form = form
        self._types = types
        self._values = Markers(form.value_end)
        self._next = _NAME
        self._function = ""
        self._empty = True  # no argument yet
        self._text = False  # the current value is a string
        self._begun = False  # a part of the current value was returned
        self._parts: list[str] = []

    def push(self, text: str, at: int) -> tuple[int, Named | str | None]:
        """See Body; leaves text unread that is ambiguous without what follows."""
        steps = (self._name, self._key_or_end, self._key, self._before_value, self._value)
        while at < len(text) and not self.done:
            before = at, self._next
            at, found = steps[self._next](text, at)
            if found:
                return at, found
            if before == (at, self._next):
                break
        return at, None

    def _name(self, text: str, at: int) -> tuple[int, Named | None]:
        stops = [stop for end in self._form.name_ends if (stop := text.find(end, at)) >= 0]
        stop = min(stops, default=len(text))
        if stop - at > NAME_AT_MOST:
            raise Malformed(at + NAME_AT_MOST)
        if not stops:
            return at, None
        name = text[at:stop].strip()
        if not _IS_NAME(name):
            raise Malformed(at)
        self._function, self._next, self.calling = name, _KEY_OR_END, True
        consumed = self._form.name_ends[0]
        return stop + len(consumed) * text.startswith(consumed, stop), Named(name)

    def _key_or_end(self, text: str, at: int) -> tuple[int, str | None]:
        at = skip_spaces(text, at)
        if text.startswith(self._form.key_start, at):
            self._next = _KEY
            return at + len(self._form.key_start), None
        if text.startswith(self._form.end, at):
            self.done, self.calling = True, False
            return at, "{}" if self._empty else "}"
        return self._wait(text, at, self._form.key_start, self._form.end), None

    def _wait(self, text: str, at: int, *expected: str) -> int:
        """Waits for one of the expected tags; raises Malformed if the text cannot become one."""
        rest = text[at : at + max(map(len, expected))]
        if rest and not any(tag.startswith(rest) for tag in expected):
            raise Malformed(at)
        return at

    def _key(self, text: str, at: int) -> tuple[int, str | None]:
        stop = text.find(self._form.key_end, at)
        if (stop if stop >= 0 else len(text)) - at > NAME_AT_MOST:
            raise Malformed(at + NAME_AT_MOST)
        if stop < 0:
            return at, None
        key = text[at:stop].strip()
        lead, self._empty = "{" if self._empty else ", ", False
        self._text = self._types(self._function, key) == {"string"}
        self._next = _BEFORE_VALUE if self._form.value_start else _VALUE
        self._begun, self._parts = False, []
        opening = '"' if self._text else ""
        return stop + len(self._form.key_end), f"{lead}{json.dumps(key, ensure_ascii=False)}: {opening}"

    def _before_value(self, text: str, at: int) -> tuple[int, str | None]:
        at = skip_spaces(text, at)
        if text.startswith(self._form.value_start, at):
            self._next = _VALUE
            return at + len(self._form.value_start), None
        return self._wait(text, at, self._form.value_start), None

    def _value(self, text: str, at: int) -> tuple[int, str | None]:
        piece, marker, _ = self._values.split(text[at:])
        if not self._text:
            self._parts.append(piece)
            if not marker:
                return at + len(piece), None
            self._next = _KEY_OR_END
            value = "".join(self._parts)
            return at + len(piece) + len(marker), as_json(_unbroken(value) if self._form.lines else value)
        return self._string(piece, marker, at)

    def _string(self, piece: str, marker: str, at: int) -> tuple[int, str | None]:
        """Reads a part of a string; leaves a trailing line break unread until it is known if it ends the value."""
        end = at + len(piece)
        if self._form.lines:
            if not self._begun:
                piece = piece.removeprefix("\n")
            if piece.endswith("\n"):
                piece, end = piece[:-1], end if marker else end - 1
        if marker:
            self._next, end = _KEY_OR_END, end + len(marker)
        elif not piece:
            return at, None
        self._begun = True
        return end, json.dumps(piece, ensure_ascii=False)[1:-1] + ('"' if marker else "")


def _unbroken(text: str) -> str:
    return text.removeprefix("\n").removesuffix("\n")


def as_json(text: str) -> str:
    """Returns a value as JSON: unchanged if it is valid JSON, else as a string; converts True, False and None."""
    value = text.strip()
    word = {"True": "true", "False": "false", "None": "null"}.get(value)
    if word is not None:
        return word
    try:
        json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return value


def _refuse(word: str) -> None:
    raise ValueError(word)
