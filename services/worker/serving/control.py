"""Operating a running worker: what the actions of `Control` mean beyond the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from services.common.errors import ErrorKind, SluiceError, internal, invalid
from services.worker.contract.capabilities import Capability
from services.worker.generation.validation import require
from services.worker.serving.worker import Worker

log = logging.getLogger(__name__)

ASLEEP = "asleep"
CONTROL_S = 300.0
QUIET_S = 30.0

_NEEDS = {
    "sleep": Capability.SLEEP,
    "wake": Capability.SLEEP,
    "clear_cache": Capability.CLEAR_CACHE,
    "load_lora": Capability.LORA_LOADING,
    "unload_lora": Capability.LORA_LOADING,
    "start_profile": Capability.PROFILE,
    "stop_profile": Capability.PROFILE,
    "inject_fault": Capability.INJECT_FAULT,
}


class Controls:
    """Runs one action at a time.

    Args:
        resync: tells the router the whole cache again; returns False when the worker is not registered.
    """

    def __init__(self, worker: Worker, resync: Callable[[], bool]) -> None:
        self._worker = worker
        self._resync = resync
        self._one_at_a_time = asyncio.Lock()

    async def run(self, action: str, arguments: Mapping[str, str]) -> dict[str, str]:
        """Runs an action by its name in small letters.

        Raises:
            SluiceError: FAILED_PRECONDITION when the engine does not have it or it makes no sense now,
                INVALID_ARGUMENT for wrong arguments, RESPONSE_TIMEOUT when the engine does not answer.
        """
        config = self._worker.config
        if action in _NEEDS:
            require(_NEEDS[action], config, "action")
        try:
            async with asyncio.timeout(CONTROL_S), self._one_at_a_time:
                return await self._run(action, arguments)
        except TimeoutError as error:
            raise SluiceError(ErrorKind.RESPONSE_TIMEOUT, f"The engine did not finish {action} in time.") from error
        except SluiceError:
            raise
        except Exception as error:
            log.exception("an action failed", extra={"action": action})
            raise internal(f"The engine failed on {action}; the worker's log has the details.") from error

    async def _run(self, action: str, arguments: Mapping[str, str]) -> dict[str, str]:
        match action:
            case "resync":
                return self._tell_router()
            case "clear_cache":
                await self._worker.engine.clear_cache()
                return {}
            case "sleep":
                return await self._sleep(arguments)
            case "wake":
                results = await self._worker.engine.control(action, arguments)
                self._worker.gate.resume(ASLEEP)
                return results
            case "load_lora" | "unload_lora":
                return await self._change_adapters(action, arguments)
        return await self._worker.engine.control(action, arguments)

    def _tell_router(self) -> dict[str, str]:
        if not self._resync():
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION, "The worker is not registered with a router now.", param="action"
            )
        return {}

    async def _sleep(self, arguments: Mapping[str, str]) -> dict[str, str]:
        """Takes nothing new, lets what runs end, and only then lets the engine sleep."""
        error = SluiceError(ErrorKind.UNAVAILABLE, "The worker sleeps; wake it, or use another one.", code="asleep")
        gate = self._worker.gate
        awake = gate.suspend(ASLEEP, error)
        try:
            async with asyncio.timeout(QUIET_S):
                await self._worker.wait_idle()
            return await self._worker.engine.control("sleep", arguments)
        except TimeoutError as timeout:
            gate.resume(ASLEEP)
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                f"{self._worker.live_requests} requests still run after {QUIET_S:.0f} seconds; abort them first.",
                param="action",
            ) from timeout
        except BaseException:
            if awake:  # what sleeps already still does
                gate.resume(ASLEEP)
            raise

    async def _change_adapters(self, action: str, arguments: Mapping[str, str]) -> dict[str, str]:
        worker, name = self._worker, arguments.get("name", "")
        if not name:
            raise invalid('The argument "name" is missing: the name of the adapter.', param="name")
        if name == worker.config.model:
            raise invalid(f"{name!r} is the name of the model; an adapter needs another one.", param="name")
        results = await worker.engine.control(action, arguments)
        others = tuple(adapter for adapter in worker.config.adapters if adapter != name)
        adapters = (*others, name) if action == "load_lora" else others
        worker.change_card(replace(worker.config, adapters=adapters))
        return results
