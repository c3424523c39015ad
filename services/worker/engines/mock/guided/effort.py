"""Bounds the work to generate one example of a constraint."""

from __future__ import annotations

import math
from time import monotonic

MOST_STEPS = 200_000
"""Maximum number of schema nodes visited and members copied; takes about a tenth of a second."""

MOST_CHARACTERS = 262_144
"""Maximum length of the text."""


class UnsupportedSchema(Exception):
    """Raised when no example can be generated; the message is a reason without a full stop."""


class SchemaTooComplex(UnsupportedSchema):
    """Raised when the budget is exhausted, so that trying another branch is useless."""


class Effort:
    """Counts the work for one example; its methods raise SchemaTooComplex when the budget is exhausted.

    Args:
        deadline_s: Deadline in seconds of the monotonic clock.
    """

    def __init__(self, deadline_s: float = math.inf) -> None:
        self._deadline_s = deadline_s
        self._steps = self._characters = 0

    def spend(self, steps: int = 1) -> None:
        """Counts work before it is done."""
        self._steps += steps
        if self._steps > MOST_STEPS or monotonic() > self._deadline_s:
            raise SchemaTooComplex("generating an example takes too much work")

    def write(self, characters: int) -> None:
        """Counts generated characters."""
        self._characters += characters
        if self._characters > MOST_CHARACTERS:
            raise SchemaTooComplex(f"an example is longer than {MOST_CHARACTERS} characters")
