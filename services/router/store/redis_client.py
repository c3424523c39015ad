"""Runs scripts on Redis; callers at the same time share round trips. Every failure of Redis is StoreUnavailable."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from redis.asyncio.cluster import RedisCluster
from redis.exceptions import NoScriptError, ReadOnlyError

from services.common.redis.connect import connect, hang_up
from services.common.redis.scripts import FAILURES, closed_is_lost
from services.common.redis.target import Target
from services.common.tasks import TaskOwner
from services.router.store.base import StoreUnavailable
from services.router.store.scripts import NAMES, Script

MOST_AT_ONCE = 128  # calls of one round trip
MOST_WAITING = 50_000

Argument: TypeAlias = str | bytes | int | float


@contextmanager
def reaching() -> Iterator[None]:
    """Whatever Redis does wrong inside, the store was not there."""
    try:
        with closed_is_lost():
            yield
    except FAILURES as error:
        raise StoreUnavailable(_reason(error)) from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class _Errand(NamedTuple):
    """Calls of one script that stay together and in order."""

    script: Script
    tag: str
    calls: Sequence[Sequence[Argument]]
    answer: asyncio.Future[list[Any]]

    def commands(self, known: bool) -> list[tuple[Argument, ...]]:
        name = ("EVALSHA", self.script.sha) if known else ("EVAL", self.script.text)
        return [(*name, 1, self.tag, *call) for call in self.calls]

    def fail(self, reason: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(StoreUnavailable(reason))

    def succeed(self, answers: list[Any]) -> None:
        if not self.answer.done():
            self.answer.set_result(answers)


class RedisClient:
    """Scripts with a deadline.

    Natural batching: calls that come while all lanes are on their way wait, and travel together with the next.

    Args:
        timeout_s: for connecting and for every round trip.
        lanes: round trips at once, each on a connection of its own.
    """

    def __init__(self, target: Target, timeout_s: float, lanes: int = 2) -> None:
        self.redis = connect(target, timeout_s, lanes)
        self._timeout_s = timeout_s
        self._lanes = lanes
        self._travelling = 0
        self._waiting: deque[_Errand] = deque()
        self._scripts = {name: Script(name) for name in NAMES}
        self._tasks = TaskOwner()

    async def close(self) -> None:
        """Ends what is on its way and closes every connection."""
        await self._tasks.close()
        self._fail_waiting("closed")
        await self.redis.aclose()

    async def command(self, key: str, *command: Argument) -> Any:
        """Sends one command about one key; no other shares its way."""
        with reaching():
            if not isinstance(self.redis, RedisCluster):
                return await self.redis.execute_command(*command)
            await self.redis.initialize()
            return await self.redis.execute_command(*command, target_nodes=self.redis.get_node_from_key(key))

    async def run(self, name: str, tag: str, *args: Argument) -> Any:
        """Runs one script on the keys of a tag."""
        (answer,) = await self._enter(name, tag, [args])
        return answer

    async def run_many(self, name: str, tag: str, calls: Sequence[Sequence[Argument]]) -> list[Any]:
        """Runs one script several times in order, at best in one round trip."""
        answers: list[Any] = []
        for start in range(0, len(calls), MOST_AT_ONCE):
            answers += await self._enter(name, tag, calls[start : start + MOST_AT_ONCE])
        return answers

    def _enter(self, name: str, tag: str, calls: Sequence[Sequence[Argument]]) -> asyncio.Future[list[Any]]:
        errand = _Errand(self._scripts[name], tag, calls, asyncio.get_running_loop().create_future())
        if len(self._waiting) >= MOST_WAITING:
            errand.fail(f"{MOST_WAITING} calls wait for it already")
            return errand.answer
        self._waiting.append(errand)
        if self._travelling < self._lanes:
            self._travelling += 1
            self._tasks.spawn(self._travel(), "redis-lane")
        return errand.answer

    async def _travel(self) -> None:
        errands: list[_Errand] = []
        reason = "closed"
        try:
            while self._waiting:
                errands = self._take()
                with closed_is_lost():
                    await self._exchange(errands)
        except Exception as error:
            reason = _reason(error)
            self._fail_waiting(reason)  # they would only wait for the same
            if not isinstance(error, FAILURES):
                raise  # a mistake of ours: the owner of the task logs it
        finally:
            self._travelling -= 1
            for errand in errands:
                errand.fail(reason)

    async def _exchange(self, errands: list[_Errand]) -> None:
        async with asyncio.timeout(self._timeout_s):
            answers = await self._pipeline(errands, known=True)
            unknown = [at for at, found in enumerate(answers) if any(isinstance(each, NoScriptError) for each in found)]
            if unknown:  # a server that is new or has forgotten: the whole text makes the script known
                again = await self._pipeline([errands[at] for at in unknown], known=False)
                for at, found in zip(unknown, again, strict=True):
                    answers[at] = found
        for errand, found in zip(errands, answers, strict=True):
            failed = next((each for each in found if isinstance(each, Exception)), None)
            if failed is None:
                errand.succeed(found)
            else:
                errand.fail(_reason(failed))
        if any(isinstance(each, ReadOnlyError) for found in answers for each in found):
            await hang_up(self.redis)

    async def _pipeline(self, errands: list[_Errand], known: bool) -> list[list[Any]]:
        pipe = self.redis.pipeline(transaction=False)
        for errand in errands:
            for command in errand.commands(known):
                pipe.execute_command(*command)
        flat = iter(await pipe.execute(raise_on_error=False))
        return [list(islice(flat, len(errand.calls))) for errand in errands]

    def _take(self) -> list[_Errand]:
        taken, room = [], MOST_AT_ONCE
        while self._waiting and room > 0:
            taken.append(self._waiting.popleft())
            room -= len(taken[-1].calls)
        return taken

    def _fail_waiting(self, reason: str) -> None:
        while self._waiting:
            self._waiting.popleft().fail(reason)
