"""A text that a regular expression matches: every repetition as short as allowed, or a little longer.

The expression is parsed and never compiled or run: compiling `[\\x00-\\U0010ffff]` a few hundred times takes seconds,
and running `(a+)+b` may never end. The text matches because of how it is made; what a part can say about other parts
(where it stands, which words it touches) is checked at the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from random import Random
from re import _constants as code  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from services.worker.engines.mock.guided.effort import Effort, UnsupportedSchema

LONGEST_PATTERN = 4_096
LONGEST_TEXT = 4_096
_MORE = 3
_PRINTABLE = [chr(number) for number in range(32, 127)]
_CATEGORIES = {
    code.CATEGORY_DIGIT: "0123456789",
    code.CATEGORY_SPACE: " ",
    code.CATEGORY_WORD: "abcdefghijklmnopqrstuvwxyz0123456789_",
    code.CATEGORY_NOT_DIGIT: "abcdefghijklmnopqrstuvwxyz",
    code.CATEGORY_NOT_SPACE: "abcdefghijklmnopqrstuvwxyz",
    code.CATEGORY_NOT_WORD: " .,-",
}
_BEGINNINGS = (code.AT_BEGINNING, code.AT_BEGINNING_STRING)
_ENDS = (code.AT_END, code.AT_END_STRING)


def matching(pattern: str, random: Random, effort: Effort) -> str:
    """A text that the whole pattern matches.

    Raises:
        OutOfReach: it is no expression of Python's, or one with parts that cannot be followed.
    """
    if len(pattern) > LONGEST_PATTERN:
        raise UnsupportedSchema(f"it is longer than {LONGEST_PATTERN} characters")
    effort.spend(len(pattern))
    try:
        tree = parser.parse(pattern)
    except (re.error, OverflowError) as error:
        raise UnsupportedSchema(f"it is no regular expression, {error}") from None
    return _Writer(random, effort).text(tree)


class _Writer:
    def __init__(self, random: Random, effort: Effort) -> None:
        self._random = random
        self._effort = effort
        self._characters: list[str] = []
        self._demands: list[tuple[Any, int]] = []  # what must be true of a position

    def text(self, tree: Iterable[tuple[Any, Any]]) -> str:
        self._write(tree)
        text = "".join(self._characters)
        if not all(_holds(demand, text, position) for demand, position in self._demands):
            raise UnsupportedSchema("no text that it matches was found")
        return text

    def _write(self, tree: Iterable[tuple[Any, Any]]) -> None:
        for operation, argument in tree:
            self._effort.spend()
            self._write_one(operation, argument)
            if len(self._characters) > LONGEST_TEXT:
                raise UnsupportedSchema(f"what it matches is longer than {LONGEST_TEXT} characters")

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
            self._demands.append((argument, len(self._characters)))
        else:
            raise UnsupportedSchema(f"{str(operation).lower().replace('_', ' ')} is not supported")

    def _repeat(self, least: int, most: Any, repeated: Iterable[tuple[Any, Any]]) -> None:
        if least > LONGEST_TEXT:
            raise UnsupportedSchema(f"what it matches is longer than {LONGEST_TEXT} characters")
        for _ in range(self._random.randint(least, min(int(most), least + _MORE))):
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
            return self._random.choice(_CATEGORIES[value])
        raise UnsupportedSchema(f"{str(kind).lower()} in a set is not supported")

    def _outside(self, members: list[tuple[Any, Any]]) -> str:
        """A printable character that is in none of these, whether case counts or not."""
        self._effort.spend(len(_PRINTABLE) * len(members))
        left = [one for one in _PRINTABLE if not any(_holds_one(member, one) for member in members)]
        left = [one for one in left if one.isalnum()] or left
        if not left:
            raise UnsupportedSchema("a set leaves no printable character")
        return self._random.choice(left)


def _holds_one(member: tuple[Any, Any], character: str) -> bool:
    """Whether a member of a set holds a printable ASCII character."""
    kind, value = member
    if kind is code.LITERAL:
        return character.lower() == chr(value).lower()
    if kind is code.RANGE:
        return any(value[0] <= ord(form) <= value[1] for form in (character.lower(), character.upper()))
    holds = {
        code.CATEGORY_DIGIT: character.isdigit(),
        code.CATEGORY_SPACE: character.isspace(),
        code.CATEGORY_WORD: _is_word(character),
        code.CATEGORY_NOT_DIGIT: not character.isdigit(),
        code.CATEGORY_NOT_SPACE: not character.isspace(),
        code.CATEGORY_NOT_WORD: not _is_word(character),
    }
    if kind is not code.CATEGORY or value not in holds:
        raise UnsupportedSchema(f"{str(kind).lower()} in a set is not supported")
    return holds[value]


def _holds(demand: Any, text: str, position: int) -> bool:
    """Whether what an expression demands of a position is true there."""
    if demand in _BEGINNINGS:
        return position == 0
    if demand in _ENDS:
        return position == len(text)
    touches = _is_word(text[position - 1 : position] if position else "") != _is_word(text[position : position + 1])
    if demand in (code.AT_BOUNDARY, code.AT_NON_BOUNDARY):
        return bool(text) and touches == (demand is code.AT_BOUNDARY)  # Pythons differ about \B in an empty text
    raise UnsupportedSchema(f"{str(demand).lower().replace('_', ' ')} is not supported")


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"
