"""What can be done to a running SGLang engine besides generating."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from types import ModuleType
from typing import Any, TypeVar

from services.common.errors import ErrorKind, SluiceError, invalid

CONTROL_S = 120.0
"""Seconds SGLang's schedulers have to answer; loading weights is part of it."""

T = TypeVar("T")


class Controls:
    """Speaks with SGLang's schedulers through its manager.

    Args:
        sglang: the module `manager`.
        manager: of the started engine.
    """

    def __init__(self, sglang: ModuleType, manager: Any) -> None:
        self._sglang = sglang
        self._manager = manager

    async def clear_cache(self) -> None:
        """SluiceError(FAILED_PRECONDITION) while requests run: SGLang clears an idle cache only."""
        answer = await _answer(self._manager.flush_cache())
        if not answer.success:
            raise _refused("SGLang clears its cache only while no request runs; try again when it is idle.")

    async def run(self, action: str, arguments: Mapping[str, str]) -> dict[str, str]:
        """See LLMEngine.control."""
        handler = {
            "sleep": self._sleep,
            "wake": self._wake,
            "load_lora": self._load_lora,
            "unload_lora": self._unload_lora,
            "start_profile": self._start_profile,
            "stop_profile": self._stop_profile,
        }.get(action)
        if handler is None:
            raise _refused(f"The sglang engine does not have the action {action}.")
        return await handler(arguments)

    async def _sleep(self, arguments: Mapping[str, str]) -> dict[str, str]:
        if not self._manager.config_value("enable_memory_saver"):
            raise _refused("The sglang engine sleeps only when started with enable_memory_saver.")
        request = self._sglang.ReleaseMemoryOccupationReqInput(tags=_tags(arguments))
        await _answer(self._manager.release_memory_occupation(request))
        return {}

    async def _wake(self, arguments: Mapping[str, str]) -> dict[str, str]:
        if not self._manager.config_value("enable_memory_saver"):
            raise _refused("The sglang engine sleeps only when started with enable_memory_saver.")
        request = self._sglang.ResumeMemoryOccupationReqInput(tags=_tags(arguments))
        await _answer(self._manager.resume_memory_occupation(request))
        return {}

    async def _load_lora(self, arguments: Mapping[str, str]) -> dict[str, str]:
        name, path = _needed(arguments, "name"), _needed(arguments, "path")
        request = self._sglang.LoadLoRAAdapterReqInput(
            lora_name=name, lora_path=path, pinned=arguments.get("pinned", "") == "true"
        )
        _check_lora(await _answer(self._manager.load_lora_adapter(request)), "path")
        return {}

    async def _unload_lora(self, arguments: Mapping[str, str]) -> dict[str, str]:
        request = self._sglang.UnloadLoRAAdapterReqInput(lora_name=_needed(arguments, "name"))
        _check_lora(await _answer(self._manager.unload_lora_adapter(request)), "name")
        return {}

    async def _start_profile(self, arguments: Mapping[str, str]) -> dict[str, str]:
        activities = [part for part in arguments.get("activities", "").split(",") if part]
        steps = arguments.get("steps", "")
        if steps and not steps.isdecimal():
            raise invalid("steps must be a whole number.", param="steps")
        request = self._sglang.ProfileReq(
            output_dir=arguments.get("path") or None,
            num_steps=int(steps) if steps else None,
            activities=activities or None,
        )
        await _profile(self._manager.start_profile(request))
        return {}

    async def _stop_profile(self, arguments: Mapping[str, str]) -> dict[str, str]:
        await _profile(self._manager.stop_profile())
        return {}


async def _answer(asked: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(CONTROL_S):
            return await asked
    except TimeoutError as error:
        raise SluiceError(
            ErrorKind.RESPONSE_TIMEOUT, f"SGLang's schedulers did not answer within {CONTROL_S:g} s."
        ) from error


async def _profile(asked: Awaitable[Any]) -> None:
    try:
        await _answer(asked)
    except RuntimeError as error:
        raise _refused(f"SGLang refuses: {error}") from error


def _check_lora(answer: Any, param: str) -> None:
    if not answer.success:
        raise invalid(f"SGLang refuses the adapter: {answer.error_message}", param=param)


def _tags(arguments: Mapping[str, str]) -> list[str] | None:
    return [tag for tag in arguments.get("tags", "").split(",") if tag] or None


def _needed(arguments: Mapping[str, str], name: str) -> str:
    if not arguments.get(name):
        raise invalid(f"The argument {name!r} is missing.", param=name)
    return arguments[name]


def _refused(message: str) -> SluiceError:
    return SluiceError(ErrorKind.FAILED_PRECONDITION, message, param="action", code="unsupported_by_engine")
