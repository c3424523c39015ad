"""The actions of the `Control` RPC, including their effect on admission, registration and the model card."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from services.common.base.errors import ErrorKind, SluiceError, internal, invalid, not_found
from services.worker.contract.capabilities import Capability
from services.worker.generation.validation import require
from services.worker.serving.worker import Worker

log = logging.getLogger(__name__)

ASLEEP = "asleep"
CONTROL_S = 300.0
QUIET_S = 30.0

_REQUIRED_CAPABILITIES = {
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
    """Runs control actions, one at a time.

    Args:
        resync: sends a cache snapshot to the router; returns False when the worker is not registered.
    """

    def __init__(self, worker: Worker, resync: Callable[[], bool]) -> None:
        self._worker = worker
        self._resync = resync
        self._lock = asyncio.Lock()

    async def run(self, action: str, arguments: Mapping[str, str]) -> dict[str, str]:
        """Runs the action with this lower-case name.

        Raises:
            SluiceError: FAILED_PRECONDITION when the engine does not support the action or the worker's state does not
                permit it, INVALID_ARGUMENT for wrong arguments, RESPONSE_TIMEOUT when the engine does not respond.
        """
        config = self._worker.config
        if action in _REQUIRED_CAPABILITIES:
            require(_REQUIRED_CAPABILITIES[action], config, "action")
        try:
            async with asyncio.timeout(CONTROL_S), self._lock:
                return await self._run(action, arguments)
        except TimeoutError as error:
            raise SluiceError(ErrorKind.RESPONSE_TIMEOUT, f"The engine did not finish {action} in time.") from error
        except SluiceError:
            raise
        except Exception as error:
            log.exception("control action failed", extra={"action": action})
            raise internal(f"The engine failed to run {action}; see the worker's log.") from error

    async def _run(self, action: str, arguments: Mapping[str, str]) -> dict[str, str]:
        match action:
            case "resync":
                return self._resync_router()
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

    def _resync_router(self) -> dict[str, str]:
        if not self._resync():
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                "The worker is not registered with a router; check --routers and its log.",
                param="action",
            )
        return {}

    async def _sleep(self, arguments: Mapping[str, str]) -> dict[str, str]:
        """Suspends admission, waits for running requests, then puts the engine to sleep."""
        error = SluiceError(
            ErrorKind.UNAVAILABLE, "The worker is asleep; wake it or use another worker.", code="asleep"
        )
        gate = self._worker.gate
        was_awake = gate.suspend(ASLEEP, error)
        try:
            async with asyncio.timeout(QUIET_S):
                await self._worker.wait_idle()
            return await self._worker.engine.control("sleep", arguments)
        except TimeoutError as timeout:
            gate.resume(ASLEEP)
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                f"{self._worker.live_requests} requests are still running after {QUIET_S:.0f} seconds; "
                "abort them first.",
                param="action",
            ) from timeout
        except BaseException:
            if was_awake:  # a worker that was already asleep stays so
                gate.resume(ASLEEP)
            raise

    async def _change_adapters(self, action: str, arguments: Mapping[str, str]) -> dict[str, str]:
        worker, name = self._worker, arguments.get("name", "")
        if not name:
            raise invalid('The argument "name" is missing; give the name of the adapter.', param="name")
        if name == worker.config.model:
            raise invalid(f"{name!r} is the name of the model; give the adapter a different name.", param="name")
        if (name in worker.config.adapters) == (action == "load_lora"):
            raise (
                SluiceError(
                    ErrorKind.FAILED_PRECONDITION,
                    f"LoRA adapter {name!r} is already loaded; unload it first.",
                    param="name",
                    code="adapter_loaded",
                )
                if action == "load_lora"
                else not_found(f"LoRA adapter {name!r} is not loaded.", param="name", code="adapter_not_found")
            )
        results = await worker.engine.control(action, arguments)
        adapters = tuple(adapter for adapter in worker.config.adapters if adapter != name)
        if action == "load_lora":
            adapters = (*adapters, name)
        worker.change_card(replace(worker.config, adapters=adapters))
        return results
