"""Watchdog of the parsers in this process, which interrupts a parser that hangs; hosts supervise other parsers."""

from __future__ import annotations

import signal
import threading
from types import FrameType

MAX_HELD = 1 << 20
"""Maximum code points that a parser in this process may hold back."""


class Expired(BaseException):
    """A parser exceeded its time for one piece of text; `except Exception` in a parser does not catch it."""


class ParserWatchdog:
    """Checks every `time_s` seconds of CPU time whether a parser is still processing the same piece of text.

    So a parser has between one and two times that time. The cost per piece is one increment: the timer is periodic, and
    its signal interrupts Python code in the main thread, where the event loop runs.

    Attributes:
        begun: number of pieces passed to parsers.
        parsing: a parser is running.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.parsing = False
        self._seen = -1
        self._users = 0

    def start(self, time_s: float) -> None:
        """Starts the timer, with the time of the last caller. Does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._users += 1
        signal.signal(signal.SIGVTALRM, self._look)
        signal.siginterrupt(signal.SIGVTALRM, False)  # restart interrupted system calls
        signal.setitimer(signal.ITIMER_VIRTUAL, time_s, time_s)

    def stop(self) -> None:
        """Stops the timer after as many calls as `start`."""
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
