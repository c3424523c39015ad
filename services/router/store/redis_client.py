"""A Redis connection that runs scripts and turns every failure of Redis into StoreUnavailable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from services.common.errors import invalid
from services.router.store.base import StoreUnavailable
from services.router.store.scripts import NAMES, Script


@contextmanager
def reaching() -> Iterator[None]:
    """Whatever Redis does wrong inside, the store was not there."""
    try:
        yield
    except (RedisError, OSError) as error:  # TimeoutError is an OSError
        raise StoreUnavailable(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from error


class RedisClient:
    """Commands and scripts with a deadline.

    Args:
        url: redis://, rediss:// or unix://; SluiceError(INVALID_ARGUMENT) when it is none of them.
        timeout_s: for connecting and for every answer.
        connections: most at once; more callers wait for one within the same time.
    """

    def __init__(self, url: str, timeout_s: float, connections: int = 32) -> None:
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=connections,
                timeout=timeout_s,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                protocol=2,  # one shape of answers, whatever the server speaks
                # The router has a fallback of its own; a retry in here would only add to the wait.
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise invalid(f"redis-url is no Redis URL: {error}.", param="redis-url") from error
        self.redis: Any = Redis(connection_pool=pool)
        self._pool = pool
        self._scripts = {name: Script(name) for name in NAMES}

    async def close(self) -> None:
        """Closes every connection."""
        await self.redis.aclose()
        await self._pool.aclose()

    async def load_scripts(self) -> None:
        """Makes the scripts known to a server that may have forgotten them."""
        with reaching():
            pipe = self.redis.pipeline(transaction=False)
            for script in self._scripts.values():
                pipe.script_load(script.text)
            await pipe.execute()

    async def run(self, name: str, tag: str, *args: str | bytes | int | float) -> Any:
        """Runs one script on the keys of a tag."""
        with reaching():
            sha = self._scripts[name].sha
            try:
                return await self.redis.execute_command("EVALSHA", sha, 1, tag, *args)
            except NoScriptError:
                await self.load_scripts()
                return await self.redis.execute_command("EVALSHA", sha, 1, tag, *args)

    async def run_many(self, name: str, tag: str, calls: Sequence[Sequence[str | bytes | int]]) -> list[Any]:
        """Runs one script several times in order, in one round trip."""
        with reaching():
            try:
                return await self._run_many(name, tag, calls)
            except NoScriptError:  # of the first call: none was run
                await self.load_scripts()
                return await self._run_many(name, tag, calls)

    async def _run_many(self, name: str, tag: str, calls: Sequence[Sequence[str | bytes | int]]) -> list[Any]:
        sha = self._scripts[name].sha
        pipe = self.redis.pipeline(transaction=False)
        for args in calls:
            pipe.execute_command("EVALSHA", sha, 1, tag, *args)
        return list(await pipe.execute())
