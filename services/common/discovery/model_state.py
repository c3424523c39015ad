"""The state of one model that is discovered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.discovery.discovered_models import DiscoveredModel
from services.common.discovery.worker_watch import ServedModel


@dataclass(eq=False, slots=True)
class DiscoveryState:
    """What is known of one model that workers serve, or served.

    A model is waiting (served, not loaded; a `problem` is why), loaded, or leaving (loaded without workers until its
    grace ends). `refresh` moves it from waiting to loaded, with a task that loads it, and between loaded and leaving; a
    task that unloads it takes it back to waiting. One task at a time runs for a model.

    Attributes:
        loaded: what was loaded.
        partly: what failed to load and may be partly loaded.
        grace: timer of a leaving model.
        left_at: when it lost its last worker, by the event loop's clock.
        problem: why it is not loaded; None: for no known reason.
        task: loads or unloads it.
        resting: the task sleeps before its next attempt.
        requested: requests wait for it.
        unaffordable: its memory does not fit until it is requested or another model leaves.
    """

    name: str
    loaded: DiscoveredModel | None = None
    partly: DiscoveredModel | None = None
    grace: asyncio.TimerHandle | None = None
    left_at: float = 0.0
    problem: str | None = None
    task: asyncio.Task[None] | None = None
    resting: bool = False
    requested: bool = False
    unaffordable: bool = False

    @property
    def counts(self) -> bool:
        """Whether it takes one of the places for models."""
        return self.loaded is not None or (self.task is not None and not self.resting)

    @property
    def idle(self) -> bool:
        """Whether it is loaded and may be unloaded."""
        return self.loaded is not None and self.task is None

    def stay(self) -> None:
        """Ends its grace."""
        if self.grace is not None:
            self.grace.cancel()
            self.grace = None

    def is_current(self, workers: Sequence[ServedModel]) -> bool:
        """Whether what is loaded is what a worker serves."""
        known = self.loaded
        return known is not None and any(
            (served.fingerprint, served.declared) == (known.fingerprint, known.declared) for served in workers
        )
