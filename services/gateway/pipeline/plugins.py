"""Loads custom stages and pipelines by `package.module:Class` and validates them."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from services.gateway.backends.placement.interfaces import PlaceStage, WorkerRouter
from services.gateway.pipeline.config import PipelineConfig
from services.gateway.pipeline.stages import Components, Handler, PostprocessStage, TokenizeStage

_METHODS = {"tokenize": "tokenize", "route": "route", "place": "place", "postprocess": "open", "handler": "start"}


class Plugins:
    """Holds instances of the custom stages of a configuration; None for stages without one.

    Raises:
        ValueError: a class cannot be loaded or constructed, or lacks a method.
    """

    def __init__(self, config: PipelineConfig, components: Components) -> None:
        stages = {stage: _make(stage, path, components) for stage, path in config.stages.items()}
        self.tokenize: TokenizeStage | None = stages.get("tokenize")
        self.route: WorkerRouter | None = stages.get("route")
        self.place: PlaceStage | None = stages.get("place")
        self.postprocess: PostprocessStage | None = stages.get("postprocess")
        self.all = tuple(stages.values())


def load_handler(config: PipelineConfig, components: Components) -> Handler:
    """Returns the handler of a configuration; raises ValueError as `Plugins`."""
    handler: Handler = _make("handler", config.handler, config, components)
    return handler


def load(stage: str, path: str) -> type[Any]:
    """Returns the class of a stage or of the handler.

    Raises:
        ValueError: the class cannot be loaded, or lacks the method of its stage.
    """
    module, _, name = path.partition(":")
    try:
        plugin = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ValueError(f"{stage}: {path} cannot be loaded: {error}.") from error
    except AttributeError as error:
        raise ValueError(f"{stage}: {module} has no {name}.") from error
    except Exception as error:
        raise ValueError(f"{stage}: importing {module} failed: {type(error).__name__}: {error}.") from error
    if not isinstance(plugin, type):
        raise ValueError(f"{stage}: {path} is not a class.")
    method = _METHODS[stage]
    function = getattr(plugin, method, None)
    is_async = stage != "postprocess"
    if not callable(function) or inspect.iscoroutinefunction(function) is not is_async:
        raise ValueError(f"{stage}: {path} needs a method `{'async ' if is_async else ''}def {method}`.")
    return plugin


def _make(stage: str, path: str, *arguments: Any) -> Any:
    kind = load(stage, path)
    try:
        return kind(*arguments)
    except Exception as error:
        raise ValueError(f"{stage}: constructing {path} failed: {type(error).__name__}: {error}.") from error
