"""A kind of requests that is sent until it is told to stop, and what each request met."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar

from tests.support.faults.entrances import Attempts, Entrances
from tests.support.faults.outcome import Answer, Observation, Reference

DEADLINE_S = 45.0
"""Longest duration of a request; then it counts as hung."""
MODEL = "tiny"


class Exchange(Attempts):
    """One request while it runs: when something last arrived."""

    def __init__(self, turn: int) -> None:
        super().__init__(turn)
        self._last = time.monotonic()
        self.pause_s = 0.0

    def heard(self) -> None:
        """Notes that an event arrived."""
        now = time.monotonic()
        self.pause_s = max(self.pause_s, now - self._last)
        self._last = now

    def rested(self) -> None:
        """Notes that the client waited by itself."""
        self._last = time.monotonic()


class Load(ABC):
    """Sends requests of one kind.

    Attributes:
        name: as in the matrix.
        about: what a request is.
        at_once: number of requests in progress.
        distinct: number of different requests, which are repeated in turn.
        in_progress: requests that have not ended, by lane.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    at_once: ClassVar[int] = 2
    distinct: ClassVar[int] = 6

    def __init__(self, entrances: Entrances) -> None:
        self.entrances = entrances
        self.observations: list[Observation] = []
        self._stopping = asyncio.Event()
        self.in_progress: dict[int, Observation] = {}

    @abstractmethod
    async def ask(self, number: int, exchange: Exchange) -> Answer:
        """Returns the answer to a request; whatever it raises is why it failed."""

    async def run(self) -> None:
        """Sends requests until `stop`, and waits for the last ones."""
        await asyncio.gather(*(self._lane(lane) for lane in range(self.at_once)))

    def stop(self) -> None:
        """Lets `run` return once the requests in progress have ended."""
        self._stopping.set()

    async def _lane(self, lane: int) -> None:
        """Sends one request after the other, first to the same server: each server always has some of them."""
        number = lane
        while not self._stopping.is_set():
            seen = self.in_progress[lane] = Observation(self.name, number % self.distinct, time.monotonic())
            await self._observe(seen, lane)
            self.observations.append(self.in_progress.pop(lane))
            if seen.answer is None:
                await asyncio.sleep(0.2)  # as clients do, it does not ask again at once
            number += self.at_once + (number // self.distinct) % 2  # not always the same requests in one lane

    def overdue(self, reference: Reference) -> list[Observation]:
        """Returns the requests in progress that have already taken longer than is normal, as if they ended now."""
        now = time.monotonic()
        waiting = (replace(seen, ended=now) for seen in self.in_progress.values())
        return [seen for seen in waiting if not reference.is_in_time(seen)]

    async def _observe(self, seen: Observation, turn: int) -> Observation:
        """Sends the request of an observation, notes what it met, and returns the observation."""
        exchange = Exchange(turn)
        try:
            async with asyncio.timeout(DEADLINE_S) as limit:
                seen.answer = await self.ask(seen.number, exchange)
        except Exception as error:
            hung = f"hung: no end within {DEADLINE_S:.0f} s"
            seen.error = hung if limit.expired() else f"{type(error).__name__}: {error}"
        exchange.heard()
        seen.ended = time.monotonic()
        seen.pause_s, seen.retried = exchange.pause_s, exchange.retried
        return seen

    async def reference(self) -> Reference:
        """Asks every distinct request once; returns the answers.

        Raises:
            AssertionError: one failed.
        """
        seen: list[Observation] = []
        for start in range(0, self.distinct, self.at_once):
            numbers = range(start, min(start + self.at_once, self.distinct))
            fresh = (Observation(self.name, number, time.monotonic()) for number in numbers)
            seen += await asyncio.gather(*(self._observe(observation, observation.number) for observation in fresh))
        answers, seconds = {}, {}
        for observation in seen:
            assert observation.answer is not None, f"{self.name}, undisturbed: {observation.error}"
            answers[observation.number] = observation.answer
            seconds[observation.number] = observation.seconds
        return Reference(answers, seconds)
