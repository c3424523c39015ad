"""Control actions of a running vLLM: cache, adapters, sleep and profiler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from services.common.base.errors import ErrorKind, SluiceError, invalid
from services.worker.contract.capabilities import Capability
from services.worker.engines.vllm import library
from services.worker.engines.vllm.adapters import Adapters
from services.worker.engines.vllm.events import CacheEvents

SLEEP_LEVELS = ("1", "2")


class Controls:
    """Runs control actions on one engine.

    Args:
        llm: A started AsyncLLM.
        has_connector: Whether a KV connector also stores blocks outside the engine.
    """

    def __init__(self, llm: Any, adapters: Adapters, events: CacheEvents, *, has_connector: bool) -> None:
        self._llm = llm
        self._adapters = adapters
        self._events = events
        self._has_connector = has_connector
        self._actions: dict[str, tuple[Capability, Callable[[Mapping[str, str]], Awaitable[dict[str, str]]]]] = {
            "sleep": (Capability.SLEEP, self._sleep),
            "wake": (Capability.SLEEP, self._wake),
            "load_lora": (Capability.LORA_LOADING, self.load_lora),
            "unload_lora": (Capability.LORA_LOADING, self._unload_lora),
            "start_profile": (Capability.PROFILE, self._start_profile),
            "stop_profile": (Capability.PROFILE, self._stop_profile),
        }

    async def run(self, action: str, arguments: Mapping[str, str], available: Collection[Capability]) -> dict[str, str]:
        """Runs one action; raises SluiceError(FAILED_PRECONDITION) when the started engine does not support it."""
        capability, perform = self._actions.get(action, (None, None))
        if capability not in available or perform is None:
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                f"This vLLM does not support the action {action}.",
                param="action",
                code="unsupported_by_engine",
            )
        try:
            return await perform(arguments)
        except SluiceError:
            raise
        except Exception as error:
            raise library.error_of(error) from error

    async def clear_cache(self) -> None:
        """Clears the prefix cache; raises SluiceError(FAILED_PRECONDITION) while requests hold blocks."""
        try:
            cleared = await self._llm.reset_prefix_cache(reset_connector=self._has_connector)
        except Exception as error:
            raise library.error_of(error) from error
        if not cleared:
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                "vLLM cannot clear its cache while requests use it; try again when no requests are in flight.",
                code="cache_in_use",
            )
        self._events.forget()

    async def load_lora(self, arguments: Mapping[str, str]) -> dict[str, str]:
        """Loads an adapter from a folder that the engine process can read."""
        adapter = self._adapters.prepare(arguments)
        try:
            loaded = await self._llm.add_lora(library.lora_request(adapter.engine_name, adapter.number, adapter.path))
        except Exception as error:
            raise _unusable(adapter.name, str(library.error_of(error))) from error
        if not loaded:
            raise _unusable(adapter.name, "vLLM rejected it")
        self._adapters.add(adapter)
        return {}

    async def _unload_lora(self, arguments: Mapping[str, str]) -> dict[str, str]:
        adapter = self._adapters.find(arguments.get("name", ""))
        self._adapters.remove(adapter.name)
        await self._llm.remove_lora(adapter.number)
        return {}

    async def _sleep(self, arguments: Mapping[str, str]) -> dict[str, str]:
        level = arguments.get("level") or "1"
        if level not in SLEEP_LEVELS:
            raise invalid(f"Invalid sleep level {level!r}; use 1 or 2.", param="level")
        await self._llm.sleep(int(level))
        self._events.forget()
        return {"level": level}

    async def _wake(self, arguments: Mapping[str, str]) -> dict[str, str]:
        await self._llm.wake_up()
        return {}

    async def _start_profile(self, arguments: Mapping[str, str]) -> dict[str, str]:
        await self._llm.start_profile()
        return {}

    async def _stop_profile(self, arguments: Mapping[str, str]) -> dict[str, str]:
        await self._llm.stop_profile()
        return {}


def _unusable(name: str, why: str) -> SluiceError:
    return invalid(f"LoRA adapter {name!r} cannot be loaded: {why}.", param="name", code="adapter_unusable")
