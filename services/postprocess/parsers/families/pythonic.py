"""Parser of the pythonic calls of Llama 3.2 and 4: `[get_weather(city="Paris"), get_time()]`, streamed as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from services.postprocess.parsers.calls.call_names import MAX_NAME, Named
from services.postprocess.parsers.calls.parser import Body
from services.postprocess.parsers.calls.unmarked import UnmarkedCallParser
from services.postprocess.parsers.families.family import EngineNames, Family
from services.postprocess.parsers.scanning.json_scan import Malformed, skip_spaces
from services.postprocess.parsers.scanning.py_literal import PyLiteral

_WORD = re.compile(r"[\w.\-]*").match
_IS_FUNCTION = re.compile(r"[^\W\d][\w.\-]*").fullmatch

# Expected next.
_OPEN, _FIRST_CALL, _CALL, _FUNCTION, _FIRST_KEY, _KEY, _IN_KEY, _VALUE, _NEXT_KEY, _NEXT_CALL = range(10)


class PythonicBody(Body):
    """Body with a list of calls.

    Args:
        known: names of which the first call must have one; None for any.
    """

    def __init__(self, known: Collection[str] | None = None) -> None:
        self._known = known
        self._next = _OPEN
        self._word = ""
        self._spaced = False  # white space follows the word, so it is complete
        self._literal = PyLiteral()
        self._empty = True  # the current call has no arguments yet

    def push(self, text: str, at: int) -> tuple[int, Named | str | None]:
        found: Named | str | None = None
        while at < len(text) and not found and not self.done:
            if self._next in (_FUNCTION, _IN_KEY):
                at, found = self._read_word(text, at)
            elif self._next == _VALUE:
                at, found = self._literal.push(text, at)
                if self._literal.done:
                    self._next = _NEXT_KEY
            else:
                at = skip_spaces(text, at)
                if at < len(text):
                    at, found = self._structure(text, at)
        return at, found or None

    def _read_word(self, text: str, at: int) -> tuple[int, Named | str | None]:
        found = _WORD(text, at)
        assert found is not None
        room = at if self._spaced else at + MAX_NAME - len(self._word)
        if room < found.end():
            raise Malformed(room)
        self._word += found[0]
        at = skip_spaces(text, found.end())
        self._spaced = self._spaced or at > found.end()
        if at == len(text):
            return at, None
        closing = "(" if self._next == _FUNCTION else "="
        if text[at] != closing or not _IS_FUNCTION(self._word):
            raise Malformed(at)
        word, self._word, self._spaced = self._word, "", False
        if closing == "=":
            self._next, self._literal = _VALUE, PyLiteral()
            lead, self._empty = "{" if self._empty else ", ", False
            return at + 1, f"{lead}{json.dumps(word, ensure_ascii=False)}: "
        if self._known is not None and word not in self._known:
            raise Malformed(at)
        self._known = None  # the list is one of calls
        self._next, self._empty, self.calling = _FIRST_KEY, True, True
        return at + 1, Named(word)

    def close(self) -> str | None:
        if self._next == _VALUE and (quote := self._literal.close()):
            return quote + "}"
        return {_FIRST_KEY: "{}", _NEXT_KEY: "}"}.get(self._next)

    def _structure(self, text: str, at: int) -> tuple[int, str | None]:
        char, expected = text[at], self._next
        if expected == _OPEN and char == "[":
            self._next = _FIRST_CALL
        elif expected in (_FIRST_KEY, _NEXT_KEY, _KEY) and char == ")":
            self._next, self.calling = _NEXT_CALL, False
            return at + 1, "{}" if self._empty else "}"
        elif expected == _NEXT_KEY and char == ",":
            self._next = _KEY
        elif expected == _NEXT_CALL and char == ",":
            self._next = _CALL
        elif expected == _NEXT_CALL and char == "]":
            self.done = True
        elif expected in (_FIRST_CALL, _CALL) and _IS_FUNCTION(char):
            self._next = _FUNCTION
            return at, None
        elif expected in (_FIRST_KEY, _KEY) and _IS_FUNCTION(char):
            self._next = _IN_KEY
            return at, None
        else:
            raise Malformed(at)
        return at + 1, None


class PythonicParser(UnmarkedCallParser):
    """Parses calls of Llama 3.2 and 4. A list that calls none of the tools is content."""

    starts = ("<|python_start|>", "<|python_tag|>")
    ends = ("<|python_end|>",)
    markers = frozenset(starts + ends)
    opening = "["
    body = PythonicBody

    def bare_body(self) -> Body:
        return PythonicBody(self.known)


FAMILY = Family(
    name="pythonic",
    tool=PythonicParser,
    aliases=("llama4_pythonic",),
    hints=("func_name1(",),
    special=("<|python_start|>",),
    engine_tools=(EngineNames(vllm="llama4_pythonic", mark="<|python_start|>"),),
)
