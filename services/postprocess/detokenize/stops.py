"""Stop strings, matched across token boundaries with as little text held back as possible.

The stop string that is complete first ends the text; of several that are complete at the same character, the longest
wins. So the result depends only on the text, not on its division into tokens or batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from services.common.base.errors import invalid

CACHED_CHARS = 256
"""Sets of stop strings up to this total of code points are compiled once and shared between streams."""


class StopStrings:
    """Aho-Corasick automaton of a stream's stop strings: one dictionary lookup per character, whatever their number.

    A state stands for the longest suffix of the text that begins a stop string; state 0 is the empty suffix.

    Attributes:
        following: next state by character, for each state.
        fallback: state of the longest proper suffix, for each state.
        hit: longest stop string that ends in the state; empty for none.
        held: number of characters that may still become part of a stop string, for each state.
        first: first characters of the stop strings.
    """

    __slots__ = ("fallback", "first", "following", "held", "hit")

    def __init__(self, strings: Sequence[str]) -> None:
        self.following: list[dict[str, int]] = [{}]
        self.hit: list[str] = [""]
        for string in strings:
            self._insert(string)
        self.fallback = [0] * len(self.following)
        self.held = [0] * len(self.following)
        self._link()
        self.first = frozenset(self.following[0])

    def _insert(self, string: str) -> None:
        state = 0
        for char in string:
            after = self.following[state].get(char)
            if after is None:
                after = self.following[state][char] = len(self.following)
                self.following.append({})
                self.hit.append("")
            state = after
        self.hit[state] = string

    def _link(self) -> None:
        level, depth = [0], 0
        while level:
            for state in level:
                self.held[state] = depth if self.following[state] else self.held[self.fallback[state]]
                self.hit[state] = self.hit[state] or self.hit[self.fallback[state]]
                for char, after in self.following[state].items():
                    self.fallback[after] = self.step(self.fallback[state], char) if state else 0
            level, depth = [after for state in level for after in self.following[state].values()], depth + 1

    def step(self, state: int, char: str) -> int:
        """Returns the state after one more character."""
        while (after := self.following[state].get(char)) is None:
            if not state:
                return 0
            state = self.fallback[state]
        return after


@lru_cache(maxsize=256)
def _compiled(strings: tuple[str, ...]) -> StopStrings:
    return StopStrings(strings)


def compile_stops(strings: Sequence[str], max_strings: int, max_chars: int) -> StopStrings | None:
    """Returns the automaton of a stream's stop strings; None if there are none.

    Raises:
        SluiceError: INVALID_ARGUMENT for an empty string, more than `max_strings` strings, or more than `max_chars`
            code points in total.
    """
    if not strings:
        return None
    if len(strings) > max_strings:
        raise invalid(f"{len(strings)} stop strings are too many; send at most {max_strings}.", param="stop")
    chars = sum(map(len, strings))
    if chars > max_chars:
        raise invalid(f"Stop strings of {chars} characters are too long; send at most {max_chars}.", param="stop")
    if "" in strings:
        raise invalid("A stop string is empty; remove it.", param="stop")
    return _compiled(tuple(strings)) if chars <= CACHED_CHARS else StopStrings(strings)


class StopScanner:
    """Searches one stream's text for stop strings, and holds back text that may become one.

    Args:
        stops: automaton, shared between streams.
        include: end the text after the stop string instead of before it.
    """

    __slots__ = ("_first", "_held", "_include", "_state", "_stops", "hit")

    def __init__(self, stops: StopStrings, include: bool) -> None:
        self._stops = stops
        self._first = stops.first
        self._include = include
        self._state = 0
        self._held = ""
        self.hit = ""

    def scan(self, text: str, counts: bool) -> str:
        """Scans the next text and returns the certain part.

        Args:
            text: text of one token.
            counts: whether a stop string that is complete in this text ends the stream. Otherwise it is ordinary text,
                but a stop string that begins in it and is complete later still counts.

        Returns:
            Text to send; after a match, `hit` is the stop string and this is the last text.
        """
        if not self._state and self._first.isdisjoint(text):
            return text
        step, hits = self._stops.step, self._stops.hit
        state = self._state
        for index, char in enumerate(text):
            state = step(state, char)
            if counts and (hit := hits[state]):
                return self._end(self._held + text[: index + 1], hit)
        self._state = state
        whole = self._held + text
        certain = len(whole) - self._stops.held[state]
        self._held = whole[certain:]
        return whole[:certain]

    def _end(self, whole: str, hit: str) -> str:
        self.hit = hit
        self._held = ""
        return whole if self._include else whole[: len(whole) - len(hit)]

    def flush(self) -> str:
        """Returns the text held back, which did not become a stop string."""
        held, self._held = self._held, ""
        return held
