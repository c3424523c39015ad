"""What is kept of responses in Redis, so that every gateway finds what another one answered."""

from __future__ import annotations

import logging
from importlib.resources import files
from typing import Any

from services.common.errors import unavailable
from services.common.redis.scripts import FAILURES, Script, ScriptRunner
from services.common.redis.target import Credentials, parse
from services.common.tasks import TaskOwner
from services.gateway.apis.responses.store import ResponseStore, StoredResponse

log = logging.getLogger(__name__)

WAITING = 256
"""Responses on their way to Redis at once; more are not kept."""
WAITING_OF_OWNER = WAITING // 4
"""Of one owner, so that none keeps out the responses of others."""
_LENGTH = 8


class RedisStore(ResponseStore):
    """See ResponseStore; the bounds are those of each owner.

    A response can be found here from the moment it is kept, by other gateways once Redis has it.

    Args:
        url: as the router's, see `services.common.redis.target`.
        most: responses of an owner.
        most_bytes: of all responses of an owner together.
        longest_s: from keeping to forgetting, seconds.
        tasks: owns what is on its way.
        prefix: first part of every key.
        timeout_s: how long Redis gets to answer.
        credentials: what the URL does not say.

    Raises:
        SluiceError: INVALID_ARGUMENT when the URL is none; the error repeats no password.
    """

    def __init__(
        self,
        url: str,
        most: int,
        most_bytes: int,
        longest_s: float,
        tasks: TaskOwner,
        prefix: str = "sluice",
        timeout_s: float = 1.0,
        credentials: Credentials | None = None,
    ) -> None:
        self._redis = ScriptRunner(parse(url, credentials, "responses-redis-url"), timeout_s)
        self._bounds = (most, most_bytes)
        self._longest_ms = int(longest_s * 1000)
        self._tasks = tasks
        self._prefix = prefix
        self._script = Script(files("services.gateway.apis.responses").joinpath("kept.lua").read_text("utf-8"))
        self._waiting: dict[tuple[str, str], StoredResponse] = {}

    def keep(self, owner: str, response_id: str, kept: StoredResponse) -> None:
        """See ResponseStore; one that cannot be kept is a line in the log."""
        of_owner = sum(one == owner for one, _ in self._waiting)
        if len(self._waiting) >= WAITING or of_owner >= WAITING_OF_OWNER:
            log.warning("a response is not kept: too many are on their way to Redis", extra={"response": response_id})
            return
        self._waiting[owner, response_id] = kept
        self._tasks.spawn(self._send(owner, response_id, kept), "keep-response")

    async def _send(self, owner: str, response_id: str, kept: StoredResponse) -> None:
        value = len(kept.response).to_bytes(_LENGTH, "big") + kept.response + kept.items
        try:
            await self._run(owner, "keep", response_id, value, self._longest_ms, *self._bounds)
        except FAILURES as error:
            log.warning("a response is not kept: %s", type(error).__name__, extra={"response": response_id})
        finally:
            self._waiting.pop((owner, response_id), None)

    async def find(self, owner: str, response_id: str) -> StoredResponse | None:
        """See ResponseStore; SluiceError(UNAVAILABLE) while Redis does not answer."""
        if (waiting := self._waiting.get((owner, response_id))) is not None:
            return waiting
        value = await self._asked(owner, "find", response_id, self._longest_ms)
        if value is None:
            return None
        end = _LENGTH + int.from_bytes(value[:_LENGTH], "big")
        return StoredResponse(value[_LENGTH:end], value[end:])

    async def drop(self, owner: str, response_id: str) -> bool:
        """See ResponseStore; SluiceError(UNAVAILABLE) while Redis does not answer."""
        here = self._waiting.pop((owner, response_id), None) is not None
        return bool(await self._asked(owner, "drop", response_id)) or here

    async def close(self) -> None:
        """See ResponseStore."""
        await self._redis.close()

    async def _asked(self, owner: str, *arguments: Any) -> Any:
        try:
            return await self._run(owner, *arguments)
        except FAILURES as error:
            log.warning("Redis does not tell of a response: %s", type(error).__name__)
            raise unavailable(
                "Responses are kept in Redis, which does not answer; try again, or send the conversation as input.",
                code="store_unavailable",
            ) from None

    async def _run(self, owner: str, *arguments: Any) -> Any:
        names = [f"{self._prefix}:responses:{{{owner}}}:{what}" for what in ("values", "times", "bytes")]
        return await self._redis.run(self._script, names, arguments)
