"""A text that a regular expression matches: every repetition as short as allowed, or a little longer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from random import Random
from re import _constants as code  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from services.worker.engines.mock.guided.example import OutOfReach

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


def matching(pattern: str, random: Random) -> str:
    """A text that the whole pattern matches.

    Raises:
        OutOfReach: it is no expression of Python's, or one with parts that cannot be followed.
    """
    if len(pattern) > LONGEST_PATTERN:
        raise OutOfReach(f"it is longer than {LONGEST_PATTERN} characters")
    try:
        tree = parser.parse(pattern)
        compiled = re.compile(pattern)
    except (re.error, OverflowError) as error:
        raise OutOfReach(f"it is no regular expression, {error}") from None
    text = "".join(_Writer(random).of(tree))
    if compiled.fullmatch(text) is None:
        raise OutOfReach("no text that it matches was found")
    return text


class _Writer:
    def __init__(self, random: Random) -> None:
        self._random = random
        self._written = 0

    def of(self, tree: Iterable[tuple[Any, Any]]) -> list[str]:
        pieces: list[str] = []
        for operation, argument in tree:
            pieces += self._one(operation, argument)
            if self._written > LONGEST_TEXT:
                raise OutOfReach(f"what it matches is longer than {LONGEST_TEXT} characters")
        return pieces

    def _one(self, operation: Any, argument: Any) -> list[str]:
        if operation is code.LITERAL:
            return self._write(chr(argument))
        if operation is code.NOT_LITERAL:
            return self._write(self._other_than({chr(argument)}))
        if operation is code.ANY:
            return self._write(self._random.choice("abcdefghijklmnopqrstuvwxyz"))
        if operation is code.IN:
            return self._write(self._one_of(argument))
        if operation is code.BRANCH:
            return self.of(self._random.choice(argument[1]))
        if operation is code.SUBPATTERN:
            return self.of(argument[-1])
        if operation is code.ATOMIC_GROUP:
            return self.of(argument)
        if operation in (code.MAX_REPEAT, code.MIN_REPEAT, code.POSSESSIVE_REPEAT):
            least, most, repeated = argument
            if least > LONGEST_TEXT:
                raise OutOfReach(f"what it matches is longer than {LONGEST_TEXT} characters")
            times = self._random.randint(least, min(int(most), least + _MORE))
            return [piece for _ in range(times) for piece in self.of(repeated)]
        if operation is code.AT:
            return []
        raise OutOfReach(f"{str(operation).lower().replace('_', ' ')} is not supported")

    def _write(self, character: str) -> list[str]:
        self._written += 1
        return [character]

    def _one_of(self, members: list[tuple[Any, Any]]) -> str:
        excluded = members[0][0] is code.NEGATE
        characters = [self._member(kind, value) for kind, value in members[excluded:]]
        if excluded:
            return self._other_than({one for some in characters for one in some})
        return self._random.choice(self._random.choice(characters))

    def _member(self, kind: Any, value: Any) -> str:
        if kind is code.LITERAL:
            return chr(value)
        if kind is code.RANGE:
            return "".join(map(chr, range(value[0], min(value[1], value[0] + 255) + 1)))
        if kind is code.CATEGORY and value in _CATEGORIES:
            return _CATEGORIES[value]
        raise OutOfReach(f"{str(kind).lower()} in a set is not supported")

    def _other_than(self, excluded: set[str]) -> str:
        left = [character for character in _PRINTABLE if character not in excluded and character.isalnum()]
        left = left or [character for character in _PRINTABLE if character not in excluded]
        if not left:
            raise OutOfReach("a set leaves no printable character")
        return self._random.choice(left)
