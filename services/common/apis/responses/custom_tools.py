"""Custom tools, whose input is text: the model calls a function with one string argument, `input`."""

from __future__ import annotations

import json
import re
from typing import Any

from services.common.apis.field_reader import FieldReader
from services.common.apis.tool_definitions import check_loading
from services.common.base.sendable_text import sendable

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_MAX_HEAD = 256  # characters; white space beyond them is not expected of a model
_TEXT = re.compile(r'(?:[^"\\]|\\(?:[^u]|u[0-9a-fA-F]{4}))*', re.DOTALL)
_ESCAPE = re.compile(r'(\\["\\/bfnrtu])|\\')
_HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")
_MAX_GRAMMAR = 1 << 16
"""Characters of the grammar of a custom tool; a longer one is refused with INVALID_ARGUMENT."""


def read_custom(reader: FieldReader) -> dict[str, Any]:
    """Returns the function, without its name, of a custom tool; its format becomes part of the description.

    Raises:
        SluiceError: INVALID_ARGUMENT for an unknown or invalid field.
    """
    reader.fields("type", "name", "description", "format", "defer_loading", "allowed_callers")
    check_loading(reader)
    description = reader.under("description").optional(str) or ""
    if (grammar := _grammar(reader.under("format"))) is not None:
        syntax, definition = grammar
        description += f"\n\nThe input is text that matches this {syntax} grammar:\n{definition}"
    return {"description": description.strip(), "parameters": PARAMETERS}


def _grammar(form: FieldReader) -> tuple[str, str] | None:
    if form.value is None:
        return None
    if form.kind("text", "grammar") == "text":
        form.fields("type")
        return None
    form.fields("type", "syntax", "definition")
    return form.under("syntax").choice("lark", "regex"), form.under("definition").text(max_length=_MAX_GRAMMAR)


def arguments_of(text: str) -> str:
    """Returns the arguments of the function call that stands for a custom tool call."""
    return json.dumps({"input": text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """Returns the input of a custom tool call from its complete arguments."""
    reader = InputReader()
    return reader.feed(arguments) + reader.finish()


class InputReader:
    """Decodes the input of a custom tool call from the arguments while the model generates them.

    Arguments of another form than `{"input": "…"}` are the input themselves, as some models write the text only.
    """

    def __init__(self) -> None:
        self._rest = ""  # not decoded yet
        self._inside = self._other_form = False

    def feed(self, piece: str) -> str:
        """Returns the text that a piece of the arguments adds."""
        if self._other_form:
            return piece
        self._rest += piece
        if not self._inside:
            head = _HEAD.match(self._rest)
            if head is None:
                return self._without_head()
            self._inside, self._rest = True, self._rest[head.end() :]
        found = _TEXT.match(self._rest)
        text = found[0] if found else ""
        if pending := _HIGH_SURROGATE.search(text):
            text = text[: pending.start()]
        self._rest = self._rest[len(text) :]
        text = _ESCAPE.sub(lambda escape: escape[1] or r"\\", text)  # a backslash that begins no escape is itself
        return sendable(json.loads(f'"{text}"', strict=False))

    def finish(self) -> str:
        """Returns the rest of the input at the end of the arguments."""
        return "" if self._inside and self._rest.startswith('"') else self._rest

    def _without_head(self) -> str:
        if len(self._rest) <= _MAX_HEAD:
            return ""
        self._other_form = True
        text, self._rest = self._rest, ""
        return text
