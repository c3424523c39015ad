"""What holds for every test: a machine that is busy makes no property false, and Ctrl-C means something."""

from __future__ import annotations

import signal

import httpx._config
from hypothesis import settings

settings.register_profile("sluice", deadline=None)
settings.load_profile("sluice")

for each in ("connect", "read", "write", "pool"):  # of clients that are told no timeout; 5 s, where a machine is busy
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, each, 60.0)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what they put into the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or every process the tests start would ignore it, too
