"""Stop strings: found across any boundary, with as little text held back as possible.

The stop string that is complete first ends the text; of several that are complete with the same character the longest
one counts. So the result depends on the text alone, never on how it was cut into tokens or batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from services.common.errors import invalid

CACHED_CHARS = 256
"""Stop strings of up to this many code points together are compiled once for all streams that share them."""


class StopStrings:
    """Aho-Corasick automaton over a stream's stop strings: one dictionary look-up per character, however many.

    A state is the longest suffix of the text that begins a stop string; state 0 is none.

    Attributes:
        following: for each state, the next state by character.
        fallback: for each state, the state of its longest proper suffix.
        hit: for each state, the longest stop string that ends here; empty for none.
        held: for each state, how many characters may still become part of a stop string.
        first: characters that begin a stop string.
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
        """The state after one more character."""
        while (after := self.following[state].get(char)) is None:
            if not state:
                return 0
            state = self.fallback[state]
        return after


@lru_cache(maxsize=256)
def _compiled(strings: tuple[str, ...]) -> StopStrings:
    return StopStrings(strings)


def compile_stops(strings: Sequence[str], max_strings: int, max_chars: int) -> StopStrings | None:
    """The automaton of a stream's stop strings, None when there are none.

    Raises:
        SluiceError: INVALID_ARGUMENT for an empty string, more than `max_strings` of them, or more than `max_chars`
            code points together.
    """
    if not strings:
        return None
    if len(strings) > max_strings:
        raise invalid(f"{len(strings)} stop strings are too many; the limit is {max_strings}.", param="stop")
    chars = sum(map(len, strings))
    if chars > max_chars:
        raise invalid(f"Stop strings of {chars} characters are too long; the limit is {max_chars}.", param="stop")
    if "" in strings:
        raise invalid("A stop string is empty.", param="stop")
    return _compiled(tuple(strings)) if chars <= CACHED_CHARS else StopStrings(strings)


class StopScanner:
    """Looks for stop strings in one stream's text and holds back what may become one.

    Args:
        stops: shared between streams.
        include: the text ends after the stop string, not before it.
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
        """Takes the next text and gives out what is certain.

        Args:
            text: what one token added.
            counts: whether a stop string that is complete in this text ends the stream; one that is not counted is
                ordinary text, but one that began in it and is complete later counts.

        Returns:
            Text that may go out; after a hit, `hit` is the stop string and this is the last text.
        """
        if not self._state and self._first.isdisjoint(text):
            return text
        step, hits = self._stops.step, self._stops.hit
        state = self._state
        for place, char in enumerate(text):
            state = step(state, char)
            if counts and (hit := hits[state]):
                return self._end(self._held + text[: place + 1], hit)
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
        """What is held back: it did not become a stop string."""
        held, self._held = self._held, ""
        return held
