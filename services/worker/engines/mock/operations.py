"""Control actions of the mock engine: adapters, sleep and faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from services.common.base.errors import ErrorKind, SluiceError, invalid, not_found
from services.worker.engines.mock.faults import Faults


class Operations:
    """Implements `LLMEngine.control`.

    Args:
        adapters: Adapters loaded at the start.
        faults: Faults active from the start.
        on_change: Called after `asleep` or `faults` changes.
        forget: Clears the caches of all ranks.

    Attributes:
        adapters: Folders of the loaded adapters by name.
        asleep: Whether the engine sleeps: no cache, and requests are rejected.
        faults: The active faults.
    """

    def __init__(
        self, adapters: tuple[str, ...], faults: Faults, on_change: Callable[[], None], forget: Callable[[], None]
    ) -> None:
        self.adapters = dict.fromkeys(adapters, "")
        self._known_adapters = set(adapters)
        self._forget = forget
        self.faults = faults
        self.asleep = False
        self._on_change = on_change

    def run(self, action: str, arguments: Mapping[str, str]) -> dict[str, str]:
        """Runs one action; raises SluiceError for an unknown action, invalid arguments or an invalid state."""
        actions = {
            "sleep": self._sleep,
            "wake": self._wake,
            "load_lora": self._load_lora,
            "unload_lora": self._unload_lora,
            "inject_fault": self._inject_fault,
        }
        if action not in actions:
            raise invalid(f"The mock engine does not support the action {action}.", param="action")
        return actions[action](arguments)

    def _sleep(self, arguments: Mapping[str, str]) -> dict[str, str]:
        level = arguments.get("level", "1")
        if level not in ("1", "2"):
            raise invalid(f"Invalid sleep level {level!r}; use 1 or 2.", param="level")
        self.asleep = True
        self._forget()
        self._on_change()
        return {"level": level}

    def _wake(self, arguments: Mapping[str, str]) -> dict[str, str]:
        self.asleep = False
        self._on_change()
        return {}

    def _load_lora(self, arguments: Mapping[str, str]) -> dict[str, str]:
        name, path = _adapter_name(arguments), arguments.get("path", "")
        if name in self.adapters:
            raise SluiceError(ErrorKind.FAILED_PRECONDITION, f"LoRA adapter {name!r} is already loaded.", param="name")
        if path and not Path(path).is_dir():
            raise not_found(f"The folder {path} of LoRA adapter {name!r} does not exist.", param="path")
        self.adapters[name] = path
        if name in self._known_adapters:  # what is in the folder now may be another adapter
            self._forget()
        self._known_adapters.add(name)
        return {"name": name}

    def _unload_lora(self, arguments: Mapping[str, str]) -> dict[str, str]:
        name = _adapter_name(arguments)
        if name not in self.adapters:
            raise not_found(f"LoRA adapter {name!r} is not loaded.", param="name", code="adapter_not_found")
        del self.adapters[name]
        return {"name": name}

    def _inject_fault(self, arguments: Mapping[str, str]) -> dict[str, str]:
        texts = [text for text in arguments.get("fault", "").split(",") if text.strip()]
        if not texts:
            raise invalid('Missing argument "fault"; "none" removes all faults.', param="fault")
        self.faults = self.faults.with_all(texts)
        self._on_change()
        return {"fault": str(self.faults)}


def _adapter_name(arguments: Mapping[str, str]) -> str:
    name = arguments.get("name", "")
    if not name:
        raise invalid('Missing argument "name"; send the name of the adapter.', param="name")
    return name
