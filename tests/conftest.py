"""What holds for every test: a machine that is busy makes no property false, and Ctrl-C means something."""

from __future__ import annotations

import signal

from hypothesis import settings

settings.register_profile("sluice", deadline=None)
settings.load_profile("sluice")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what they put into the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or every process the tests start would ignore it, too
