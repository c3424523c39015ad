"""Bodies of calls in JSON: an object, an array of objects, or only the arguments."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Collection
from typing import ClassVar, NamedTuple

from services.common.base.sendable_text import sendable
from services.postprocess.parsers.calls.call_names import MAX_NAME, Named
from services.postprocess.parsers.calls.parser import Body
from services.postprocess.parsers.scanning.json_scan import JsonValue, Malformed, skip_spaces
from services.postprocess.parsers.scanning.markers import Markers, TextBuffer

MAX_HEAD = 512
"""Characters of a call before its arguments; with more the call is damaged, and becomes text."""
MAX_NAME_TEXT = MAX_NAME + 2
"""Characters of a name or key in quotes without escape sequences; a longer one damages its call, which becomes text."""
MAX_ESCAPED_NAME = 6 * MAX_NAME + 2
"""Characters of a name or key in quotes with escape sequences; a longer one damages its call, which becomes text."""
_KEYS = ("arguments", "parameters", "type", "index")
"""Keys of a call object beside those of its name and id."""


class Names(NamedTuple):
    """Keys of a call object."""

    name: str = "name"
    id: str = "id"


NAMES = Names()

# Expected next.
_OPEN, _KEY_OR_END, _KEY, _IN_KEY, _COLON, _VALUE, _IN_VALUE, _MORE = range(8)


class Arguments(Body):
    """JSON object with the arguments of a call whose name is known."""

    def __init__(self) -> None:
        self._value = JsonValue()
        self.calling = True

    def push(self, text: str, at: int) -> tuple[int, str | None]:
        stop, piece, repaired = self._value.read(text, at)
        self.repaired = self.repaired or repaired
        self.done = self._value.done
        self.calling = not self.done
        return stop, piece


class HeadedBody(Body):
    """Call whose head, with the name, precedes a JSON object with its arguments.

    Attributes:
        edges: the brace that begins the arguments, and the end of a call without arguments.
    """

    edges: ClassVar[Markers]

    def __init__(self) -> None:
        self._head = ""
        self._inner: Body | None = None

    @abstractmethod
    def named(self, head: str, edge: str) -> Named | None:
        """Returns the call of a complete head; None if it is malformed."""

    def push(self, text: str, at: int) -> tuple[int, Named | str | None]:
        inner = self._inner
        if inner is None:
            return self.read_head(text, at)
        at, found = self.push_inner(inner, text, at)
        self.done = inner.done
        return at, found

    def push_inner(self, inner: Body, text: str, at: int) -> tuple[int, Named | str | None]:
        """Parses the arguments, or another body that follows instead of a head; see `push`."""
        at, found = inner.push(text, at)
        self.calling, self.repaired = inner.calling, self.repaired or inner.repaired
        return at, found

    def read_head(self, text: str, at: int) -> tuple[int, Named | str | None]:
        """Parses the head; see `push`."""
        before, edge, _ = self.edges.split(text[at:])
        room = MAX_HEAD - len(self._head)
        if room < len(before):
            raise Malformed(at + room)
        self._head += before
        at += len(before)
        if not edge:
            return at, None
        call = self.named(self._head, edge)
        if call is None:
            raise Malformed(at)
        if edge != "{":
            self.done = True
            return at, call._replace(arguments="{}")
        self._inner, self.calling = Arguments(), True
        return at, call


class CallObject(Body):
    """Call object `{"name": …, "arguments": {…}}` with keys in any order; unknown keys are ignored, as a repair.

    The arguments may be an object that was written as a string.

    Args:
        known: names that are calls; None for any.
        bare: the call has no marker, so it must have arguments.
        names: keys of the name and of the id.
    """

    def __init__(self, known: Collection[str] | None = None, bare: bool = False, names: Names = NAMES) -> None:
        self._known = known
        self._bare = bare
        self._names = names
        self._next = _OPEN
        self._value = JsonValue()
        self._text = TextBuffer()  # of the current key or value, as far as it was not returned
        self._key = ""
        self._early = ""  # arguments that precede the name
        self._name = ""
        self._id = ""
        self._started = False

    def push(self, text: str, at: int) -> tuple[int, Named | str | None]:
        while at < len(text) and not self.done:
            if self._next in (_IN_KEY, _IN_VALUE):
                at, found = self._through(text, at)
                if found:
                    return at, found
                continue
            at = skip_spaces(text, at)
            if at < len(text) and (found := self._structure(text, at)):
                return at + (self._next != _IN_VALUE), found
            if at < len(text) and self._next not in (_IN_KEY, _IN_VALUE):
                at += 1
        return at, None

    def _structure(self, text: str, at: int) -> Named | None:
        char, expected = text[at], self._next
        if expected == _OPEN and char == "{":
            self._next = _KEY_OR_END
        elif expected in (_KEY_OR_END, _KEY) and char == '"':
            self._begin(_IN_KEY)
        elif expected == _COLON and char == ":":
            self._next = _VALUE
        elif expected == _VALUE:
            return self._value_begins(char, at)
        elif expected == _MORE and char == ",":
            self._next = _KEY
        elif expected in (_MORE, _KEY_OR_END) and char == "}":
            return self._object_ends(at)
        else:
            raise Malformed(at)
        return None

    def _begin(self, state: int) -> None:
        self._next, self._value = state, JsonValue()
        self._text.clear()

    def _value_begins(self, char: str, at: int) -> Named | None:
        if self._is_arguments:
            if char not in '{n"' or self._started or self._early:
                raise Malformed(at)
            self._begin(_IN_VALUE)
            if self._name and char == "{":
                return self._start_call("", at)
            return None
        self._begin(_IN_VALUE)
        return None

    @property
    def _is_arguments(self) -> bool:
        return self._key in ("arguments", "parameters")

    def _start_call(self, arguments: str, at: int) -> Named:
        if self._known is not None and self._name not in self._known:
            raise Malformed(at)
        self._started = True
        self.calling = not arguments
        return Named(self._name, self._id, arguments)

    def _through(self, text: str, at: int) -> tuple[int, Named | str | None]:
        """Parses a key or a value."""
        if self._next == _IN_VALUE and self._is_arguments:
            stop, piece, repaired = self._value.read(text, at)
            self.repaired = self.repaired or repaired
        else:
            stop = self._scan(text, at)
            piece = text[at:stop]
        if self.calling:
            if self._value.done:
                self._next, self.calling = _MORE, False
            return stop, piece
        self._text.add(piece)
        if not self._value.done:
            return stop, None
        if self._next == _IN_KEY:
            self._key, self._next = json.loads(self._text.text), _COLON
            self.repaired = self.repaired or self._key not in (*_KEYS, *self._names)
            return stop, None
        self._next = _MORE
        return stop, self._take_value(stop)

    def _scan(self, text: str, at: int) -> int:
        bounded = self._next == _IN_KEY or self._key == self._names.name
        try:
            stop = self._value.push(text, at)
        except Malformed as error:
            if bounded:
                self._bound_name(text[at : error.at], at)
            raise
        if bounded:
            self._bound_name(text[at:stop], at)
        return stop

    def _bound_name(self, piece: str, at: int) -> None:
        """Raises Malformed for a name or key that is too long, which is text that merely begins like a call."""
        if self._text.size + len(piece) > MAX_NAME_TEXT:
            written = self._text.text + piece
            limit = MAX_ESCAPED_NAME if "\\" in written[:MAX_NAME_TEXT] else MAX_NAME_TEXT
            if len(written) > limit:
                raise Malformed(at + limit - self._text.size)

    def _take_value(self, at: int) -> Named | None:
        if self._is_arguments:
            early = self._text.take()
            if early.startswith('"'):
                early, self.repaired = sendable(json.loads(early)).strip() or "null", True
            if early != "null" and not _is_object(early):
                raise Malformed(at)
            self._early = "{}" if early == "null" else early
        elif self._key == self._names.name:
            name = json.loads(self._text.text)
            if not isinstance(name, str) or not name or self._name:
                raise Malformed(at)
            self._name = name
        elif self._key == self._names.id and not self._started:
            self._id = _as_id(self._text.text)
        return self._start_call(self._early, at) if self._early and self._name and not self._started else None

    def _object_ends(self, at: int) -> Named | None:
        if not self._name or (self._bare and not self._started):
            raise Malformed(at)
        self.done = True
        return None if self._started else self._start_call("{}", at)


def _is_object(text: str) -> bool:
    value = JsonValue()
    try:
        return text.startswith("{") and value.push(text, 0) == len(text) and value.done
    except Malformed:
        return False


def _as_id(text: str) -> str:
    value = json.loads(text)
    return value if isinstance(value, str) and value.isalnum() and len(value) <= 64 else ""


class CallArray(Body):
    """Array `[{…}, {…}]` of call objects; with `opened`, after its bracket."""

    def __init__(self, known: Collection[str] | None = None, opened: bool = False, names: Names = NAMES) -> None:
        self._known = known
        self._names = names
        self._object: CallObject | None = None
        self._opened = opened
        self._comma = False  # a comma must precede the next object

    def push(self, text: str, at: int) -> tuple[int, Named | str | None]:
        while at < len(text) and not self.done:
            if self._object is not None:
                at, found = self._object.push(text, at)
                self.calling, self.repaired = self._object.calling, self.repaired or self._object.repaired
                if self._object.done:
                    self._object, self._comma = None, True
                if found:
                    return at, found
                continue
            at = skip_spaces(text, at)
            if at < len(text):
                at = self._structure(text, at)
        return at, None

    def _structure(self, text: str, at: int) -> int:
        char = text[at]
        if not self._opened and char == "[":
            self._opened = True
        elif self._opened and char == "]":
            self.done = True
        elif self._opened and char == "," and self._comma:
            self._comma = False
        elif self._opened and char == "{" and not self._comma:
            self._object = CallObject(self._known, names=self._names)
            return at
        else:
            raise Malformed(at)
        return at + 1
