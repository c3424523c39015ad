"""Finds engines by name: the kernel's, entry points of the group `sluice.engines`, or `package.module:Class`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from services.common.base.errors import SluiceError, invalid
from services.common.packages.extensions import ENGINES, UnusableExtension, find_extension, installed

if TYPE_CHECKING:
    from services.worker.contract.engine import LLMEngine

BUILT_IN = {
    "mock": "services.worker.engines.mock:MockEngine",
    "vllm": "services.worker.engines.vllm:VllmEngine",
    "http": "services.worker.engines.http.engine:HttpEngine",
}


def engine_names() -> list[str]:
    """Returns every name `find_engine` accepts, sorted; excludes `package.module:Class`."""
    return sorted({*BUILT_IN, *(extension.name for extension in installed(ENGINES))})


def own_names() -> list[str]:
    """Returns the names of the suite's own engines: the kernel's, then those of extensions."""
    return [*BUILT_IN, *(extension.name for extension in installed(ENGINES) if extension.is_own)]


def find_engine(name: str) -> type[LLMEngine]:
    """Imports and returns the engine class of a name.

    Raises:
        SluiceError: INVALID_ARGUMENT when the name is unknown, cannot be imported, or is not an LLMEngine.
    """
    from services.worker.contract.engine import LLMEngine  # imports numpy, which the names of engines do not need

    try:
        extension = None if name in BUILT_IN else find_extension(ENGINES, name)
        target = extension.target if extension else BUILT_IN.get(name, name)
        engine = extension.load() if extension else _import(name, target)
    except UnusableExtension as error:
        raise _unusable(str(error)) from error
    if not (isinstance(engine, type) and issubclass(engine, LLMEngine)):
        raise _unusable(f"Engine {name!r} is {target}, which is not a subclass of LLMEngine.")
    return engine


def _import(name: str, target: str) -> Any:
    if ":" not in target:
        raise _unusable(f"Engine {name!r} is unknown; choose from {', '.join(engine_names())} or package.module:Class.")
    module_name, _, class_name = target.partition(":")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise _unusable(f"Engine {name!r} cannot be loaded from {target}: {error}.") from error


def _unusable(message: str) -> SluiceError:
    return invalid(message, param="engine")
