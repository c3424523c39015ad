"""What holds for every test: a machine that is busy makes no property false."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("sluice", deadline=None)
settings.load_profile("sluice")
