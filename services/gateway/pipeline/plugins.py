"""Stages of the user's own: found by `package.module:Class`, checked, and put in the place of the project's."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, TypeVar

from services.gateway.pipeline.config import PipelineConfig
from services.gateway.pipeline.stages import (
    Components,
    PlaceStage,
    PostprocessStage,
    RouteStage,
    TokenizeStage,
)

H = TypeVar("H")

_METHODS = {"tokenize": "tokenize", "route": "route", "place": "place", "postprocess": "open", "handler": "start"}


class Plugins:
    """The stages that a configuration names, made; None where it names none.

    Raises:
        ValueError: a sentence that says what is wrong with a class.
    """

    def __init__(self, config: PipelineConfig, components: Components) -> None:
        self._config = config
        self._components = components
        self.tokenize: TokenizeStage | None = self._made("tokenize")
        self.route: RouteStage | None = self._made("route")
        self.place: PlaceStage | None = self._made("place")
        self.postprocess: PostprocessStage | None = self._made("postprocess")
        made = (self.tokenize, self.route, self.place, self.postprocess)
        self.all = tuple(stage for stage in made if stage is not None)

    def _made(self, stage: str) -> Any:
        path = self._config.stages.get(stage)
        return None if path is None else _make(stage, path, self._components)


def own_handler(config: PipelineConfig, components: Components, base: type[H]) -> H:
    """The pipeline that the configuration names, a subclass of the project's; ValueError as Hooks."""
    found = load("handler", config.handler)
    if not issubclass(found, base):
        raise ValueError(f"handler: {config.handler} must be a subclass of {base.__module__}.{base.__name__}.")
    handler: H = _make("handler", config.handler, config, components)
    return handler


def load(stage: str, path: str) -> type[Any]:
    """The class for a stage, or for the handler.

    Raises:
        ValueError: a sentence that names the stage, the path and what to change.
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ValueError(f"{stage}: {path} cannot be loaded: {error}.") from error
    except AttributeError as error:
        raise ValueError(f"{stage}: {module} has no {name}.") from error
    except Exception as error:
        raise ValueError(f"{stage}: {module} fails when it is imported: {type(error).__name__}: {error}.") from error
    if not isinstance(found, type):
        raise ValueError(f"{stage}: {path} is no class.")
    method = _METHODS[stage]
    function = getattr(found, method, None)
    waits = stage != "postprocess"
    if not callable(function) or inspect.iscoroutinefunction(function) is not waits:
        raise ValueError(f"{stage}: {path} needs a method `{'async ' if waits else ''}def {method}`.")
    return found


def _make(stage: str, path: str, *arguments: Any) -> Any:
    kind = load(stage, path)
    try:
        return kind(*arguments)
    except Exception as error:
        raise ValueError(f"{stage}: {path} cannot be made: {type(error).__name__}: {error}.") from error
