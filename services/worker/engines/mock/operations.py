"""What an operator can do to a running mock engine: adapters, sleep, faults, a profile."""

from __future__ import annotations

import cProfile
import pstats
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from services.common.errors import ErrorKind, SluiceError, invalid, not_found
from services.worker.engines.mock.faults import Faults


class Operations:
    """Answers the actions of `LLMEngine.control`.

    Args:
        adapters: loaded at the start.
        faults: from the start.
        changed: called after `asleep` or `faults` changed.

    Attributes:
        adapters: names that requests may use.
        asleep: the cache is gone and no request is taken.
        faults: what is wrong now.
    """

    def __init__(self, adapters: tuple[str, ...], faults: Faults, changed: Callable[[], None]) -> None:
        self.adapters = dict.fromkeys(adapters, "")
        self.faults = faults
        self.asleep = False
        self._changed = changed
        self._profile: cProfile.Profile | None = None

    def run(self, action: str, arguments: Mapping[str, str]) -> dict[str, str]:
        """One action; SluiceError when it is unknown, its arguments are wrong, or it makes no sense now."""
        actions = {
            "sleep": self._sleep,
            "wake": self._wake,
            "load_lora": self._load_lora,
            "unload_lora": self._unload_lora,
            "inject_fault": self._inject_fault,
            "start_profile": self._start_profile,
            "stop_profile": self._stop_profile,
        }
        if action not in actions:
            raise invalid(f"The mock engine does not have the action {action}.", param="action")
        return actions[action](arguments)

    def _sleep(self, arguments: Mapping[str, str]) -> dict[str, str]:
        level = arguments.get("level", "1")
        if level not in ("1", "2"):
            raise invalid(f"Sleep level {level!r} does not exist; it is 1 or 2.", param="level")
        self.asleep = True
        self._changed()
        return {"level": level}

    def _wake(self, arguments: Mapping[str, str]) -> dict[str, str]:
        self.asleep = False
        self._changed()
        return {}

    def _load_lora(self, arguments: Mapping[str, str]) -> dict[str, str]:
        name, path = _named(arguments), arguments.get("path", "")
        if name in self.adapters:
            raise SluiceError(ErrorKind.FAILED_PRECONDITION, f"LoRA adapter {name!r} is loaded already.", param="name")
        if path and not Path(path).is_dir():
            raise not_found(f"The folder {path} of LoRA adapter {name!r} does not exist.", param="path")
        self.adapters[name] = path
        return {"name": name}

    def _unload_lora(self, arguments: Mapping[str, str]) -> dict[str, str]:
        name = _named(arguments)
        if name not in self.adapters:
            raise not_found(f"LoRA adapter {name!r} is not loaded.", param="name", code="adapter_not_found")
        del self.adapters[name]
        return {"name": name}

    def _inject_fault(self, arguments: Mapping[str, str]) -> dict[str, str]:
        texts = [text for text in arguments.get("fault", "").split(",") if text.strip()]
        if not texts:
            raise invalid('The argument "fault" is missing; "none" ends all faults.', param="fault")
        self.faults = self.faults.with_all(texts)
        self._changed()
        return {"fault": str(self.faults)}

    def _start_profile(self, arguments: Mapping[str, str]) -> dict[str, str]:
        if self._profile is not None:
            raise SluiceError(ErrorKind.FAILED_PRECONDITION, "A profile is being taken already.", param="action")
        self._profile = cProfile.Profile()
        try:
            self._profile.enable()
        except ValueError as error:
            self._profile = None
            raise SluiceError(ErrorKind.FAILED_PRECONDITION, "Another profiler is active.", param="action") from error
        return {}

    def _stop_profile(self, arguments: Mapping[str, str]) -> dict[str, str]:
        profile, self._profile = self._profile, None
        if profile is None:
            raise SluiceError(ErrorKind.FAILED_PRECONDITION, "No profile is being taken.", param="action")
        profile.disable()
        with tempfile.NamedTemporaryFile(prefix="sluice-mock-", suffix=".pstats", delete=False) as file:
            pstats.Stats(profile).dump_stats(file.name)
        return {"path": file.name}


def _named(arguments: Mapping[str, str]) -> str:
    name = arguments.get("name", "")
    if not name:
        raise invalid('The argument "name" is missing: the name of the adapter.', param="name")
    return name
