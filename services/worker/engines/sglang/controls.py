"""Control actions of a running SGLang engine: cache, sleep, adapters and profiler."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from types import ModuleType
from typing import Any, TypeVar

from services.common.base.errors import ErrorKind, SluiceError, invalid

CONTROL_TIMEOUT_S = 120.0
"""Timeout for SGLang's schedulers to complete an action, including loading weights."""

T = TypeVar("T")


class Controls:
    """Runs control actions on SGLang's schedulers through its manager.

    Args:
        sglang: The module `manager`.
        manager: The started engine's manager.
    """

    def __init__(self, sglang: ModuleType, manager: Any) -> None:
        self._sglang = sglang
        self._manager = manager

    async def clear_cache(self) -> None:
        """Clears the cache; raises SluiceError(FAILED_PRECONDITION) while requests are in flight."""
        response = await _wait(self._manager.flush_cache())
        if not response.success:
            raise _rejected("SGLang cannot clear its cache while requests use it; try again when it is idle.")

    async def run(self, action: str, arguments: Mapping[str, str]) -> dict[str, str]:
        """Runs one action; see `LLMEngine.control`."""
        handler = {
            "sleep": self._sleep,
            "wake": self._wake,
            "load_lora": self._load_lora,
            "unload_lora": self._unload_lora,
            "start_profile": self._start_profile,
            "stop_profile": self._stop_profile,
        }.get(action)
        if handler is None:
            raise _rejected(f"The sglang engine does not support the action {action}.")
        return await handler(arguments)

    async def _sleep(self, arguments: Mapping[str, str]) -> dict[str, str]:
        self._check_can_sleep()
        request = self._sglang.ReleaseMemoryOccupationReqInput(tags=_names(arguments, "tags"))
        await _wait(self._manager.release_memory_occupation(request))
        return {}

    async def _wake(self, arguments: Mapping[str, str]) -> dict[str, str]:
        self._check_can_sleep()
        request = self._sglang.ResumeMemoryOccupationReqInput(tags=_names(arguments, "tags"))
        await _wait(self._manager.resume_memory_occupation(request))
        return {}

    def _check_can_sleep(self) -> None:
        if not self._manager.config_value("enable_memory_saver"):
            raise _rejected("The sglang engine cannot sleep; start the worker with the option enable_memory_saver.")

    async def _load_lora(self, arguments: Mapping[str, str]) -> dict[str, str]:
        name, path = _required(arguments, "name"), _required(arguments, "path")
        request = self._sglang.LoadLoRAAdapterReqInput(
            lora_name=name, lora_path=path, pinned=arguments.get("pinned", "") == "true"
        )
        _check_lora(await _wait(self._manager.load_lora_adapter(request)), "path")
        return {}

    async def _unload_lora(self, arguments: Mapping[str, str]) -> dict[str, str]:
        request = self._sglang.UnloadLoRAAdapterReqInput(lora_name=_required(arguments, "name"))
        _check_lora(await _wait(self._manager.unload_lora_adapter(request)), "name")
        return {}

    async def _start_profile(self, arguments: Mapping[str, str]) -> dict[str, str]:
        steps = arguments.get("steps", "")
        if steps and not steps.isdecimal():
            raise invalid("The argument 'steps' must be an integer.", param="steps")
        request = self._sglang.ProfileReq(
            output_dir=arguments.get("path") or None,
            num_steps=int(steps) if steps else None,
            activities=_names(arguments, "activities"),
        )
        await _profile(self._manager.start_profile(request))
        return {}

    async def _stop_profile(self, arguments: Mapping[str, str]) -> dict[str, str]:
        await _profile(self._manager.stop_profile())
        return {}


async def _wait(action: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(CONTROL_TIMEOUT_S):
            return await action
    except TimeoutError as error:
        raise SluiceError(
            ErrorKind.RESPONSE_TIMEOUT, f"SGLang's schedulers did not respond within {CONTROL_TIMEOUT_S:g} s."
        ) from error


async def _profile(action: Awaitable[Any]) -> None:
    try:
        await _wait(action)
    except RuntimeError as error:
        raise _rejected(f"SGLang rejected the action: {error}") from error


def _check_lora(response: Any, param: str) -> None:
    if not response.success:
        raise invalid(f"SGLang rejected the adapter: {response.error_message}", param=param)


def _names(arguments: Mapping[str, str], argument: str) -> list[str] | None:
    return [name for name in arguments.get(argument, "").split(",") if name] or None


def _required(arguments: Mapping[str, str], name: str) -> str:
    if not arguments.get(name):
        raise invalid(f"Missing argument {name!r}; send it with the action.", param=name)
    return arguments[name]


def _rejected(message: str) -> SluiceError:
    return SluiceError(ErrorKind.FAILED_PRECONDITION, message, param="action", code="unsupported_by_engine")
