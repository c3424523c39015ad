"""What making one example may cost, whatever the document says."""

from __future__ import annotations

import math
from time import monotonic

MOST_STEPS = 200_000
"""Parts of a document looked at and members copied; about a tenth of a second."""

MOST_CHARACTERS = 262_144
"""Of the text."""


class UnsupportedSchema(Exception):
    """No example can be made; the text says why, without a full stop."""


class SchemaTooComplex(UnsupportedSchema):
    """Making one costs too much; another branch of the document would not help."""


class Effort:
    """Counts what one example has cost so far; every method raises TooMuch when it becomes too much.

    Args:
        deadline_s: when to give up, monotonic seconds.
    """

    def __init__(self, deadline_s: float = math.inf) -> None:
        self._deadline_s = deadline_s
        self._steps = self._characters = 0

    def spend(self, steps: int = 1) -> None:
        """Counts work that is about to be done."""
        self._steps += steps
        if self._steps > MOST_STEPS or monotonic() > self._deadline_s:
            raise SchemaTooComplex("an example takes more work than the engine does for one request")

    def write(self, characters: int) -> None:
        """Counts characters of the text."""
        self._characters += characters
        if self._characters > MOST_CHARACTERS:
            raise SchemaTooComplex(f"an example is longer than {MOST_CHARACTERS} characters")
