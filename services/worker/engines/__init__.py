"""Engines by name: built in, from the entry point group `sluice.engines`, or as `package.module:Class`."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

from services.common.errors import SluiceError, invalid
from services.worker.contract.engine import LLMEngine

ENTRY_POINT_GROUP = "sluice.engines"
BUILT_IN = {
    "mock": "services.worker.engines.mock:MockEngine",
    "vllm": "services.worker.engines.vllm:VllmEngine",
    "vllm-grpc": "services.worker.engines.vllm_grpc:VllmGrpcEngine",
    "sglang": "services.worker.engines.sglang:SglangEngine",
    "transformers": "services.worker.engines.transformers.engine:TransformersEngine",
}


def engine_names() -> list[str]:
    """Every name `find_engine` knows, sorted."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def find_engine(name: str) -> type[LLMEngine]:
    """The engine behind a name; imports it, so call it once at start.

    Raises:
        SluiceError: INVALID_ARGUMENT when there is none, or what the name stands for is no LLMEngine.
    """
    target = _target(name)
    module_name, _, class_name = target.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise _unusable(f"Engine {name!r} cannot be loaded from {target}: {error}.") from error
    if not (isinstance(found, type) and issubclass(found, LLMEngine)):
        raise _unusable(f"Engine {name!r} is {target}, which is no LLMEngine.")
    return found


def _target(name: str) -> str:
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return point.value
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" in name:
        return name
    raise _unusable(f"Engine {name!r} is unknown; choose from {', '.join(engine_names())} or package.module:Class.")


def _unusable(message: str) -> SluiceError:
    return invalid(message, param="engine")
