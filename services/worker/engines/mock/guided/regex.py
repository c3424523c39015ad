"""Generates a text that matches a regular expression, with repetitions of about minimal length.

The expression is parsed but never compiled or run: compiling `[\\x00-\\U0010ffff]` a few hundred times takes seconds,
and running `(a+)+b` may never end. The text matches by construction, except for anchors, which are checked at the
end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from random import Random
from re import _constants as code  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from services.worker.engines.mock.guided.effort import Effort, UnsupportedSchema

MAX_PATTERN_CHARACTERS = 4_096
MAX_TEXT_CHARACTERS = 4_096
_EXTRA_REPETITIONS = 3
_PRINTABLE = [chr(number) for number in range(32, 127)]
_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    code.CATEGORY_DIGIT: str.isdigit,
    code.CATEGORY_SPACE: str.isspace,
    code.CATEGORY_WORD: lambda character: character.isalnum() or character == "_",
    code.CATEGORY_NOT_DIGIT: lambda character: not character.isdigit(),
    code.CATEGORY_NOT_SPACE: lambda character: not character.isspace(),
    code.CATEGORY_NOT_WORD: lambda character: not (character.isalnum() or character == "_"),
}
_BEGINNINGS = (code.AT_BEGINNING, code.AT_BEGINNING_STRING)
_ENDS = (code.AT_END, code.AT_END_STRING)


def matching(pattern: str, random: Random, effort: Effort) -> str:
    """Returns a text that the whole pattern matches.

    Raises:
        UnsupportedSchema: When the pattern is invalid or uses unsupported constructs.
    """
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        raise UnsupportedSchema(f"it is longer than {MAX_PATTERN_CHARACTERS} characters")
    effort.spend(len(pattern))
    try:
        tree = parser.parse(pattern)
    except (re.error, OverflowError) as error:
        raise UnsupportedSchema(f"it is not a valid regular expression, {error}") from None
    return _Writer(random, effort).text(tree)


class _Writer:
    def __init__(self, random: Random, effort: Effort) -> None:
        self._random = random
        self._effort = effort
        self._characters: list[str] = []
        self._assertions: list[tuple[Any, int]] = []  # anchors with their positions

    def text(self, tree: Iterable[tuple[Any, Any]]) -> str:
        self._write(tree)
        text = "".join(self._characters)
        if not all(_holds(assertion, text, position) for assertion, position in self._assertions):
            raise UnsupportedSchema("no matching text was found")
        return text

    def _write(self, tree: Iterable[tuple[Any, Any]]) -> None:
        for operation, argument in tree:
            self._effort.spend()
            self._write_one(operation, argument)
            if len(self._characters) > MAX_TEXT_CHARACTERS:
                raise UnsupportedSchema(f"what it matches is longer than {MAX_TEXT_CHARACTERS} characters")

    def _write_one(self, operation: Any, argument: Any) -> None:
        if operation is code.LITERAL:
            self._characters.append(chr(argument))
        elif operation is code.NOT_LITERAL:
            self._characters.append(self._outside([(code.LITERAL, argument)]))
        elif operation is code.ANY:
            self._characters.append(self._random.choice("abcdefghijklmnopqrstuvwxyz"))
        elif operation is code.IN:
            self._characters.append(self._one_of(argument))
        elif operation is code.BRANCH:
            self._write(self._random.choice(argument[1]))
        elif operation is code.SUBPATTERN:
            self._write(argument[-1])
        elif operation in (code.MAX_REPEAT, code.MIN_REPEAT):
            self._repeat(*argument)
        elif operation is code.AT:
            self._assertions.append((argument, len(self._characters)))
        else:
            raise UnsupportedSchema(f"{str(operation).lower().replace('_', ' ')} is not supported")

    def _repeat(self, minimum: int, maximum: Any, repeated: Iterable[tuple[Any, Any]]) -> None:
        if minimum > MAX_TEXT_CHARACTERS:
            raise UnsupportedSchema(f"what it matches is longer than {MAX_TEXT_CHARACTERS} characters")
        for _ in range(self._random.randint(minimum, min(int(maximum), minimum + _EXTRA_REPETITIONS))):
            self._effort.spend()
            self._write(repeated)

    def _one_of(self, members: list[tuple[Any, Any]]) -> str:
        self._effort.spend(len(members))
        if members[0][0] is code.NEGATE:
            return self._outside(members[1:])
        kind, value = self._random.choice(members)
        if kind is code.LITERAL:
            return chr(value)
        if kind is code.RANGE:
            return chr(self._random.randint(value[0], min(value[1], value[0] + 255)))
        if kind is code.CATEGORY and value in _CATEGORIES:
            return self._random.choice([char for char in _PRINTABLE if _CATEGORIES[value](char)])
        raise UnsupportedSchema(f"{str(kind).lower()} in a set is not supported")

    def _outside(self, members: list[tuple[Any, Any]]) -> str:
        """Returns a printable character outside a set, ignoring case."""
        self._effort.spend(len(_PRINTABLE) * len(members))
        allowed = [char for char in _PRINTABLE if not any(_contains(member, char) for member in members)]
        allowed = [char for char in allowed if char.isalnum()] or allowed
        if not allowed:
            raise UnsupportedSchema("a set excludes every printable character")
        return self._random.choice(allowed)


def _contains(member: tuple[Any, Any], character: str) -> bool:
    """Returns whether a member of a set contains a printable ASCII character."""
    kind, value = member
    if kind is code.LITERAL:
        return character.lower() == chr(value).lower()
    if kind is code.RANGE:
        return any(value[0] <= ord(variant) <= value[1] for variant in (character.lower(), character.upper()))
    if kind is not code.CATEGORY or value not in _CATEGORIES:
        raise UnsupportedSchema(f"{str(kind).lower()} in a set is not supported")
    return _CATEGORIES[value](character)


def _holds(assertion: Any, text: str, position: int) -> bool:
    """Returns whether an anchor holds at a position of the text."""
    if assertion in _BEGINNINGS:
        return position == 0
    if assertion in _ENDS:
        return position == len(text)
    raise UnsupportedSchema(f"{str(assertion).lower().replace('_', ' ')} is not supported")
