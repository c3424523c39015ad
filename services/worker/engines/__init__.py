"""Finds engines by name: built-in ones, entry points of the group `sluice.engines`, or `package.module:Class`."""

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
    "http": "services.worker.engines.http:HttpEngine",
    "openai": "services.worker.engines.openai:OpenAiEngine",
    "sglang": "services.worker.engines.sglang:SglangEngine",
    "transformers-classifier": "services.worker.engines.transformers.classifier:ClassifierEngine",
    "transformers": "services.worker.engines.transformers.engine:TransformersEngine",
}


def engine_names() -> list[str]:
    """Returns every name `find_engine` accepts, sorted; excludes `package.module:Class`."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def find_engine(name: str) -> type[LLMEngine]:
    """Imports and returns the engine class of a name.

    Raises:
        SluiceError: INVALID_ARGUMENT when the name is unknown, cannot be imported, or is not an LLMEngine.
    """
    target = _target(name)
    module_name, _, class_name = target.partition(":")
    try:
        engine = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise _unusable(f"Engine {name!r} cannot be loaded from {target}: {error}.") from error
    if not (isinstance(engine, type) and issubclass(engine, LLMEngine)):
        raise _unusable(f"Engine {name!r} is {target}, which is not a subclass of LLMEngine.")
    return engine


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
