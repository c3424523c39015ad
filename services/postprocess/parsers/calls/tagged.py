"""Bodies of calls whose arguments are enclosed in tags, streamed as JSON.

The tags do not tell which values are strings, but the schemas of the tools do: a value whose first type is string is
streamed as written; any other value is converted when it is complete.

A value may contain the text of its own end tag, and models leave end tags out. What follows a tag decides:

- An end tag of the value is one if an argument, or the end of the call, follows.
- The end of the call within a value is one if another call, the end of all calls or the end of the output follows. If
  other text follows, it is held, up to MAX_HELD characters, until an end tag of the value proves that it was text,
  or another call that it was not.
- The tag of another argument within a value begins that argument if the tool declares it, the call does not have it yet
  and the tag begins a line, or the tool requires it (or, for a form whose tags are hardly text, anywhere). Elsewhere
  such a tag is text, and the call is marked.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple

from services.common.base.sendable_text import sendable
from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.calls.argument_types import ANY, NULLS, TEXT, UNDECLARED, ArgumentTypes, as_json
from services.postprocess.parsers.calls.call_names import MAX_NAME, Named
from services.postprocess.parsers.calls.objects import Arguments
from services.postprocess.parsers.calls.parser import Body, CallParser
from services.postprocess.parsers.scanning.json_scan import Malformed, skip_spaces
from services.postprocess.parsers.scanning.markers import MAX_SPACES, Markers

MAX_HELD = 4_096
"""Maximum text of a value that is held to find out whether an end of the call in it was one."""

_MAX_NULL = 64  # characters of a value that may be null, with white space

# Expected next.
_NAME, _KEY_OR_END, _KEY, _BEFORE_VALUE, _VALUE, _OBJECT, _AFTER_OBJECT = range(7)

# Kinds of values: any JSON, a string, a string that may be null, or an object that may have all arguments.
_JSON, _TEXT, _TEXT_OR_NULL, _WRAPPED = range(4)


class Key(NamedTuple):
    """Name of an argument, and whether its value is a string; None: its schema decides."""

    name: str
    is_text: bool | None = None


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
        special: the tags have special tokens, or there are tags around values too, so values hardly contain them.
        objects: the arguments may be one JSON object instead.
        wrapper: name of an argument with an object of all arguments, which models write where the tool has none such.
        read_name: returns the name of the function in the text before the end of the name.
        read_key: returns what the text in the tag of an argument contains; None if it is malformed.
    """

    name_ends: tuple[str, ...]
    key_start: str
    key_end: str
    value_start: str
    value_end: str
    end: str
    lines: bool = False
    special: bool = False
    objects: bool = False
    wrapper: str = ""
    read_name: Callable[[str], str] = str.strip
    read_key: Callable[[str], Key | None] = lambda text: Key(text.strip())


@dataclass(frozen=True)
class Surroundings:
    """Markers around the calls of a family.

    Attributes:
        starts: of a call.
        wrappers: around one or several calls.
    """

    starts: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()


class _Tags:
    """Searches for the tags of a form."""

    def __init__(self, form: Form, around: Surroundings) -> None:
        self.after_call = (*around.wrappers, *around.starts)
        self.after_value = (form.key_start, form.end, *self.after_call)
        self.name = Markers(*form.name_ends)
        self.key = Markers(form.key_end)
        self.value = Markers(form.value_end, form.end, form.key_start)
        self.proof = Markers(form.value_end, *around.starts)


_tags = cache(_Tags)


class TaggedBody(Body):
    """Body of one call.

    Args:
        form: format of the family.
        types: of the arguments.
        around: markers around the family's calls.
    """

    def __init__(self, form: Form, types: ArgumentTypes, around: Surroundings = Surroundings()) -> None:
        self._form = form
        self._types = types
        self._tags = _tags(form, around)
        self._starts = around.starts
        self._next = _NAME
        self._function = ""
        self._keys: set[str] = set()
        self._type = UNDECLARED
        self._kind = _TEXT  # of the current value
        self._begun = False  # a part of the current value was read
        self._parts: list[str] = []  # of the current value, not returned yet
        self._object = Arguments()
        self._proved = 0  # characters after an end of the call in a value that were searched already

    def push(self, text: str, at: int) -> tuple[int, Named | str | None]:
        """See Body; leaves text unread that is ambiguous without what follows."""
        steps = (
            self._name,
            self._key_or_end,
            self._key,
            self._before_value,
            self._value,
            self._in_object,
            self._after_object,
        )
        while at < len(text) and not self.done:
            before = at, self._next
            at, found = steps[self._next](text, at)
            if found:
                return at, found
            if before == (at, self._next):
                break
        return at, None

    def close(self) -> str | None:
        if self._next not in (_KEY_OR_END, _AFTER_OBJECT):
            return None
        self._end()
        if self._next == _AFTER_OBJECT:
            return ""
        return "}" if self._keys else "{}"

    def _end(self) -> None:
        self.done, self.calling = True, False

    def _name(self, text: str, at: int) -> tuple[int, Named | None]:
        stop, end = self._tags.name.find(text, at)
        if stop - at > MAX_NAME:
            raise Malformed(at + MAX_NAME)
        if not end:
            return at, None
        name = self._form.read_name(text[at:stop])
        self._function, self._next, self.calling = name, _KEY_OR_END, True
        return stop + len(end) * (end == self._form.name_ends[0]), Named(name)

    def _key_or_end(self, text: str, at: int) -> tuple[int, str | None]:
        at = skip_spaces(text, at)
        if text.startswith(self._form.key_start, at):
            self._next = _KEY
            return at + len(self._form.key_start), None
        if text.startswith(self._tags.after_value, at):
            self.repaired = self.repaired or not text.startswith(self._form.end, at)
            self._end()
            return at, "}" if self._keys else "{}"
        if self._form.objects and not self._keys and text.startswith("{", at):
            self._next = _OBJECT  # its brace alone, so that the spaces before it are lost however the text is cut
            return self._in_object(text[: at + 1], at)
        if at < len(text) and not _begins(text, at, self._tags.after_value):
            raise Malformed(at)
        return at, None

    def _in_object(self, text: str, at: int) -> tuple[int, str | None]:
        at, found = self._object.push(text, at)
        self.repaired = self.repaired or self._object.repaired
        if self._object.done:
            self._next = _AFTER_OBJECT
        return at, found

    def _after_object(self, text: str, at: int) -> tuple[int, None]:
        at = skip_spaces(text, at)
        if text.startswith(self._tags.after_value, at):
            self.repaired = self.repaired or not text.startswith(self._form.end, at)
            self._end()
        elif at < len(text) and not _begins(text, at, self._tags.after_value):
            raise Malformed(at)
        return at, None

    def _key(self, text: str, at: int) -> tuple[int, str | None]:
        stop, end = self._tags.key.find(text, at)
        if stop - at > MAX_NAME:
            raise Malformed(at + MAX_NAME)
        if not end:
            return at, None
        found = self._form.read_key(text[at:stop])
        if found is None:
            raise Malformed(at)
        key, is_text = found
        self._next = _BEFORE_VALUE if self._form.value_start else _VALUE
        self._begun, self._parts = False, []
        self._type = self._types(self._function, key) if is_text is None else TEXT if is_text else ANY
        if self._wraps(key):
            self._kind = _WRAPPED
            return stop + len(end), None
        lead = ", " if self._keys else "{"
        self._keys.add(key)
        self._kind = _JSON if not self._type.text else _TEXT_OR_NULL if self._type.nullable else _TEXT
        opening = '"' if self._kind == _TEXT else ""
        return stop + len(end), f"{lead}{json.dumps(key, ensure_ascii=False)}: {opening}"

    def _wraps(self, key: str) -> bool:
        """Returns whether a first argument may be an object of all arguments."""
        if key != self._form.wrapper or self._keys or self._types.declares(self._function, key):
            return False
        return self._types.parameters(self._function) is not None

    def _before_value(self, text: str, at: int) -> tuple[int, str | None]:
        at = skip_spaces(text, at)
        if text.startswith(self._form.value_start, at):
            self._next = _VALUE
            return at + len(self._form.value_start), None
        if at < len(text) and not _begins(text, at, (self._form.value_start,)):
            raise Malformed(at)
        return at, None

    def _value(self, text: str, at: int) -> tuple[int, str | None]:
        stop, tag = self._tags.value.find(text, at)
        ends = self._ends_value(tag, text, stop, at) if tag else False if self.last else None
        if ends is False and tag:
            self._proved = 0
            return stop + 1, self._read(text[at : stop + 1])
        if not ends:  # a line break is part of the end tag, if one follows
            stop = len(text) if ends is False else stop - text.endswith("\n", at, stop)
            return stop, self._read(text[at:stop]) if stop > at else None
        self._proved = 0
        self._next = _KEY_OR_END
        explicit = tag == self._form.value_end
        self.repaired = self.repaired or not explicit
        value = text[at:stop]
        if self._form.lines or not explicit:
            value = value.removesuffix("\n")
        return stop + len(tag) * explicit, self._read(value) + self._close_value()

    def _ends_value(self, tag: str, text: str, at: int, value_at: int) -> bool | None:
        """Returns whether a tag at this offset ends the value; None if that depends on text that is missing."""
        form, after = self._form, at + len(tag)
        if tag == form.key_start:
            return self._begins_argument(text, after, form.special or (at > value_at and text[at - 1] == "\n"))
        follows = self._tags.after_value if tag == form.value_end else self._tags.after_call
        found = skip_spaces(text[: after + MAX_SPACES + 1], after)
        if found - after > MAX_SPACES:
            return tag == form.value_end
        if text.startswith(follows, found):
            return True
        if found == len(text) or _begins(text, found, follows):
            return True if self.last else None
        return False if tag == form.value_end else self._proves(text, after)

    def _begins_argument(self, text: str, at: int, certain: bool) -> bool | None:
        """Returns whether a declared argument that the call does not have yet begins with this name.

        Args:
            certain: any such name begins one; False: only that of an argument that the tool requires.
        """
        stop, end = self._tags.key.find(text, at)
        if stop - at > MAX_NAME:
            return False
        if not end:
            return False if self.last else None
        found = self._form.read_key(text[at:stop])
        if found is None or found.name in self._keys or not self._types.declares(self._function, found.name):
            return False
        begins = certain or self._types.requires(self._function, found.name)
        self.repaired = self.repaired or not begins
        return begins

    def _proves(self, text: str, after: int) -> bool | None:
        """Returns whether text after the end of a call within a value proves that it is the end."""
        limit = after + MAX_HELD
        window, at = text[:limit], after + self._proved
        while True:
            at, tag = self._tags.proof.find(window, at)
            if tag == self._form.value_end:
                return False
            if not tag:
                break
            stop, end = self._tags.name.find(window, at + len(tag))
            if not end and stop - at <= MAX_NAME + len(tag):
                break  # the name is not complete
            name = self._form.read_name(window[at + len(tag) : stop])
            if end and self._types.has(name):
                return True
            at += len(tag)
        self._proved = at - after
        if len(text) >= limit:
            return False
        return True if self.last else None

    def _read(self, piece: str) -> str:
        """Reads a part of the value; returns what is certain of it as JSON."""
        if not self._begun and self._form.lines:
            piece = piece.removeprefix("\n")
        self._begun = True
        if self._kind == _TEXT:
            return json.dumps(piece, ensure_ascii=False)[1:-1]
        self._parts.append(piece)
        if self._kind == _TEXT_OR_NULL:
            value = "".join(self._parts)
            if not _may_be_null(value):
                self._kind, self._parts = _TEXT, []
                return json.dumps(value, ensure_ascii=False)[:-1]
            self._parts = [value]
        return ""

    def _close_value(self) -> str:
        if self._kind == _TEXT:
            return '"'
        value = "".join(self._parts)
        if self._kind == _WRAPPED:
            return self._unwrapped(value)
        if self._kind == _JSON or value.strip() in NULLS:
            return as_json(value, self._type)
        return json.dumps(value, ensure_ascii=False)

    def _unwrapped(self, value: str) -> str:
        """Returns the beginning of an object of all arguments; any other value is that of the argument it names."""
        try:
            members = json.loads(value)
        except (ValueError, RecursionError):
            members = None
        if isinstance(members, dict):
            self.repaired = True
            self._keys.update(members)
            return sendable(json.dumps(members, ensure_ascii=False)[:-1]) if members else ""
        self._keys.add(self._form.wrapper)
        written = json.dumps(value, ensure_ascii=False) if self._type.text else as_json(value, self._type)
        return f"{{{json.dumps(self._form.wrapper)}: {written}"


def _begins(text: str, at: int, tags: tuple[str, ...]) -> bool:
    """Returns whether the rest of a text is the beginning of a tag."""
    longest = max(map(len, tags))
    return len(text) - at < longest and any(tag.startswith(text[at:]) for tag in tags)


def _may_be_null(value: str) -> bool:
    word = value.strip()
    return len(value) <= _MAX_NULL and any(null.startswith(word) for null in NULLS)


class TaggedParser(CallParser):
    """Parses calls in a tagged format."""

    form: ClassVar[Form]
    more_forms: ClassVar[dict[str, Form]] = {}
    """Forms of calls that begin with another of the markers."""

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._types = ArgumentTypes(context.tools)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._around = Surroundings(cls.starts, cls.swallowed)

    _around: ClassVar[Surroundings]

    def body(self) -> Body:
        return TaggedBody(self.more_forms.get(self._begun_by, self.form), self._types, self._around)
