"""The LoRA adapters of one engine: names that requests use, numbers and folders that vLLM uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import invalid, not_found


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter; numbers are never used again, for vLLM caches by them."""

    name: str
    number: int
    path: str


class Adapters:
    """Those that are loaded."""

    def __init__(self) -> None:
        self._loaded: dict[str, Adapter] = {}
        self._paths_before: dict[str, str] = {}
        self._numbers = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Sorted."""
        return tuple(sorted(self._loaded))

    def find(self, name: str) -> Adapter:
        """SluiceError(NOT_FOUND) when there is none of this name."""
        try:
            return self._loaded[name]
        except KeyError:
            raise not_found(f"LoRA adapter {name!r} is not loaded.", param="lora", code="adapter_not_found") from None

    def prepare(self, arguments: Mapping[str, str]) -> Adapter:
        """The adapter that `load_lora` asks for, not loaded yet.

        Raises:
            SluiceError: INVALID_ARGUMENT when name or folder are missing, or the name is taken.
        """
        name, path = arguments.get("name", ""), arguments.get("path", "")
        if not name or not path:
            raise invalid("Loading an adapter needs its name and its path.", param="arguments")
        if name in self._loaded:
            raise invalid(f"LoRA adapter {name!r} is loaded already; unload it first.", param="name")
        if not Path(path).is_dir():
            raise invalid(f"LoRA adapter {name!r}: {path} is no folder.", param="path", code="adapter_unusable")
        self._numbers += 1
        return Adapter(name, self._numbers, path)

    def add(self, adapter: Adapter) -> bool:
        """Takes it in; True when the name stood for another folder before, whose cached prefixes must go."""
        self._loaded[adapter.name] = adapter
        before = self._paths_before.setdefault(adapter.name, adapter.path)
        self._paths_before[adapter.name] = adapter.path
        return before != adapter.path

    def remove(self, name: str) -> None:
        """No request finds it any more."""
        self._loaded.pop(name, None)
