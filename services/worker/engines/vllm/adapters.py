"""Maps the LoRA adapter names of requests to vLLM's adapter ids and folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.common.base.errors import invalid, not_found
from services.worker.kv_events.wire import LOAD_MARK


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter; numbers are never reused, because vLLM uses them as cache keys.

    Attributes:
        engine_name: its name at vLLM, which identifies cached blocks by it. Of a name that was loaded before it is
            another one each time, so that blocks of earlier loads are never used, whatever is in the folder now.
    """

    name: str
    number: int
    path: str
    engine_name: str


class Adapters:
    """Holds the loaded adapters."""

    def __init__(self) -> None:
        self._loaded: dict[str, Adapter] = {}
        self._known: set[str] = set()
        self._numbers = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the loaded adapters, sorted."""
        return tuple(sorted(self._loaded))

    def find(self, name: str) -> Adapter:
        """Returns a loaded adapter; raises SluiceError(NOT_FOUND) for an unknown name."""
        try:
            return self._loaded[name]
        except KeyError:
            raise not_found(f"LoRA adapter {name!r} is not loaded.", param="lora", code="adapter_not_found") from None

    def prepare(self, arguments: Mapping[str, str]) -> Adapter:
        """Returns a new adapter for the arguments of `load_lora`, without adding it.

        Raises:
            SluiceError: INVALID_ARGUMENT when the name or the folder is missing, or the name is in use.
        """
        name, path = arguments.get("name", ""), arguments.get("path", "")
        if not name or not path:
            raise invalid("Missing adapter name or path; send both as arguments.", param="arguments")
        if name in self._loaded:
            raise invalid(f"LoRA adapter {name!r} is already loaded; unload it first.", param="name")
        if not Path(path).is_dir():
            raise invalid(f"LoRA adapter {name!r}: {path} is not a folder.", param="path", code="adapter_unusable")
        self._numbers += 1
        engine_name = f"{name}{LOAD_MARK}{self._numbers}" if name in self._known else name
        self._known.add(name)
        return Adapter(name, self._numbers, path, engine_name)

    def add(self, adapter: Adapter) -> None:
        """Adds an adapter that vLLM has loaded."""
        self._loaded[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Removes an adapter, if loaded."""
        self._loaded.pop(name, None)
