"""The autoscalers that a replay compares: this suite's rule, and Kubernetes' HPA on CPU and on the queue.

All act as a HorizontalPodAutoscaler does by default: every 15 s; up at once, at most to twice the workers or by four;
down to the most that was wanted in the last 300 s. Only what they want differs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.types.scaling import TierLoad, advise, mean_load

SYNC_S = 15.0
STABILIZATION_S = 300.0
TOLERANCE = 0.1
"""Share of its target by which a metric of HPA may differ without a change."""
MAX_ADDED = 4
"""Workers that a step up may always add; more, up to twice the workers, if there are more."""


@dataclass(frozen=True, slots=True)
class WorkerBounds:
    """Fewest and most workers, both at least 1."""

    min_workers: int
    max_workers: int


@dataclass(frozen=True, slots=True)
class Observed:
    """What is known at the end of a period of `SYNC_S`.

    Attributes:
        readings: the load of the tier, each second.
        busy_workers: sum over the ready workers of the share of the period that each was busy.
        waiting: requests of which no prompt token is computed, at the workers and before them, now.
    """

    readings: Sequence[TierLoad]
    busy_workers: float
    waiting: int

    @property
    def present(self) -> int:
        """Workers that are ready or starting."""
        return self.readings[-1].workers + self.readings[-1].starting


class Autoscaler(ABC):
    """Decides how many workers a tier has; one for each replay."""

    name: str

    def __init__(self, bounds: WorkerBounds) -> None:
        self._bounds = bounds
        self._wanted: deque[tuple[float, int]] = deque()

    @abstractmethod
    def wants(self, observed: Observed) -> int:
        """Returns the number of workers that the metric asks for."""

    def workers(self, now_s: float, observed: Observed) -> int:
        """Returns the number of workers to have from now on."""
        present = observed.present
        wanted = min(self.wants(observed), max(2 * present, present + MAX_ADDED))
        self._wanted.append((now_s, wanted))
        while self._wanted[0][0] < now_s - STABILIZATION_S:
            self._wanted.popleft()
        if wanted < present:
            wanted = min(max(number for _, number in self._wanted), present)
        return min(max(wanted, self._bounds.min_workers), self._bounds.max_workers)


class SluiceRule(Autoscaler):
    """The rule of `sluice advise`, on the mean of the readings."""

    name = "sluice"

    def wants(self, observed: Observed) -> int:
        load = mean_load(observed.readings)
        return advise(load, self._bounds.min_workers, self._bounds.max_workers).workers


class HpaOnCpu(Autoscaler):
    """HPA on the CPU of the workers, whose engines keep a core busy while they have any request.

    Args:
        target: share of a core.
    """

    name = "HPA on CPU"

    def __init__(self, bounds: WorkerBounds, target: float) -> None:
        super().__init__(bounds)
        self._target = target

    def wants(self, observed: Observed) -> int:
        return _by_total(observed.busy_workers / self._target, observed.present)


class HpaOnQueue(Autoscaler):
    """HPA on the requests that wait.

    Args:
        target: requests that wait for each worker on average.
    """

    name = "HPA on queue"

    def __init__(self, bounds: WorkerBounds, target: float) -> None:
        super().__init__(bounds)
        self._target = target

    def wants(self, observed: Observed) -> int:
        return _by_total(observed.waiting / self._target, observed.present)


class Fixed(Autoscaler):
    """The most workers all the time: what no autoscaler can exceed."""

    name = "fixed"

    def wants(self, observed: Observed) -> int:
        return self._bounds.max_workers


def _by_total(needed: float, present: int) -> int:
    """Returns what HPA makes of a total divided by its target for each worker."""
    if present and abs(needed / present - 1) <= TOLERANCE:
        return present
    return math.ceil(round(needed, 6))
