"""Ends a parser of this process that loops, and one that holds too much; the others are watched by their host."""

from __future__ import annotations

import signal
import threading
from types import FrameType

HELD_AT_MOST = 1 << 20
"""Code points that a parser of this process may hold back."""


class Expired(BaseException):
    """A parser used up its time for one piece of text. No `except Exception` of a parser's own catches it."""


class ParserWatchdog:
    """Looks every `time_s` seconds of this process' CPU time whether a parser is still at the same piece of text.

    So a parser has between once and twice that time. Nothing is done for each piece but to count it: the timer goes
    on by itself, and its signal interrupts Python code of the main thread, where the event loop runs.

    Attributes:
        begun: pieces of text given to parsers so far.
        parsing: a parser is at work.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.parsing = False
        self._seen = -1
        self._users = 0

    def start(self, time_s: float) -> None:
        """Begins; several may, the last one's time counts. Does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._users += 1
        signal.signal(signal.SIGVTALRM, self._look)
        signal.siginterrupt(signal.SIGVTALRM, False)  # what waits in the system goes on waiting
        signal.setitimer(signal.ITIMER_VIRTUAL, time_s, time_s)

    def stop(self) -> None:
        """Ends with the last that began it."""
        if threading.current_thread() is not threading.main_thread() or not self._users:
            return
        self._users -= 1
        if not self._users:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def _look(self, number: int, frame: FrameType | None) -> None:
        if self.parsing and self.begun == self._seen:
            self.parsing = False
            raise Expired
        self._seen = self.begun


WATCH = ParserWatchdog()
